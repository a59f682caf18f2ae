"""The types of the section `data`: one section class per `type`, declared as in `dslpar.schema.sections`.

Sources: masked tokens from BERT (arXiv 1810.04805) and RoBERTa (1907.11692), spans from T5 (1910.10683), bytes after
special ids from ByT5 (2105.13626).
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
    """Text for next-token prediction: by default the source of Python's standard library, byte by byte."""

    seq_len: PositiveInt | None = key(
        default=None, resume="free", synonyms="seq_length seq_len sequence_length", capitals="SEQ_LEN SEQ_LENGTH"
    )
    """Tokens per sample; left out: the model's max_seq_len."""
    files: StrList | None = key(default=None, resume="free", synonyms="data_path train_data_path")
    """Text files or folders to train on, relative to the config; left out: the standard library's source."""
    tokenizer: Path | None = key(default=None, resume="free", synonyms="tokenizer_file tokenizer_path tokenizer_name")
    """A tokenizer.json of Hugging Face's tokenizers, or a folder with one, relative to the config; left out: a token is
    a byte.
    """
    eval_fraction: Fraction = key(default=0.05, resume="free")
    """Share of the files that is held out for evaluation."""
    replacement: bool = key(default=False, resume="refused", synonyms="sample_with_replacement")
    """Draw each sample to train on from all, whatever was drawn before. False: each once an epoch, in a drawn order."""


@section
class MaskedTextData(TextData):
    """Text for masked-token prediction, as for BERT and RoBERTa; masks are drawn anew each epoch."""

    mask_prob: PositiveFraction = key(default=0.15, resume="reported", synonyms="masked_lm_prob mlm_probability")
    """Share of the tokens that are predicted; of these 80 % are masked, 10 % become another token, 10 % stay."""
    whole_words: bool = key(default=False, resume="reported", synonyms="whole_word_mask")
    """Predict whole words: all tokens of a word, or none."""
    next_sentence: bool | None = key(default=None, resume="refused", synonyms="binary_head add_binary_head")
    """Samples are two pieces of text, and the model also predicts whether the second follows the first; left out: only
    if the model is BertForPreTraining.
    """


@section
class SpanTextData(TextData):
    """Text for span prediction, as for T5: a sentinel replaces each span in the encoder's sample."""

    noise_density: PositiveFraction = key(default=0.15, resume="reported")
    """Share of the tokens that are in spans."""
    mean_span_length: PositiveFloat = key(default=3.0, resume="reported", synonyms="mean_noise_span_length")
    """Mean number of tokens per span."""
    target_len: PositiveInt | None = key(default=None, resume="refused", synonyms="decoder_seq_length")
    """Tokens of the decoder's sample, padded at its end; left out: the tokens of spans, sentinels and the end token,
    rounded up to a multiple of 8.
    """


@section
class ImageData:
    """Images and their classes."""

    seq_len: ClassVar[None] = None
    files: ClassVar[None] = None
    tokenizer: ClassVar[None] = None

    path: Path = key(resume="free", synonyms="image_folder data_dir imagenet_path")
    """A folder with one folder of images per class, an .npz file with `images` and `labels`, or an .npy file of images;
    relative to the config.
    """
    labels: Path | None = key(default=None, resume="free")
    """.npy file with the classes of the images in an .npy file."""
    size: PositiveInt | None = key(default=None, resume="refused", synonyms="resize")
    """Height and width to which images are resized; left out: the model's image_size, or as they are."""
    mean: ChannelMeans = key(default=0.5, resume="reported")
    """Mean to subtract from pixels in [0, 1]: a number, or one per channel."""
    std: ChannelDeviations = key(default=0.5, resume="reported")
    """Standard deviation to divide by afterwards: a number, or one per channel."""
    flip: bool = key(default=False, resume="reported")
    """Mirror half of the training images, drawn anew each epoch."""
    eval_fraction: Fraction = key(default=0.05, resume="free")
    """Share of the images that is held out for evaluation."""
    replacement: bool = key(default=False, resume="refused", synonyms="sample_with_replacement")
    """Draw each image to train on from all, whatever was drawn before. False: each once an epoch, in a drawn order."""


