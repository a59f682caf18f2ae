"""Data source of a run: found and checked before torch is imported, and read only on ranks that need it.

source = find_source(job)                          # files and their split; nothing is read
source.identity                                    # which a resume must not change
samples = make_samples(job, source.train, inputs)  # in memory, or mapped; see `dslpar.data.order`
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from dslpar.core.catalog import raise_finding
from dslpar.core.errors import DslparError
from dslpar.data import tokens
from dslpar.data.arrow import ArrowRows, Table, find_arrow
from dslpar.data.blend_parts import at_part, blend_identity, holds_out, part_jobs, weights_of
from dslpar.data.chat_source import ConversationRange, find_conversations
from dslpar.data.corpus import FileSlice, check_has_length, check_number, load_corpus
from dslpar.data.image_files import Images, find_images
from dslpar.data.mapped_text import MappedText
from dslpar.data.own_data import find_own, own_samples
from dslpar.data.token_source import TokenRange, find_tokens
from dslpar.layout.resolve import Job
from dslpar.reporting.logging import log
from dslpar.schema import paths
from dslpar.schema.datasets import (
    BlendData,
    ChatData,
    Data,
    HuggingFaceData,
    ImageData,
    MaskedTextData,
    OtherData,
    SpanTextData,
    TokensData,
    parts_of,
    type_name,
)
from dslpar.schema.sections import OtherModel
from dslpar.schema.vocabularies import span_lengths

if TYPE_CHECKING:
    from dslpar.data.order import Samples


class Part(NamedTuple):
    """Training data or held-out data. Which fields below are set depends on the type of data."""

    training: bool
    """Whether this is the training data; if not, the held-out data."""
    files: Sequence[FileSlice] = ()
    images: Images | None = None
    tokens: TokenRange | None = None
    rows: ArrowRows | None = None
    conversations: ConversationRange | None = None
    dataset: Any = None
    """Instance of a user-defined data set."""
    parts: Sequence[Part] = ()
    """Parts of a blend."""
    job: Job | None = None
    """For a part of a blend: the job with this part as all of its data."""

    @property
    def read_parts(self) -> dict[int, Part]:
        """Parts of a blend that are read, by their index in the config. Not all of them have held-out data."""
        return {
            number: part
            for number, part in enumerate(self.parts)
            if self.training or (part.job is not None and holds_out(part.job.spec.data))
        }


class Source(NamedTuple):
    """Training and held-out data of a run."""

    train: Part
    held_out: Part
    identity: str
    """Digest of the training data, which a resume must not change."""
    whole_identity: str
    """Digest of all data, on which ranks must agree."""


def find_source(job: Job) -> Source:
    """Find, split and check the data of a job.

    Raises:
        DslparError: files are missing, or there is too little data for a sample or for a step.
    """
    paths.check(paths.paths_of_data(job.spec, job.path), job.path)
    if isinstance(job.spec.data, ImageData):
        images = find_images(job)
        return Source(Part(True, images=images), Part(False, images=images), images.identity, images.identity)
    if isinstance(job.spec.data, TokensData):
        split = find_tokens(job)
        return Source(
            *(Part(True, tokens=split.train), Part(False, tokens=split.held_out)),
            *(split.train.identity, f"{split.train.identity} {split.held_out.identity}"),
        )
    if isinstance(job.spec.data, HuggingFaceData):
        return _find_rows(job)
    if isinstance(job.spec.data, OtherData):
        own = find_own(job)
        parts = Part(True, dataset=own.train), Part(False, dataset=own.held_out)
        return Source(*parts, own.identities[0], " ".join(own.identities))
    if isinstance(job.spec.data, BlendData):
        return _find_blend(job)
    if isinstance(job.spec.data, ChatData):
        said = find_conversations(job)
        return Source(
            *(Part(True, conversations=said.train), Part(False, conversations=said.held_out)),
            *(said.train.identity, f"{said.train.identity} {said.held_out.identity}"),
        )
    found = load_corpus(job)
    extra = _extra_identity(job)
    train, whole = text_identity(found.train, extra), text_identity((*found.train, *found.held_out), extra)
    return Source(Part(True, found.train), Part(False, found.held_out), train, whole)


def _find_rows(job: Job) -> Source:
    data = job.spec.data
    assert isinstance(data, HuggingFaceData)
    train, held_out = find_arrow(job)
    if data.text_column is not None:
        check_has_length(job)
    size = job.batch.global_size
    if data.text_column is None and size > train.num_rows:
        message = f"a step takes {size} samples, but there are {train.num_rows} rows to train on"
        raise_finding("BAT210", message, "a smaller batch, or more rows", job.path, "batch")
    if job.spec.train.eval_interval is not None and not held_out.num_rows:
        hint = "raise data.eval_fraction, set data.eval_split, or leave train.eval_interval out"
        raise_finding("BAT203", "no rows are held out", hint, job.path, "data")
    identity = " ".join([train.identity, *([data.text_column, *_extra_identity(job)] if data.text_column else [])])
    return Source(Part(True, rows=train), Part(False, rows=held_out), identity, f"{identity} {held_out.identity}")


def _find_blend(job: Job) -> Source:
    jobs, sources = part_jobs(job), []
    for number, own in enumerate(jobs):
        try:
            sources.append(find_source(own))
        except DslparError as error:
            raise at_part(error, number) from None
    both = list(zip(jobs, sources, strict=True))
    train = Part(True, parts=[found.train._replace(job=own) for own, found in both])
    held_out = Part(False, parts=[found.held_out._replace(job=own) for own, found in both])
    if job.spec.train.eval_interval is not None and not held_out.read_parts:
        hint = "give one of the parts an eval_fraction, or leave train.eval_interval out"
        raise_finding("BAT203", "no part of the blend is held out", hint, job.path, "data.parts")
    identity = blend_identity(job, [found.identity for found in sources])
    return Source(train, held_out, identity, blend_identity(job, [found.whole_identity for found in sources]))


def text_identity(pieces: Sequence[FileSlice], extra: Sequence[str] = ()) -> str:
    """Return a digest of the names and lengths of a text's files, whose folders may differ, and of `extra`."""
    seen = [(os.path.basename(piece.path), piece.num_bytes) for piece in pieces]
    return hashlib.sha256((repr(seen) + "".join(extra)).encode()).hexdigest()


