"""The section `data` by its types: what a run is trained on. Sections as in `dslpar.schema.sections`.

Masked tokens are BERT's (arXiv 1810.04805) and RoBERTa's (1907.11692), spans T5's (1910.10683), bytes with special ids
before them ByT5's (2105.13626).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, TypeAlias

from dslpar.schema.fields import key, section
from dslpar.schema.types import (
    ChannelDeviations,
    ChannelMeans,
    Dataset,
    Dict,
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


@section
class ChatData:
    """Conversations, of which the assistant's answers are learned: files of JSON, a conversation a line."""

    files: StrList = key(resume="free", synonyms="train_file datasets")
    """.jsonl files or folders of them, relative to the config. A line is {"messages": [{"role": "user", "content":
    "..."}, ...]}, or ShareGPT's {"conversations": [{"from": "human", "value": "..."}, ...]}.
    """
    tokenizer: Path | None = key(default=None, resume="free", synonyms="tokenizer_file tokenizer_path tokenizer_name")
    """A tokenizer.json of Hugging Face's tokenizers, or a folder with one, relative to the config; left out: a token is
    a byte.
    """
    template: str | None = key(
        default=None, resume="free", aliases="chat_template", synonyms="chat_template_path chat_template_jinja"
    )
    """How a conversation is written as text: a Jinja template, a file with one, or 'chatml'; left out: the tokenizer's
    own, and of bytes 'chatml'.
    """
    seq_len: PositiveInt | None = key(default=None, resume="free", synonyms="max_length cutoff_len")
    """Tokens of a sample, longer conversations end there; left out: the model's max_seq_len."""
    assistant_only_loss: bool = key(
        default=True, resume="refused", synonyms="train_on_inputs mask_prompt completion_only_loss train_on_prompt"
    )
    """Learn what the assistant says, and nothing else; False: all of a conversation."""
    packing: bool = key(default=False, resume="refused", synonyms="sample_packing")
    """Put several conversations into a sample, each of which attends to itself alone; False: one, padded at its end."""
    eval_fraction: Fraction = key(default=0.05, resume="free")
    """Share of the conversations that is held out for evaluation: the last ones. Not used with eval_path."""
    eval_path: Path | None = key(default=None, resume="free")
    """A .jsonl file, or a folder of them, that is held out; left out: the last conversations of `files`."""


@section
class HuggingFaceData:
    """A data set that Hugging Face's `datasets` has saved to a folder: a column of text, or the model's inputs."""

    files: ClassVar[None] = None

    path: Path = key(resume="free", synonyms="dataset_path dataset_name")
    """A folder that `save_to_disk` wrote, relative to the config."""
    split: str | None = key(default=None, resume="free")
    """Split to train on, where the folder has several; left out: 'train'."""
    eval_split: str | None = key(default=None, resume="free")
    """Split that is held out; left out: rows of `split`."""
    text_column: str | None = key(default=None, resume="free", synonyms="dataset_text_field text_column_name")
    """Column of text, of which each next token is predicted, row after row; left out: columns are the arguments of the
    model's forward, and `labels`, by name.
    """
    tokenizer: Path | None = key(default=None, resume="free")
    """As with type='text'; for text_column."""
    seq_len: PositiveInt | None = key(default=None, resume="free")
    """Tokens of a sample; left out: the model's max_seq_len."""
    eval_fraction: Fraction = key(default=0.05, resume="free")
    """Share of the rows that is held out for evaluation, evenly spread. Not used with eval_split."""


@section
class OtherData:
    """A class of one's own, with `__len__` and `__getitem__`; what else stands in the section is its arguments."""

    files: ClassVar[None] = None
    tokenizer: ClassVar[None] = None
    eval_fraction: ClassVar[float] = 0.0

    target: str = key(resume="free")
    """The class by its full name."""
    args: Dict = key(default_factory=dict, resume="free")
    """Its keyword arguments."""
    eval: Dict | None = key(default=None, resume="free")
    """Arguments that are other ones for the held-out data; with a type, a class of their own and all its arguments.
    Left out: nothing is held out.
    """
    seq_len: PositiveInt | None = key(default=None, resume="free")
    """Tokens of a sample, also given to a class that takes seq_len; left out: the model's max_seq_len, or samples are
    counted.
    """


