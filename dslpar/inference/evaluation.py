"""Evaluate a trained model on each sample of the held-out data, or of data that the command line names.

    result = evaluate(model, parts, ("perplexity", "accuracy@1"), limit=None)

The samples come in the order of the evaluation during training, and the loss is computed in the same way. So the first
samples give the `eval_loss` of metrics.jsonl. The division into micro-batches and replicas does not change the sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dslpar.core.catalog import raise_finding
from dslpar.core.errors import DslparError, Finding
from dslpar.data.corpus import FileSlice
from dslpar.data.order import Samples, sample_indices
from dslpar.data.source import Part, Source, make_samples
from dslpar.distributed import collectives
from dslpar.inference import metrics
from dslpar.inference.metrics import Tally
from dslpar.inference.model import InferenceModel
from dslpar.layers.loss import IGNORE_INDEX
from dslpar.layout.transformers_data_types import inputs_of
from dslpar.reporting import logging

_LEAST_BATCH = 8


class Result(NamedTuple):
    """Result of an evaluation."""

    values: dict[str, float]
    """Values by metric, in the requested order."""
    samples: int
    """Number of samples measured."""
    labels: int
    """Number of the samples' labels that are not ignored; 0 if the model predicts neither tokens nor classes."""
    classes: list[dict[str, float]]
    """Class number, precision, recall, f1 and number of samples, per class; empty if the model is no classifier."""


def held_out_parts(source: Source) -> list[Part]:
    """Return the held-out data of a run: the parts of a blend, or else a single part."""
    return list(source.held_out.read_parts.values()) if source.held_out.parts else [source.held_out]


def all_parts(source: Source) -> list[Part]:
    """Return all data of a source, training and held-out together: the parts of a blend, or else a single part."""
    train, held_out = source.train, source.held_out
    if train.parts:
        return [_whole(*each) for each in zip(train.parts, held_out.parts, strict=True)]
    return [_whole(train, held_out)]


def _whole(train: Part, held_out: Part) -> Part:
    if held_out.images is not None:
        images = held_out.images
        every = sorted((*images.train, *images.held_out))
        return held_out._replace(images=images._replace(held_out=every))
    if train.tokens is not None:
        whole = train.tokens._replace(stop=train.tokens.folder.num_tokens, training=False)
        return held_out._replace(tokens=whole)
    if train.rows is not None:
        return held_out._replace(rows=train.rows._replace(num_held_out=0))
    if train.dataset is not None:
        return held_out._replace(dataset=train.dataset)
    if train.conversations is not None and held_out.conversations is not None:
        same = train.conversations.files == held_out.conversations.files
        stop = held_out.conversations.stop if same else train.conversations.stop  # else from data.eval_path
        return held_out._replace(conversations=train.conversations._replace(stop=stop, training=False))
    return held_out._replace(files=_joined((*train.files, *held_out.files)))


def _joined(slices: Sequence[FileSlice]) -> tuple[FileSlice, ...]:
    """Join adjacent slices of the same file, so that the text does not end between them."""
    found: list[FileSlice] = []
    for each in slices:
        if found and (found[-1].path, found[-1].stop) == (each.path, each.start):
            found[-1] = found[-1]._replace(stop=each.stop)
        else:
            found.append(each)
    return tuple(found)


def evaluate(
    model: InferenceModel, parts: Sequence[Part], requested: Sequence[str], limit: int | None = None
) -> Result:
    """Measure the model on every sample of the parts, or on the first `limit` of each. All ranks must call it together.

    Raises:
        DslparError: on every rank, for an unknown metric, or data that are empty or cannot be read.
    """
    groups = model.groups
    kind = metrics.kind_of(model.job, model.family, groups)
    names = metrics.parse_metrics(requested, kind)
    tally, num_samples = Tally(kind, metrics.accuracy_ks(names)), 0
    for part in parts:
        samples = _read(model, part)
        size = collectives.broadcast_object(samples.num_samples if samples else 0, groups.axis("pipe"))
        count = size if limit is None else min(limit, size)
        num_samples += _add_part(model, tally, samples, count)
    if not num_samples:
        hint = "more data, or a smaller batch.micro_size"
        raise_finding("BAT203", "there is no sample to measure the model on", hint, model.job.path, "data")
    of_replicas = collectives.gather_objects(tally, groups.axis("data"))
    pipe = groups.axis("pipe")
    total = collectives.broadcast_object(metrics.sum_tallies(of_replicas), pipe, source=pipe.size - 1)
    found = total.results()
    return Result({name: found[name] for name in names}, num_samples, total.count, total.classes())


def _read(model: InferenceModel, part: Part) -> Samples | None:
    """Return the samples on the first and the last pipeline stage, None on others. All ranks raise the same error."""
    samples: Samples | None = None
    findings: Sequence[Finding] = ()
    if model.is_first_stage or model.is_last_stage:
        try:
            samples = make_samples(model.job, part, inputs_of(model.job))
        except DslparError as error:
            findings = error.findings
    world = model.groups.axis("pipe", "data", "tensor")
    if found := next(filter(None, collectives.gather_objects(findings, world)), None):
        raise DslparError(found)
    return samples


def _add_part(model: InferenceModel, tally: Tally, samples: Samples | None, count: int) -> int:
    """Add the first `count` samples to the tally; return the number of samples added."""
    micro = model.job.spec.batch.micro_size or -(-_LEAST_BATCH // model.batch_multiple) * model.batch_multiple
    if tally.kind == metrics.OTHER:
        count -= count % micro  # the model's own loss has no mask for padding
    data = model.groups.axis("data")
    begins = range(data.index * micro, count, data.size * micro)
    bar = logging.progress_bar(len(begins), 0, shown=model.groups.rank == 0)
    for begin in begins:
        numbers = range(begin, begin + micro)
        inputs, labels = _batch(model, samples, numbers, count) if samples else (None, None)
        output = model(inputs)
        if model.is_last_stage:
            if model.job.has_program_model:
                model.check_logits(output, labels[0] if isinstance(labels, tuple) else labels)
            tally.add(model.family, model.groups, output, _to_device(labels, model.device))
        bar.update()
    bar.close()
    return count


def _batch(model: InferenceModel, samples: Samples, numbers: range, count: int) -> tuple[Any, Any]:
    """Return inputs and labels of a micro-batch. Numbers from `count` on are padding: their labels are ignored."""
    real = [number if number < count else count - 1 for number in numbers]
    inputs, labels = samples.batch(sample_indices(samples, real, model.job.spec.train.seed), real)
    padding = torch.tensor([number >= count for number in numbers])
    return inputs, _ignored(labels, padding) if padding.any() else labels


def _ignored(labels: Any, padding: Tensor) -> Any:
    if isinstance(labels, tuple):
        return tuple(_ignored(each, padding) for each in labels)
    return labels.masked_fill(padding.view(-1, *[1] * (labels.dim() - 1)), IGNORE_INDEX)


def _to_device(value: Any, device: torch.device) -> Any:
    return tuple(_to_device(each, device) for each in value) if isinstance(value, tuple) else value.to(device)
