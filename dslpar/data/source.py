"""What a run is trained on: found and checked before torch is imported, and read where a rank needs it.

source = find_source(job)                          # files and their split; nothing is read
source.identity                                    # which a resume must not change
samples = make_samples(job, source.train, inputs)  # in memory, or mapped; see `dslpar.data.order`
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from dslpar.core.catalog import raise_finding
from dslpar.data.corpus import FileSlice, check_number, load_corpus
from dslpar.layout.resolve import Job
from dslpar.schema.datasets import ImageData, MaskedTextData, SpanTextData, TokensData, type_name
from dslpar.schema.sections import OtherModel
from dslpar.schema.vocabularies import span_lengths

if TYPE_CHECKING:
    from dslpar.data.image_files import Images
    from dslpar.data.order import Samples
    from dslpar.data.token_source import TokenRange


class Part(NamedTuple):
    """What is trained on, or what is held out."""

    training: bool
    files: Sequence[FileSlice] = ()
    images: Images | None = None
    tokens: TokenRange | None = None


class Source(NamedTuple):
    """The data of a run."""

    train: Part
    held_out: Part
    identity: str
    """Of what is trained on: a resume must not change it."""
    whole_identity: str
    """Of all: ranks must agree on it."""


def find_source(job: Job) -> Source:
    """Find, split and check the data of a job.

    Raises:
        DslparError: files are missing, or there is too little for one sample, or for one step.
    """
    if isinstance(job.spec.data, ImageData):
        from dslpar.data.image_files import find_images

        images = find_images(job)
        return Source(Part(True, images=images), Part(False, images=images), images.identity, images.identity)
    if isinstance(job.spec.data, TokensData):
        from dslpar.data.token_source import find_tokens

        tokens = find_tokens(job)
        return Source(
            *(Part(True, tokens=tokens.train), Part(False, tokens=tokens.held_out)),
            *(tokens.train.identity, f"{tokens.train.identity} {tokens.held_out.identity}"),
        )
    found = load_corpus(job)
    extra = _extra_identity(job)
    train, whole = text_identity(found.train, extra), text_identity((*found.train, *found.held_out), extra)
    return Source(Part(True, found.train), Part(False, found.held_out), train, whole)


def text_identity(pieces: Sequence[FileSlice], extra: Sequence[str] = ()) -> str:
    """Identify a text by the names and lengths of its files, whose folders may differ; `extra`: what else counts."""
    seen = [(os.path.basename(piece.path), piece.num_bytes) for piece in pieces]
    return hashlib.sha256((repr(seen) + "".join(extra)).encode()).hexdigest()


def _extra_identity(job: Job) -> list[str]:
    """Return what makes other samples of the same text: the type of the data, and its tokenizer."""
    data = job.spec.data
    kind = [] if type_name(data) == "text" else [type_name(data)]
    if data.tokenizer is None:
        return kind
    from dslpar.data.tokens import vocabulary

    tokenizer = vocabulary(job).tokenizer
    return [*kind, tokenizer.digest if tokenizer is not None else ""]


def make_samples(job: Job, part: Part, inputs: Sequence[str]) -> Samples:
    """Return the samples of a part; `inputs` are the arguments of the model's forward that a micro-batch brings.

    Raises:
        DslparError: there are too few tokens for a step.
    """
    data, seed = job.spec.data, job.spec.train.seed
    if part.images is not None:
        from dslpar.data.images import ImageSamples

        indices = part.images.train if part.training else part.images.held_out
        return ImageSamples(job, part.images, indices, part.training, inputs)
    if part.tokens is not None:
        from dslpar.data.token_samples import TokenSamples

        return TokenSamples(job, part.tokens)
    from dslpar.data import masked, spans, text, tokens

    found = tokens.vocabulary(job)
    is_plain = not isinstance(data, MaskedTextData | SpanTextData)
    ids = tokens.read_ids(part.files, found, ends=is_plain)
    samples: Samples
    if isinstance(data, MaskedTextData):
        samples = masked.MaskedSamples(ids, found, data, job.seq_len, seed, tells_next_sentence(job))
    elif isinstance(data, SpanTextData):
        samples = spans.SpanSamples(ids, found, data, job.seq_len, seed, _decoder_start(job))
    else:
        samples = text.TextSamples(ids, job.seq_len)
    if part.training:
        check_number(job, samples.num_samples)
    elif samples.num_samples < 1:
        hint = "a larger data.eval_fraction, or no train.eval_interval"
        raise_finding("BAT203", f"{len(ids)} tokens are held out, too few for a sample", hint, job.path, "data")
    return samples


def all_counted(job: Job) -> bool:
    """Whether every label of the job's samples counts; known on ranks that read none."""
    data = job.spec.data
    if isinstance(data, SpanTextData):
        return span_lengths(data, job.seq_len).is_full
    return not isinstance(data, MaskedTextData)


def tells_next_sentence(job: Job) -> bool:
    """Whether samples of masked text are pairs: as the config says, or as the model's class takes them."""
    data, model = job.spec.data, job.spec.model
    if isinstance(data, MaskedTextData) and data.next_sentence is not None:
        return data.next_sentence
    return isinstance(model, OtherModel) and model.target.endswith(".BertForPreTraining")


def _decoder_start(job: Job) -> int:
    """Return the id that begins a decoder's sample: the model's own, or the padding's."""
    config = job.spec.model.transformers if isinstance(job.spec.model, OtherModel) else None
    values = config.values if config is not None else {}
    start = values.get("decoder_start_token_id")
    return int(start if start is not None else values.get("pad_token_id") or 0)
