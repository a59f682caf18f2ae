"""Train a tokenizer on text files with Hugging Face's tokenizers.

The same files in the same order give the same byte-level BPE. For unigram and wordpiece, the library breaks ties by the
order of a hash table, which differs between processes.

GPT-2 has byte-level BPE: all bytes are in the vocabulary, so no token is unknown. T5 has unigram, BERT wordpiece.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dslpar.core.catalog import raise_finding
from dslpar.core.fsync import fsync
from dslpar.data.documents import Form, cut, documents_of, find_files
from dslpar.schema.tokenizer_file import TOKENIZER_CONFIG, TOKENIZER_JSON

SPECIAL_TOKENS = {
    "bpe": ["<|endoftext|>"],
    "unigram": ["<pad>", "</s>", "<unk>"],
    "wordpiece": ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"],
}
_ROLES = {"<pad>": "pad", "</s>": "eos", "<unk>": "unk", "<|endoftext|>": "eos", "<s>": "bos", "<mask>": "mask"}
_ROLES |= {f"[{name.upper()}]": name for name in ("pad", "unk", "cls", "sep", "mask")}


def train_tokenizer(
    paths: Sequence[str],
    output: str,
    vocab_size: int,
    model: str = "bpe",
    special_tokens: Sequence[str] | None = None,
    json_key: str = "text",
) -> int:
    """Write tokenizer.json and tokenizer_config.json to a new folder; return the size of the vocabulary.

    Raises:
        DslparError: a file cannot be read, the folder already exists or cannot be written, `vocab_size` is too small,
            or the package tokenizers is missing.
    """
    if importlib.util.find_spec("tokenizers") is None:
        message = "the package tokenizers is not installed"
        raise_finding("BAT212", message, "pip install dslpar[hf]", output)
    folder, files = Path(os.path.abspath(output)), find_files(paths)
    if os.path.lexists(folder):
        raise_finding("BAT215", f"{folder} already exists", "name another folder: nothing is overwritten", str(folder))
    special = list(special_tokens or SPECIAL_TOKENS[model])
    least = len(special) + (_BYTES if model == "bpe" else 1)
    if vocab_size < least:
        hint = f"--vocab-size {least} or more"
        raise_finding(
            "BAT212", f"{vocab_size} tokens are too few for the special tokens and the alphabet", hint, str(folder)
        )
    tokenizer, trainer = _made(model, vocab_size, special)
    form = Form(json_key)
    texts = (text.decode("utf-8", "replace") for shard in cut(files, form) for text in documents_of(shard, form))
    tokenizer.train_from_iterator(texts, trainer)
    unfinished = folder.with_name(folder.name + ".part")
    try:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        tokenizer.save(str(unfinished / TOKENIZER_JSON))
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        # The first special token of a BPE is the end-of-text token, whatever its name.
        roles = {f"{_ROLES[token]}_token": token for token in special if token in _ROLES}
        config |= {"eos_token": special[0]} | roles if model == "bpe" else roles
        (unfinished / TOKENIZER_CONFIG).write_text(json.dumps(config, indent=1) + "\n")
        fsync(*unfinished.iterdir(), unfinished)
        unfinished.rename(folder)
        fsync(folder.parent)
    except OSError as error:
        raise_finding("BAT215", f"cannot write {error.filename}: {error.strerror}", "make room", str(folder))
    return int(tokenizer.get_vocab_size(with_added_tokens=True))


_BYTES = 256


def _made(model: str, vocab_size: int, special: list[str]) -> tuple[Any, Any]:
    """Return an untrained tokenizer and its trainer."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    sizes: dict[str, Any] = {"vocab_size": vocab_size, "special_tokens": special, "show_progress": False}
    if model == "bpe":
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        return tokenizer, trainers.BpeTrainer(**sizes, initial_alphabet=alphabet)
    unknown = next((token for token in special if _ROLES.get(token) == "unk"), special[0])
    if model == "unigram":
        tokenizer = Tokenizer(models.Unigram())
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        tokenizer.decoder = decoders.Metaspace()
        return tokenizer, trainers.UnigramTrainer(**sizes, unk_token=unknown)
    tokenizer = Tokenizer(models.WordPiece(unk_token=unknown))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=False)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer, trainers.WordPieceTrainer(**sizes)