@section
class TokensData:
    """Token files for next-token prediction, written by `dslpar data tokenize` or by Megatron-LM."""

    files: ClassVar[None] = None
    tokenizer: ClassVar[None] = None

    path: Path = key(resume="free")
    """A folder that `dslpar data tokenize` wrote, or Megatron-LM's .bin and .idx (their path without a suffix, or with
    .idx); relative to the config.
    """
    seq_len: PositiveInt | None = key(default=None, resume="free")
    """Tokens per sample; left out: the model's max_seq_len."""
    eval_fraction: Fraction = key(default=0.05, resume="free")
    """Share of the documents, from the end, that is held out for evaluation. Not used with eval_path."""
    eval_path: Path | None = key(default=None, resume="free")
    """Held-out token files; left out: the last documents of `path`."""
    replacement: bool = key(default=False, resume="refused", synonyms="sample_with_replacement")
    """Draw each sample to train on from all, whatever was drawn before. False: each once an epoch, in a drawn order."""


@section
class ChatData:
    """Conversations in JSON Lines files, of which the model learns the assistant's answers."""

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
    """Chat template: a Jinja template, a file with one, or 'chatml'; left out: the tokenizer's own, or 'chatml' without
    a tokenizer.
    """
    seq_len: PositiveInt | None = key(default=None, resume="free", synonyms="max_length cutoff_len")
    """Tokens per sample, longer conversations are cut; left out: the model's max_seq_len."""
    assistant_only_loss: bool = key(
        default=True, resume="refused", synonyms="train_on_inputs mask_prompt completion_only_loss train_on_prompt"
    )
    """Learn only what the assistant says. False: learn the whole conversation."""
    packing: bool = key(default=False, resume="refused", synonyms="sample_packing")
    """Put several conversations into a sample, each attending only to itself. False: one per sample, with padding."""
    eval_fraction: Fraction = key(default=0.05, resume="free")
    """Share of the conversations, from the end, that is held out for evaluation. Not used with eval_path."""
    eval_path: Path | None = key(default=None, resume="free")
    """A held-out .jsonl file or folder of them; left out: the last conversations of `files`."""
    replacement: bool = key(default=False, resume="refused", synonyms="sample_with_replacement")
    """Draw each sample to train on from all, whatever was drawn before. False: each once an epoch, in a drawn order."""


@section
class HuggingFaceData:
    """A folder that Hugging Face's `datasets` saved: a column of text, or columns with the model's inputs."""

    files: ClassVar[None] = None

    path: Path = key(resume="free", synonyms="dataset_path dataset_name")
    """A folder that `save_to_disk` wrote, relative to the config."""
    split: str | None = key(default=None, resume="free")
    """Split to train on, if the folder has several; left out: 'train'."""
    eval_split: str | None = key(default=None, resume="free")
    """Held-out split; left out: rows of `split`."""
    text_column: str | None = key(default=None, resume="free", synonyms="dataset_text_field text_column_name")
    """Column of text for next-token prediction, row after row; left out: columns are `labels` and the arguments of the
    model's forward, by name.
    """
    tokenizer: Path | None = key(default=None, resume="free")
    """Tokenizer for text_column, as with type='text'."""
    seq_len: PositiveInt | None = key(default=None, resume="free")
    """Tokens per sample; left out: the model's max_seq_len."""
    eval_fraction: Fraction = key(default=0.05, resume="free")
    """Share of the rows, evenly spread, that is held out for evaluation. Not used with eval_split."""
    replacement: bool = key(default=False, resume="refused", synonyms="sample_with_replacement")
    """Draw each sample to train on from all, whatever was drawn before. False: each once an epoch, in a drawn order."""


