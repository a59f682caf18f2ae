"""Which ids a run's text has: of a tokenizer, or of bytes; what of them stands for no text. No torch, no tokenizers.

    vocabulary = vocabulary_of(spec.data, "configs/bert.py", spec.model)
    vocabulary.size, vocabulary.special["mask"]

Bytes are ids as they are, 0 to 255, where each next one is predicted. Where there are special tokens they come first,
as ByT5 has it: BERT's padding (0), class, separator and mask, and bytes from 4 on; T5's padding, end and unknown, bytes
from 3 on, and its sentinels are the last ids of the model's vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from dslpar.core.named_tuple import NamedTuple
from dslpar.schema.datasets import (
    ChatData,
    Data,
    HuggingFaceData,
    MaskedTextData,
    SpanTextData,
    TextData,
    TokensData,
    absolute_path,
)
from dslpar.schema.sections import Model, OtherModel
from dslpar.schema.token_folders import read_token_folder
from dslpar.schema.tokenizers import SPELLINGS, TokenizerFile, read_tokenizer

BYTES = 256
"""Tokens of byte-level text."""
_NEEDED: Mapping[type, tuple[str, ...]] = {MaskedTextData: ("cls", "sep", "mask"), SpanTextData: ("eos",)}


class Vocabulary(NamedTuple):
    """The ids of a run's text."""

    size: int
    """Ids that a model must have: the largest and one."""
    special: Mapping[str, int]
    """Special tokens by name: pad, cls, sep, mask, eos; those that there are."""
    sentinels: tuple[int, ...] = ()
    """T5's, in the order in which they stand in a sample."""
    first_byte: int = 0
    """The id of byte 0, where a token is a byte."""
    tokenizer: TokenizerFile | None = None
    missing: str = ""
    """A special token that the data need and the tokenizer does not have; empty: it has all."""


class SpanLengths(NamedTuple):
    """How T5's samples are cut: numbers of tokens."""

    text: int
    """Of the text that a sample is made of."""
    noise: int
    """Of these in spans."""
    spans: int
    target: int
    """Of the decoder's sample, with padding."""

    @property
    def is_full(self) -> bool:
        """Whether the decoder's sample has no padding."""
        return self.noise + self.spans + 1 == self.target


def vocabulary_of(data: Data, config_path: str, model: Model | OtherModel, seq_len: int = 0) -> Vocabulary:
    """Return the ids of a text; `seq_len` tells how many sentinels are needed. Of other data: no ids."""
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
            first = 1 if pad == 1 else 0  # RoBERTa counts positions by it
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
    missing = [name for name in _NEEDED.get(data.__class__, ()) if name not in special]
    if len(found.sentinels) < spans:
        missing.append(f"<extra_id_{spans - 1}>")
    return Vocabulary(found.size, special, found.sentinels, tokenizer=found, missing=missing[0] if missing else "")


def _vocabulary_of_tokens(path: str) -> Vocabulary:
    """Return the ids of token files. The tokenizer beside them is not read: to check sizes, no one needs it."""
    found = read_token_folder(path)
    return Vocabulary(found.vocab_size or 0, {} if found.eos is None else {"eos": found.eos})


def span_lengths(data: SpanTextData, seq_len: int) -> SpanLengths:
    """Return how many tokens of text make an encoder's sample of `seq_len` tokens, and what the decoder then tells.

    As T5 does it: the most text whose spans, each one sentinel, leave `seq_len` tokens with the end.
    """
    text = seq_len
    while _cut(data, text + 1)[0] <= seq_len:
        text += 1
    while text > 1 and _cut(data, text)[0] > seq_len:
        text -= 1
    _, target, noise, spans = _cut(data, text)
    return SpanLengths(text, noise, spans, data.target_len or math.ceil(target / 8) * 8)


def _cut(data: SpanTextData, text: int) -> tuple[int, int, int, int]:
    """Return the tokens of the encoder's sample and of the decoder's, those in spans, and the spans."""
    noise = min(max(round(text * data.noise_density), 1), max(text - 1, 1))
    spans = min(max(round(noise / data.mean_span_length), 1), noise, max(text - noise, 1))
    return text - noise + spans + 1, noise + spans + 1, noise, spans
