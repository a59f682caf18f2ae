"""Text as ids: bytes, and tokens of Hugging Face's tokenizers; special tokens; refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dslpar.core.errors import DslparError
from dslpar.data import tokens
from dslpar.data.source import find_source, make_samples
from dslpar.layout.resolve import Job, resolve
from dslpar.models.gpt import section
from dslpar.schema import sections
from dslpar.schema.datasets import DATASETS
from dslpar.schema.tokenizer_file import read_tokenizer
from tests.support.versions import HAS_TRANSFORMERS, NO_TRANSFORMERS

needs_tokenizers = pytest.mark.skipif(not HAS_TRANSFORMERS, reason=NO_TRANSFORMERS)
BERT = sections.OtherModel(
    target="transformers.BertForPreTraining", args={"config": {"vocab_size": 400, "max_position_embeddings": 16}}
)
GPT = section.GPT(num_layers=1, hidden_size=8, num_heads=2, vocab_size=400, max_seq_len=16)
TEXT = "the quick brown fox\njumps over the lazy dog. Ümläute, too!\n" * 40


def job(folder: Path, kind: str = "text", model: Any = GPT, **data: Any) -> Job:
    spec = sections.Spec(model=model, data=DATASETS[kind](**data), batch=sections.Batch(global_size=4))
    return resolve(spec, 1, str(folder / "cfg.py"))


def trained(folder: Path, kind: str) -> Path:
    """Write a small tokenizer of that kind, as the library does."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    if kind == "wordpiece":
        made = Tokenizer(models.WordPiece(unk_token="[UNK]"))
        made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
        trainer: Any = trainers.WordPieceTrainer(vocab_size=70, special_tokens=special, show_progress=False)
    elif kind == "bpe":
        made = Tokenizer(models.BPE())
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        special = ["<|endoftext|>"]
        trainer = trainers.BpeTrainer(
            vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False
        )
    else:
        made = Tokenizer(models.Unigram())
        made.pre_tokenizer = pre_tokenizers.Metaspace()
        special = ["<pad>", "</s>", "<unk>", *(f"<extra_id_{number}>" for number in range(8))]
        trainer = trainers.UnigramTrainer(vocab_size=80, special_tokens=special, unk_token="<unk>", show_progress=False)
    made.train_from_iterator([TEXT], trainer)
    folder.mkdir(exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


@needs_tokenizers
@pytest.mark.parametrize("kind", ["wordpiece", "bpe", "unigram"])
def test_ids_are_the_library_s(tmp_path: Path, kind: str) -> None:
    from tokenizers import Tokenizer

    path = trained(tmp_path / "tokenizer", kind)
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text(TEXT + name, encoding="utf-8")
    config = job(tmp_path, files=("a.txt", "b.txt"), tokenizer="tokenizer", eval_fraction=0.0)
    samples = make_samples(config, find_source(config).train, ())
    library = Tokenizer.from_file(str(path))
    end = {"bpe": ["<|endoftext|>"], "unigram": ["</s>"]}.get(kind, ["[SEP]"])
    ends = [library.token_to_id(token) for token in end]
    expected = []
    for name in ("a.txt", "b.txt"):
        expected += [*library.encode(TEXT + name, add_special_tokens=False).ids, *ends]
    assert samples.ids.tolist() == expected  # type: ignore[attr-defined]
    ids, labels = samples.batch([0, 2], [0, 1])
    assert ids[1].tolist() == expected[32:48]
    assert labels[1].tolist() == expected[33:49]


@needs_tokenizers
@pytest.mark.parametrize("kind", ["wordpiece", "bpe", "unigram"])
def test_the_file_is_read_as_the_library_reads_it(tmp_path: Path, kind: str) -> None:
    from tokenizers import Tokenizer

    path = trained(tmp_path, kind)
    library, found = Tokenizer.from_file(str(path)), read_tokenizer(str(tmp_path))
    assert dict(found.ids) == library.get_vocab(with_added_tokens=True)
    assert found.size == library.get_vocab_size(with_added_tokens=True)
    assert found.problem == ""
    assert found.special("mask") == library.token_to_id("[MASK]")
    assert found.sentinels == tuple(library.token_to_id(f"<extra_id_{n}>") for n in range(8 * (kind == "unigram")))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"mask_token": {"content": next(iter(found.ids))}}))
    assert read_tokenizer(str(path)).special("mask") == found.ids[next(iter(found.ids))]


