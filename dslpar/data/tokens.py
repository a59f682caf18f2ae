"""Encode text as ids: bytes, or tokens of Hugging Face's tokenizers, which are imported only if a config names one."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dslpar.core.catalog import raise_finding
from dslpar.data import corpus
from dslpar.layout.resolve import Job
from dslpar.schema.sections import OtherModel, TokenModel
from dslpar.schema.vocabularies import BYTES, Vocabulary, vocabulary_of

Ids = NDArray[Any]
_CONTINUES = ("##",)
"""Prefixes of tokens that continue a word, in WordPiece."""
_BEGINS = ("\u0120", "\u2581")
"""Prefixes of tokens that begin a word: the blank of byte-level BPE and that of SentencePiece."""


def vocabulary(job: Job) -> Vocabulary:
    """Return the vocabulary of a job's text. Raises: DslparError: its tokenizer is unusable."""
    found = vocabulary_of(job.spec.data, job.path, job.spec.model, job.seq_len)
    if found.tokenizer is not None:
        file = found.tokenizer
        hint = "name a tokenizer.json that Hugging Face's tokenizers wrote, or a folder with one"
        if file.problem:
            raise_finding("BAT212", f"{file.path!r}: {file.problem}", hint, job.path, "data.tokenizer")
        if found.missing:
            message = f"{file.path!r} has no token {found.missing!r}, which data of this type need"
            raise_finding("BAT212", message, f"{hint}, trained with that token", job.path, "data.tokenizer")
        if importlib.util.find_spec("tokenizers") is None:
            message = "data.tokenizer needs the package tokenizers, which is not installed"
            raise_finding("BAT212", message, "pip install dslpar[hf]", job.path, "data.tokenizer")
    return found


def vocab_size_of(job: Job) -> int | None:
    """Return the size of the model's vocabulary; None if it is unknown."""
    model = job.spec.model
    if isinstance(model, TokenModel):
        return model.vocab_size
    config = model.transformers if isinstance(model, OtherModel) else None
    return config.size("vocab") if config is not None else None


def read_ids(slices: Iterable[corpus.FileSlice], found: Vocabulary, ends: bool = False) -> Ids:
    """Return the concatenated ids of all slices, [tokens], in the smallest dtype that holds them.

    With `ends`, an end-of-text token follows each file if the tokenizer has one. With a tokenizer, bytes that are not
    valid UTF-8 are replaced.
    """
    if found.tokenizer is None:
        # Kept as uint8: int64 would take eight times as much memory on every rank.
        text = np.frombuffer(corpus.read(slices), np.uint8)
        return text + np.uint16(found.first_byte) if found.first_byte else text
    return encode((corpus.read([each]).decode("utf-8", "replace") for each in slices), found, ends)


def encode(texts: Iterable[str], found: Vocabulary, ends: bool = False) -> Ids:
    """Return the concatenated ids of texts, as `read_ids` does."""
    if found.tokenizer is None:
        return np.frombuffer(b"".join(text.encode("utf-8", "replace") for text in texts), np.uint8)
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(found.tokenizer.path)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    dtype = np.uint16 if found.size <= 1 << 16 else np.uint32
    end = [found.special["eos"]] if ends and "eos" in found.special else []
    parts: list[Ids] = []
    for batch in _batches(texts):
        encoded = tokenizer.encode_batch_fast(batch, add_special_tokens=False)
        parts += [np.array([*each.ids, *end], dtype) for each in encoded]
    return np.concatenate(parts) if parts else np.zeros(0, dtype)


_BATCH_CHARACTERS = 16 << 20
"""Characters of text that are encoded together, by all threads."""


def _batches(texts: Iterable[str]) -> Iterable[list[str]]:
    batch: list[str] = []
    size = 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size >= _BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def ordinary_ids(found: Vocabulary) -> Ids:
    """Return the ids of ordinary tokens, that is, all tokens without special ones and sentinels."""
    if found.tokenizer is None:
        return np.arange(found.first_byte, found.first_byte + BYTES)
    special = {*found.tokenizer.special_ids, *found.special.values(), *found.sentinels}
    return np.array(sorted(set(found.tokenizer.ids.values()) - special))


def word_starts(ids: Ids, found: Vocabulary) -> NDArray[np.bool_]:
    """Return bool [tokens]: whether a word begins at each token; the first token always begins one."""
    starts: NDArray[np.bool_]
    if found.tokenizer is None:
        is_letter = np.isin(ids.astype(np.int64) - found.first_byte, _LETTERS)
        starts = ~is_letter | ~np.concatenate([[False], is_letter[:-1]])
    else:
        starts = _starts_word(found)[ids]
    starts[:1] = True
    return starts


_LETTERS = np.array([byte for byte in range(BYTES) if chr(byte).isalnum() or byte == ord("_") or byte >= 128])


def _starts_word(found: Vocabulary) -> NDArray[np.bool_]:
    """Return bool [ids]: whether each token begins a word, by the tokenizer's prefixes."""
    assert found.tokenizer is not None
    ids = found.tokenizer.ids
    table = np.ones(found.size, np.bool_)
    marks_beginning = any(token.startswith(_BEGINS) for token in ids)
    for token, number in ids.items():
        begins = token.startswith(_BEGINS) if marks_beginning else not token.startswith(_CONTINUES)
        table[number] = begins or number in found.tokenizer.special_ids
    return table


def windows(ids: Ids, starts: Sequence[int] | Ids, length: int) -> Ids:
    """Return the `length` ids from each of `starts` on, int64 [len(starts), length]."""
    found: Ids = ids[np.asarray(starts)[:, None] + np.arange(length)].astype(np.int64)
    return found