@section
class BlendPart:
    """One of the data that a blend is of."""

    dataset: Dataset = key(resume="free")
    """The data: a type, and its keys."""
    weight: PositiveFloat | None = key(default=None, resume="free", synonyms="blend_weight")
    """Its share of the samples, over the sum of all weights."""


@section
class BlendData:
    """Several data, mixed: each step has of each of them its share, to less than two samples."""

    files: ClassVar[None] = None
    tokenizer: ClassVar[None] = None
    eval_fraction: ClassVar[float] = 0.0

    parts: tuple[BlendPart, ...] = key(resume="free")
    """What is mixed: a list of data, each with a type, its keys and a weight."""
    temperature: PositiveFloat | None = key(default=None, resume="free")
    """Instead of weights: parts are weighted by size ** (1 / temperature), in samples; 1, as without both, by size; the
    higher, the more equal.
    """
    seq_len: PositiveInt | None = key(default=None, resume="free")
    """Tokens of a sample, of all parts; left out: the model's max_seq_len."""


Data: TypeAlias = (
    TextData
    | MaskedTextData
    | SpanTextData
    | ImageData
    | TokensData
    | ChatData
    | HuggingFaceData
    | BlendData
    | OtherData
)
DATASETS: Mapping[str, type] = {
    "text": TextData,
    "tokens": TokensData,
    "mlm": MaskedTextData,
    "span": SpanTextData,
    "images": ImageData,
    "chat": ChatData,
    "huggingface": HuggingFaceData,
    "blend": BlendData,
}
"""By the `type` of a config."""
_PATHS = ("files", "tokenizer", "path", "labels", "eval_path", "template")
CHATML = "chatml"
"""The name of the template that dslpar brings."""


def type_name(data: object) -> str:
    """Return the `type` that a config gives a section of data."""
    # Not type(data): lint rules see a section through a guard, which has the section's __class__.
    if isinstance(data, OtherData):
        return data.target
    return next(name for name, cls in DATASETS.items() if cls is data.__class__)


def is_images(data: Data) -> bool:
    """Whether samples are images and their classes."""
    return all(isinstance(each, ImageData) for each in parts_of(data))


def part_key(number: int) -> str:
    """Return the key of a blend's part."""
    return f"data.parts.{number}"


def parts_of(data: Data) -> Sequence[Data]:
    """Return the data that a section is of: a blend's parts, or itself."""
    return [part.dataset for part in data.parts] if isinstance(data, BlendData) else [data]


def absolute_path(config_path: str, name: str) -> str:
    """Return a path that a config gives relative to its own folder."""
    return os.path.abspath(os.path.join(os.path.dirname(config_path), name))


def names_template_file(template: str) -> bool:
    """Whether a `template` of conversations is a path: no name that dslpar knows, and no template itself."""
    return template != CHATML and "{{" not in template and "{%" not in template


def with_absolute_paths(values: Mapping[str, Any], data: Data, config_path: str) -> dict[str, Any]:
    """Return the values of a section with paths that hold wherever it is written to."""
    found = dict(values)
    for name in _PATHS:
        value = getattr(data, name, None)
        if name == "template" and value is not None and not names_template_file(value):
            continue
        if isinstance(value, str):
            found[name] = absolute_path(config_path, value)
        elif value is not None:
            found[name] = [absolute_path(config_path, each) for each in value]
    if isinstance(data, BlendData):
        each = zip(values["parts"], data.parts, strict=True)
        found["parts"] = [with_absolute_paths(part, section.dataset, config_path) for part, section in each]
    return found
