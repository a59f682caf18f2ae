"""The vocabulary of a run's text: ids of a tokenizer or of bytes, and of special tokens. No torch, no tokenizers.

    vocabulary = vocabulary_of(spec.data, "configs/bert.py", spec.model)
    vocabulary.size, vocabulary.special["mask"]

For next-token prediction, bytes are ids 0 to 255. If there are special tokens, they come before the bytes, as in ByT5.
For masked text, ids 0 to 3 are padding, class, separator and mask, and bytes start at 4. For spans, ids 0 to 2 are
padding, end and unknown, bytes start at 3, and sentinels are the last ids of the model's vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from dslpar.schema.datasets import (
    ChatData,
    Data,
    HuggingFaceData,
    MaskedTextData,
    SpanTextData,
    TextData,
    TokensData,
    absolute_path,
    type_name,
)
from dslpar.schema.sections import Model, OtherModel
from dslpar.schema.token_folders import read_token_folder
from dslpar.schema.tokenizer_file import SPELLINGS, TokenizerFile, read_tokenizer

BYTES = 256
"""Vocabulary size of byte-level text."""
_NEEDED: Mapping[str, tuple[str, ...]] = {"mlm": ("cls", "sep", "mask"), "span": ("eos",)}


class Vocabulary(NamedTuple):
    """Vocabulary of a run's text: its size, special tokens and tokenizer."""

    size: int
    """Vocabulary size that a model needs: the largest id plus one."""
    special: Mapping[str, int]
    """Purpose -> id of a special token, for those of "pad", "cls", "sep", "mask" and "eos" that exist."""
    sentinels: tuple[int, ...] = ()
    """Ids of T5's sentinels, in the order in which they occur in a sample."""
    first_byte: int = 0
    """The id of byte 0, if tokens are bytes."""
    tokenizer: TokenizerFile | None = None
    missing: str = ""
    """A special token that the type of data needs and the tokenizer lacks; empty if it lacks none."""


class SpanLengths(NamedTuple):
    """Numbers of tokens in T5's samples."""

    text: int
    """Tokens of text from which a sample is made."""
    noise: int
    """Tokens of the text that are in spans."""
    spans: int
    """Number of spans."""
    target: int
    """Tokens of the decoder's sample, with padding."""

    @property
    def is_full(self) -> bool:
        """Return whether the decoder's sample has no padding."""
        return self.noise + self.spans + 1 == self.target


def vocabulary_of(data: Data, config_path: str, model: Model | OtherModel, seq_len: int = 0) -> Vocabulary:
    """Return the vocabulary of text or token data, and an empty one for other data.

    `seq_len` determines the number of T5's sentinels.
    """
    if isinstance(data, TokensData):
        return _vocabulary_of_tokens(absolute_path(config_path, data.path))
    if not isinstance(data, TextData | ChatData | HuggingFaceData) or (
        isinstance(data, HuggingFaceData) and data.text_column is None
    ):
        return Vocabulary(0, {})
    config = model.transformers if isinstance(model, OtherModel) else None
    pad = config.values.get("pad_token_id") if config is not None else None
    spans = span_lengths(data, seq_len).spans if isinstance(data, SpanTextData) and seq_len > 2 else 0
    if data.tokenizer is None:
        if isinstance(data, MaskedTextData):
            first = 1 if pad == 1 else 0  # RoBERTa's positions depend on the padding's id
            special = {"pad": first, "cls": 1 - first, "sep": 2, "mask": 3}
            return Vocabulary(4 + BYTES, special, first_byte=4)
        if isinstance(data, SpanTextData):
            size = (config.size("vocab") if config is not None else None) or 3 + BYTES + spans
            sentinels = tuple(range(size - 1, size - 1 - spans, -1))
            return Vocabulary(3 + BYTES + spans, {"pad": 0, "eos": 1}, sentinels, first_byte=3)
        return Vocabulary(BYTES, {})
    found = read_tokenizer(absolute_path(config_path, data.tokenizer))
    special = {name: id for name in SPELLINGS if (id := found.special(name)) is not None}
    if isinstance(pad, int) and "pad" not in special:
        special["pad"] = pad
    missing = [name for name in _NEEDED.get(type_name(data), ()) if name not in special]
    if len(found.sentinels) < spans:
        missing.append(f"<extra_id_{spans - 1}>")
    return Vocabulary(found.size, special, found.sentinels, tokenizer=found, missing=missing[0] if missing else "")


def _vocabulary_of_tokens(path: str) -> Vocabulary:
    """Return the vocabulary of token files, without reading the tokenizer beside them: sizes do not depend on it."""
    found = read_token_folder(path)
    return Vocabulary(found.vocab_size or 0, {} if found.eos is None else {"eos": found.eos})


def span_lengths(data: SpanTextData, seq_len: int) -> SpanLengths:
    """Return the numbers of tokens of T5's samples, if the encoder's sample has `seq_len` tokens.

    As in T5, the text is as long as possible: with one sentinel in place of each span, and the end token, it must fit
    into `seq_len` tokens.
    """
    text = seq_len
    while _cut(data, text + 1)[0] <= seq_len:
        text += 1
    while text > 1 and _cut(data, text)[0] > seq_len:
        text -= 1
    _, target, noise, spans = _cut(data, text)
    return SpanLengths(text, noise, spans, data.target_len or math.ceil(target / 8) * 8)


def _cut(data: SpanTextData, text: int) -> tuple[int, int, int, int]:
    """Return (tokens of the encoder's sample, of the decoder's sample, of all spans; number of spans) for a text."""
    noise = min(max(round(text * data.noise_density), 1), max(text - 1, 1))
    spans = min(max(round(noise / data.mean_span_length), 1), noise, max(text - noise, 1))
    return text - noise + spans + 1, noise + spans + 1, noise, spans