@section
class OtherData:
    """Your own class with `__len__` and `__getitem__`; the section's other keys are its arguments."""

    files: ClassVar[None] = None
    tokenizer: ClassVar[None] = None
    eval_fraction: ClassVar[float] = 0.0
    replacement: ClassVar[bool] = False

    target: str = key(resume="free")
    """The class by its full name."""
    args: Dict = key(default_factory=dict, resume="free")
    """Its keyword arguments."""
    eval: Dict | None = key(default=None, resume="free")
    """Arguments that differ for the held-out data; if they have a type, another class with all its arguments. Left out:
    nothing is held out.
    """
    seq_len: PositiveInt | None = key(default=None, resume="free")
    """Tokens per sample, also passed to a class that takes seq_len; left out: the model's max_seq_len, or samples are
    counted.
    """


@section
class BlendPart:
    """One part of a blend."""

    dataset: Dataset = key(resume="free")
    """The data: a type, and its keys."""
    weight: PositiveFloat | None = key(default=None, resume="free", synonyms="blend_weight")
    """Weight of the part; its share of the samples is weight / sum of all weights."""


@section
class BlendData:
    """A mix of several data sets: each step has the share of each part, to within less than two samples."""

    files: ClassVar[None] = None
    tokenizer: ClassVar[None] = None
    eval_fraction: ClassVar[float] = 0.0
    replacement: ClassVar[bool] = False

    parts: tuple[BlendPart, ...] = key(resume="free")
    """The parts of the mix: a list of data, each with a type, its keys and a weight."""
    temperature: PositiveFloat | None = key(default=None, resume="free")
    """Instead of weights: the weight of a part is size ** (1 / temperature), with its size in samples. 1 weights parts
    by size, which is also the default; higher values make the shares more equal.
    """
    seq_len: PositiveInt | None = key(default=None, resume="free")
    """Tokens per sample, the same for all parts; left out: the model's max_seq_len."""


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
"""`type` in a config -> section class."""
_PATHS = ("files", "tokenizer", "path", "labels", "eval_path", "template")
CHATML = "chatml"
"""The name of dslpar's own chat template."""


def type_name(data: object) -> str:
    """Return the `type` that a config gives a section of data."""
    if isinstance(data, OtherData):
        return data.target
    # Not type(data) alone: lint rules may get a subclass of the section (dslpar.linter.unknown_values).
    names = {cls: name for name, cls in DATASETS.items()}
    return next(names[cls] for cls in type(data).__mro__ if cls in names)


def is_images(data: Data) -> bool:
    """Return whether all samples are images with classes."""
    return all(isinstance(each, ImageData) for each in parts_of(data))


def part_key(number: int) -> str:
    """Return the key of a blend's part."""
    return f"data.parts.{number}"


def parts_of(data: Data) -> Sequence[Data]:
    """Return the parts of a blend, or a list with the data itself."""
    return [part.dataset for part in data.parts] if isinstance(data, BlendData) else [data]


def parts_by_key(data: Data) -> Sequence[tuple[str, Data]]:
    """Return (key, data) pairs: the parts of a blend, or the section `data`."""
    if not isinstance(data, BlendData):
        return [("data", data)]
    return [(part_key(number), part.dataset) for number, part in enumerate(data.parts)]


def absolute_path(config_path: str, name: str) -> str:
    """Return the absolute path of a name that a config gives relative to its own folder."""
    return os.path.abspath(os.path.join(os.path.dirname(config_path), name))


def names_template_file(template: str) -> bool:
    """Return whether a `template` of conversations is a path: neither 'chatml' nor a template itself."""
    return template != CHATML and "{{" not in template and "{%" not in template


def with_absolute_paths(values: Mapping[str, Any], data: Data, config_path: str) -> dict[str, Any]:
    """Return the values of a section with absolute paths, so that they are valid in any folder."""
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