def _extra_identity(job: Job) -> list[str]:
    """Return the options that change the samples of the same text: the type of the data, and its tokenizer."""
    data = job.spec.data
    kind = [] if type_name(data) == "text" else [type_name(data)]
    if data.tokenizer is None:
        return kind

    tokenizer = tokens.vocabulary(job).tokenizer
    return [*kind, tokenizer.digest if tokenizer is not None else ""]


def make_samples(job: Job, part: Part, inputs: Sequence[str]) -> Samples:
    """Return the samples of a part; `inputs` are the arguments of the model's forward that come from micro-batches.

    Raises:
        DslparError: there are too few tokens, conversations or rows for a step.
    """
    job = part.job or job
    samples = _samples_of(job, part, inputs)
    if not (part.training and job.spec.data.replacement):
        return samples
    from dslpar.data.order import SamplesWithReplacement

    return SamplesWithReplacement(samples, job.spec.train.seed)


def _samples_of(job: Job, part: Part, inputs: Sequence[str]) -> Samples:
    data = job.spec.data
    if part.images is not None:
        from dslpar.data.images import ImageSamples

        indices = part.images.train if part.training else part.images.held_out
        return ImageSamples(job, part.images, indices, part.training, inputs)
    if part.tokens is not None:
        from dslpar.data.token_samples import TokenSamples

        return TokenSamples(job, part.tokens)
    if isinstance(data, OtherData):
        return own_samples(job, part.dataset, inputs, _decoder_start(job))
    if part.parts:
        return _blend(job, part, inputs)
    if isinstance(data, HuggingFaceData) and data.text_column is None:
        from dslpar.data.column_samples import ColumnSamples

        assert part.rows is not None
        return ColumnSamples(job, Table(job, part.rows), inputs, _decoder_start(job))
    if part.conversations is not None:
        from dslpar.data.chat import chat_samples

        said = chat_samples(job, part.conversations)
        if part.training:
            check_number(job, said.num_samples, "rows" if said.packing else "conversations")
        elif said.num_samples < 1:
            hint = "raise data.eval_fraction, set data.eval_path, or leave train.eval_interval out"
            raise_finding("BAT203", "no conversation is held out", hint, job.path, "data")
        return said
    samples, num_tokens = _text_samples(job, part)
    if part.training:
        check_number(job, samples.num_samples)
    elif samples.num_samples < 1:
        hint = "raise data.eval_fraction, or leave train.eval_interval out"
        raise_finding("BAT203", f"{num_tokens} tokens are held out, too few for a sample", hint, job.path, "data")
    return samples