@needs_tokenizers
def test_words_of_a_tokenizer_are_told_whole(tmp_path: Path) -> None:
    path = trained(tmp_path / "tokenizer", "wordpiece")
    (tmp_path / "a.txt").write_text(TEXT, encoding="utf-8")
    config = job(tmp_path, "mlm", BERT, files=("a.txt",), tokenizer="tokenizer", whole_words=True, mask_prob=0.5)
    samples = make_samples(config, find_source(config).train, ("input_ids", "attention_mask", "token_type_ids"))
    names = {number: token for token, number in read_tokenizer(str(path)).ids.items()}
    goes_on = 0
    for number in range(samples.num_samples):
        (ids, _, _), (labels, _) = samples.batch([number], [number])
        whole = [names[int(label if label != -100 else id)] for id, label in zip(ids[0], labels[0], strict=True)]
        told = (labels[0] != -100).tolist()
        for place in range(1, 16):
            if whole[place].startswith("##") and whole[place - 1] not in ("[CLS]", "[SEP]"):
                goes_on += told[place]
                assert told[place] == told[place - 1]
    assert goes_on, "pieces of words were told at times"


@needs_tokenizers
def test_another_tokenizer_is_other_data(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(TEXT, encoding="utf-8")
    path = trained(tmp_path / "tokenizer", "bpe")
    with_it = job(tmp_path, files=("a.txt",), tokenizer="tokenizer")
    before = find_source(with_it).identity
    assert before != find_source(job(tmp_path, files=("a.txt",))).identity
    values = json.loads(path.read_text())
    values["added_tokens"].append({**values["added_tokens"][0], "id": 300, "content": "<new>"})
    path.write_text(json.dumps(values))
    assert find_source(with_it).identity != before


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("no json", "it is not JSON"),
        ("[]", "it is not a tokenizer.json"),
        ('{"model": {"vocab": {"a": "b"}}}', "it is not JSON"),
        ('{"model": {"vocab": {"a": 0}}}', "has no token 'cls'"),
    ],
)
def test_a_tokenizer_that_is_none(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "a.txt").write_text(TEXT, encoding="utf-8")
    (tmp_path / "tokenizer.json").write_text(text)
    config = job(tmp_path, "mlm", BERT, files=("a.txt",), tokenizer="tokenizer.json")
    with pytest.raises(DslparError, match=f"BAT212.*{said}"):
        find_source(config)


def test_bytes_come_after_special_tokens(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(TEXT, encoding="utf-8")
    config = job(tmp_path, "mlm", BERT, files=("a.txt",), eval_fraction=0.0)
    found = tokens.vocabulary(config)
    ids = tokens.read_ids(find_source(config).train.files, found)
    assert ids.tolist() == [byte + 4 for byte in TEXT.encode()]
    assert tokens.ordinary_ids(found).tolist() == list(range(4, 260))
    starts = tokens.word_starts(np.array([byte + 4 for byte in b"ab, c2_d  e"]), found)
    assert starts.tolist() == [True, False, True, True, True, False, False, False, True, True, True]


def test_too_little_text_is_told_when_it_is_known(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x" * 40)
    config = job(tmp_path, "mlm", BERT, files=("a.txt",), eval_fraction=0.0)
    with pytest.raises(DslparError, match=r"BAT210.*4 samples, but the text has 3 of 16"):
        make_samples(config, find_source(config).train, ())
