"""The section `data` by its types: what a run is trained on. Sections as in `dslpar.schema.sections`.

Masked tokens are BERT's (arXiv 1810.04805) and RoBERTa's (1907.11692), spans T5's (1910.10683), bytes with special ids
before them ByT5's (2105.13626).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import ClassVar, TypeAlias

from dslpar.schema.fields import key, section
from dslpar.schema.types import (
    ChannelDeviations,
    ChannelMeans,
    Fraction,
    Path,
    PositiveFloat,
    PositiveFraction,
    PositiveInt,
    StrList,
)


@section
class TextData:
    """Text, of which each next token is predicted: by default the source of Python's standard library, byte by byte."""

    seq_len: PositiveInt | None = key(
        default=None, resume="free", synonyms="seq_length seq_len sequence_length", capitals="SEQ_LEN SEQ_LENGTH"
    )
    """Tokens of a sample; left out: the model's max_seq_len."""
    files: StrList | None = key(default=None, resume="free", synonyms="data_path train_data_path")
    """Text files or folders to train on, relative to the config; left out: the standard library's source."""
    tokenizer: Path | None = key(default=None, resume="free", synonyms="tokenizer_file tokenizer_path tokenizer_name")
    """A tokenizer.json of Hugging Face's tokenizers, or a folder with one, relative to the config; left out: a token is
    a byte.
    """
    eval_fraction: Fraction = key(default=0.05, resume="free")
    """Share of the files that is held out for evaluation."""


@section
class MaskedTextData(TextData):
    """Text of which masked tokens are told, as BERT and RoBERTa learn; masks are drawn anew each epoch."""

    mask_prob: PositiveFraction = key(default=0.15, resume="reported", synonyms="masked_lm_prob mlm_probability")
    """Share of the tokens that are told: of these 80 % are masked, 10 % are another token, 10 % stay."""
    whole_words: bool = key(default=False, resume="reported", synonyms="whole_word_mask")
    """Tell words whole, all of their tokens or none."""
    next_sentence: bool | None = key(default=None, resume="refused", synonyms="binary_head add_binary_head")
    """Samples are two pieces of text, and whether the second follows the first is told too; left out: where the model
    is BertForPreTraining.
    """


@section
class SpanTextData(TextData):
    """Text of which spans are told, as T5 learns: each is one sentinel in the encoder's sample."""

    noise_density: PositiveFraction = key(default=0.15, resume="reported")
    """Share of the tokens that are in spans."""
    mean_span_length: PositiveFloat = key(default=3.0, resume="reported", synonyms="mean_noise_span_length")
    """Tokens of a span, in the mean."""
    target_len: PositiveInt | None = key(default=None, resume="refused", synonyms="decoder_seq_length")
    """Tokens of the decoder's sample, the end padded; left out: what spans, sentinels and an end take, rounded up to a
    multiple of 8.
    """


@section
class ImageData:
    """Images and their classes."""

    seq_len: ClassVar[None] = None
    files: ClassVar[None] = None
    tokenizer: ClassVar[None] = None

    path: Path = key(resume="free", synonyms="image_folder data_dir imagenet_path")
    """A folder with a folder of images for each class, an .npz file with `images` and `labels`, or an .npy file of
    images; relative to the config.
    """
    labels: Path | None = key(default=None, resume="free")
    """Classes of the images of an .npy file: another .npy file."""
    size: PositiveInt | None = key(default=None, resume="refused", synonyms="resize")
    """Height and width that images are resized to; left out: the model's image_size, or as they are."""
    mean: ChannelMeans = key(default=0.5, resume="reported")
    """What is subtracted from pixels in [0, 1]: a number, or one for each channel."""
    std: ChannelDeviations = key(default=0.5, resume="reported")
    """What they are divided by then."""
    flip: bool = key(default=False, resume="reported")
    """Mirror half of the training images, drawn anew each epoch."""
    eval_fraction: Fraction = key(default=0.05, resume="free")
    """Share of the images that is held out for evaluation."""


@section
class TokensData:
    """Token files, of which each next token is predicted: `dslpar data tokenize` writes them; Megatron-LM's, too."""

    files: ClassVar[None] = None
    tokenizer: ClassVar[None] = None

    path: Path = key(resume="free")
    """A folder that `dslpar data tokenize` wrote, or Megatron-LM's .bin and .idx (their path without a suffix, or with
    .idx); relative to the config.
    """
    seq_len: PositiveInt | None = key(default=None, resume="free")
    """Tokens of a sample; left out: the model's max_seq_len."""
    eval_fraction: Fraction = key(default=0.05, resume="free")
    """Share of the documents that is held out for evaluation: the last ones. Not used with eval_path."""
    eval_path: Path | None = key(default=None, resume="free")
    """Token files that are held out; left out: the last documents of `path`."""


Data: TypeAlias = TextData | MaskedTextData | SpanTextData | ImageData | TokensData
DATASETS: Mapping[str, type] = {
    "text": TextData,
    "tokens": TokensData,
    "mlm": MaskedTextData,
    "span": SpanTextData,
    "images": ImageData,
}
"""By the `type` of a config."""
_PATHS = ("files", "tokenizer", "path", "labels", "eval_path")


def type_name(data: object) -> str:
    """Return the `type` that a config gives a section of data."""
    # Not type(data): lint rules see a section through a guard, which has the section's __class__.
    return next(name for name, cls in DATASETS.items() if cls is data.__class__)


def absolute_path(config_path: str, name: str) -> str:
    """Return a path that a config gives relative to its own folder."""
    return os.path.abspath(os.path.join(os.path.dirname(config_path), name))


def absolute_paths(data: Data, config_path: str) -> dict[str, str | list[str]]:
    """Return the keys that name files, with paths that hold wherever the section is written to."""
    found: dict[str, str | list[str]] = {}
    for name in _PATHS:
        value = getattr(data, name, None)
        if isinstance(value, str):
            found[name] = absolute_path(config_path, value)
        elif value is not None:
            found[name] = [absolute_path(config_path, each) for each in value]
    return found