def _text_samples(job: Job, part: Part) -> tuple[Samples, int]:
    """Return the samples of a text, and its number of tokens."""
    from dslpar.data import masked, spans, text

    data, seed, found = job.spec.data, job.spec.train.seed, tokens.vocabulary(job)
    if isinstance(data, MaskedTextData):
        ids = tokens.read_ids(part.files, found)
        return masked.MaskedSamples(ids, found, data, job.seq_len, seed, tells_next_sentence(job)), len(ids)
    if isinstance(data, SpanTextData):
        ids = tokens.read_ids(part.files, found)
        return spans.SpanSamples(ids, found, data, job.seq_len, seed, _decoder_start(job)), len(ids)
    if isinstance(data, HuggingFaceData):
        ids = _ids_of_rows(job, part)
    elif found.tokenizer is not None:
        ids = tokens.read_ids(part.files, found, ends=True)
    else:
        mapped = MappedText(job, part.files)
        return text.TextSamples(mapped, job.seq_len), len(mapped)
    return text.TextSamples(ids, job.seq_len), len(ids)


def _ids_of_rows(job: Job, part: Part) -> tokens.Ids:
    data = job.spec.data
    assert isinstance(data, HuggingFaceData)
    assert data.text_column is not None
    assert part.rows is not None
    return tokens.encode(Table(job, part.rows).texts(data.text_column), tokens.vocabulary(job), ends=True)


def _blend(job: Job, part: Part, inputs: Sequence[str]) -> Samples:
    """Return the samples of a blend; for training, log each part's share and epochs."""
    from dslpar.data.blend import BlendSamples, check_forms

    made: dict[int, Samples] = {}
    for number, each in part.read_parts.items():
        try:
            made[number] = make_samples(job, each, inputs)
        except DslparError as error:
            raise at_part(error, number) from None
    check_forms(job, made)
    weights = weights_of(job, {number: samples.num_samples for number, samples in made.items()})
    blend = BlendSamples(list(made.values()), weights, job.spec.train.seed, list(made))
    if part.training:
        log.info("a blend of %s", "; ".join(blend.describe(job)))
    return blend


def all_counted(job: Job) -> bool:
    """Return whether every label counts in the loss. The config determines it, so ranks without data know it too."""
    return all(_is_counted(job, data) for data in parts_of(job.spec.data))


def _is_counted(job: Job, data: Data) -> bool:
    if isinstance(data, SpanTextData):
        return span_lengths(data, job.seq_len).is_full
    if isinstance(data, HuggingFaceData):
        return data.text_column is not None
    return not isinstance(data, MaskedTextData | OtherData | ChatData)


def tells_next_sentence(job: Job) -> bool:
    """Return whether samples of masked text are sentence pairs: as configured, or by default for BertForPreTraining."""
    data, model = job.spec.data, job.spec.model
    if isinstance(data, MaskedTextData) and data.next_sentence is not None:
        return data.next_sentence
    return isinstance(model, OtherModel) and model.target.endswith(".BertForPreTraining")


def _decoder_start(job: Job) -> int:
    """Return the first id of a decoder's input: the model's decoder_start_token_id, or the padding id."""
    config = job.spec.model.transformers if isinstance(job.spec.model, OtherModel) else None
    values = config.values if config is not None else {}
    start = values.get("decoder_start_token_id")
    return int(start if start is not None else values.get("pad_token_id") or 0)
