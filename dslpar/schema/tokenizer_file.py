"""Files of Hugging Face's tokenizers: read the vocabulary and special tokens as JSON, without the library.

found = read_tokenizer("tokenizer.json")      # or the folder that holds it
found.size, found.special("mask")             # 30522, 103
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from dslpar.core.regular_file import read_bounded

TOKENIZER_JSON, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
SPELLINGS: Mapping[str, tuple[str, ...]] = {
    "pad": ("[PAD]", "<pad>"),
    "cls": ("[CLS]", "<s>"),
    "sep": ("[SEP]", "</s>"),
    "mask": ("[MASK]", "<mask>"),
    "eos": ("</s>", "<|endoftext|>", "<|end_of_text|>", "<eos>", "[SEP]"),
}
"""Purpose of a special token -> its spellings in BERT, RoBERTa, T5, GPT-2 and Llama."""
_SENTINEL = re.compile(r"<extra_id_(\d+)>")
_MAX_BYTES = 128 << 20


class TokenizerFile(NamedTuple):
    """The ids of a tokenizer.json."""

    path: str
    ids: Mapping[str, int] = {}
    """Token -> id, including added tokens."""
    special_ids: frozenset[int] = frozenset()
    """Ids of special tokens, which are not text."""
    names: Mapping[str, str] = {}
    """Purpose of a special token, such as "mask" -> its text, if tokenizer_config.json has it."""
    digest: str = ""
    """SHA-256 of the file."""
    problem: str = ""
    """Reason why the file cannot be used; empty if it can."""
    missing: bool = False
    """Whether the file does not exist."""

    @property
    def size(self) -> int:
        """The vocabulary size that a model needs: the largest id plus one."""
        return max(self.ids.values(), default=-1) + 1

    def special(self, name: str) -> int | None:
        """Return the id of a special token, by its purpose in SPELLINGS, or "bos"; None if there is none."""
        given = (self.names[name],) if name in self.names else SPELLINGS.get(name, ())
        return next((self.ids[text] for text in given if text in self.ids), None)

    @property
    def sentinels(self) -> tuple[int, ...]:
        """Ids of T5's <extra_id_0>, <extra_id_1> and so on."""
        found = {int(match[1]): id for text, id in self.ids.items() if (match := _SENTINEL.fullmatch(text))}
        return tuple(found[number] for number in sorted(found))


def read_tokenizer(path: str) -> TokenizerFile:
    """Read a tokenizer.json, or that of a folder; a mistake is in the result's `problem`."""
    folder = path if os.path.isdir(path) else os.path.dirname(path)
    file_path = os.path.join(path, TOKENIZER_JSON) if os.path.isdir(path) else path
    try:
        text = read_bounded(file_path, _MAX_BYTES)
    except FileNotFoundError:
        return TokenizerFile(file_path, problem="there is no such file", missing=True)
    except OSError as error:
        return TokenizerFile(file_path, problem=error.strerror or "it cannot be read")
    if len(text) > _MAX_BYTES:
        return TokenizerFile(file_path, problem=f"it is longer than {_MAX_BYTES:,} bytes")
    try:
        ids, special_ids = _ids_of(json.loads(text))
    except (ValueError, RecursionError):
        return TokenizerFile(file_path, problem="it is not JSON")
    except (KeyError, TypeError, IndexError, AttributeError):
        return TokenizerFile(file_path, problem="it is not a tokenizer.json of Hugging Face's tokenizers")
    digest = hashlib.sha256(text).hexdigest()
    return TokenizerFile(file_path, ids, special_ids, _names_in(folder), digest)


def _ids_of(values: Any) -> tuple[dict[str, int], frozenset[int]]:
    """Return token -> id, and the ids of special tokens.

    Raises:
        KeyError, TypeError, IndexError, AttributeError, ValueError: the file has another form.
    """
    vocabulary = values["model"]["vocab"]
    if isinstance(vocabulary, list):  # Unigram has pairs of token and score
        vocabulary = {item[0]: number for number, item in enumerate(vocabulary)}
    ids = {str(token): int(number) for token, number in vocabulary.items()}
    added = values.get("added_tokens") or ()
    ids |= {str(item["content"]): int(item["id"]) for item in added}
    if not ids or min(ids.values()) < 0:
        raise KeyError("vocab")
    return ids, frozenset(int(item["id"]) for item in added if item.get("special"))


def _names_in(folder: str) -> dict[str, str]:
    """Return purpose -> text of the special tokens in tokenizer_config.json; empty if it cannot be read."""
    try:
        values = json.loads(read_bounded(os.path.join(folder, TOKENIZER_CONFIG), _MAX_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    found = {}
    for name in (*SPELLINGS, "bos") if isinstance(values, dict) else ():
        token = values.get(f"{name}_token")
        text = token.get("content") if isinstance(token, dict) else token
        if isinstance(text, str):
            found[name] = text
    return found
