"""Micro-batches of a step: take them from a program's iterator, check sizes, add the loss denominator.

    batches = take_batch(data_iter, job, steps_done)  # of micro-batches, or of whole batches, which are split
    batches = step_of(micro_batches, job, steps_done)  # the same for an iterator; all of any other iterable
    check_sizes(batches, job)
    batches = with_denominator(batches, 1, groups.axis("data"), job)

As in ColossalAI, a pipeline's schedule reads an iterator and splits the batches it yields along the first dim.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from dslpar.core.catalog import raise_finding
from dslpar.distributed import collectives
from dslpar.distributed.collectives import Axis
from dslpar.engine.executor import first_tensor
from dslpar.layers.loss import IGNORE_INDEX
from dslpar.layout.resolve import Job

MicroBatch = tuple[Any, Any]
"""(inputs, labels). For tokens, both are int64 [micro_size, sequence]; the loss ignores labels of -100."""


def take_batch(data_iter: Iterator[Any], job: Job, steps_done: int) -> list[MicroBatch]:
    """Take a step's micro-batches from an iterator over micro-batches or batches of accumulation * micro_size samples.

    Raises:
        DslparError: an item is not (inputs, labels), or the data ends in the middle of a step.
        StopIteration: there is no more data.
    """
    return list(_read_batch(data_iter, job, steps_done))


def step_of(micro_batches: Iterable[Any], job: Job, steps_done: int) -> Iterable[MicroBatch]:
    """Return the micro-batches of one step: all of a list, or the next ones of an iterator, as in DeepSpeed.

    They are read one by one, since an iterator may reuse one buffer for all of them.

    Raises:
        DslparError: an item is not (inputs, labels), the data ends in the middle of a step, or more than one step's
            micro-batches come from an iterable without a position, such as a DataLoader.
        StopIteration: the iterator has no more data.
    """
    if isinstance(micro_batches, Iterator):
        return _read_batch(micro_batches, job, steps_done)
    return micro_batches if isinstance(micro_batches, Sequence) else _only_step(micro_batches, job)


def _read_batch(data_iter: Iterator[Any], job: Job, steps_done: int) -> Iterator[MicroBatch]:
    """Return a step's micro-batches; only the first one is read at once."""
    batch = job.batch
    first = _pair(next_item(data_iter, job, steps_done), job)
    if len(first_tensor(first[0])) == batch.accumulation * batch.micro_size:
        inputs, labels = (_split(value, batch.accumulation) for value in first)
        return zip(inputs, labels, strict=True)
    return chain([first], _read_rest(data_iter, job))


def _read_rest(data_iter: Iterator[Any], job: Job) -> Iterator[MicroBatch]:
    num = job.batch.accumulation
    read = 1
    for item in islice(data_iter, num - 1):
        yield _pair(item, job)
        read += 1
    if read < num:
        message = f"the data ended after {read} of {num} micro-batches of a step"
        raise_finding("BAT208", message, "drop the last, incomplete step of your data", job.path, "schedule")


def _only_step(micro_batches: Iterable[Any], job: Job) -> Iterator[MicroBatch]:
    num = job.batch.accumulation
    for index, item in enumerate(micro_batches):
        if index == num:
            kind = type(micro_batches).__name__
            message = f"a {kind} of more than {num} micro-batches was passed, but a step takes {num}"
            hint = "pass an iterator, which keeps its position: batches = iter(data) before the loop, then batches"
            raise_finding("BAT204", message, hint, job.path)
        yield item


def next_item(data_iter: Iterator[Any], job: Job, steps_done: int) -> Any:
    """Return the next item. Raises StopIteration: the data ended after `steps_done` steps."""
    for item in data_iter:
        return item
    # Not a DslparError: loops over data rely on StopIteration to end.
    raise StopIteration(
        f"the data ended after step {steps_done}: a pass has len(train_dataloader) steps, each of "
        f"{job.batch.accumulation} micro-batches; begin the next one with iter(train_dataloader)"
    )


def check_sizes(batches: list[MicroBatch], job: Job) -> None:
    """Check that there are `accumulation` micro-batches of `micro_size` samples. Raises DslparError."""
    wanted = job.batch
    sizes = [first_tensor(inputs).shape[0] for inputs, _ in batches]
    if sizes != [wanted.micro_size] * wanted.accumulation:
        required = f"{wanted.accumulation} micro-batches of {wanted.micro_size}"
        hint = f"pass {required} samples, or change batch.accumulation or batch.micro_size"
        got = f"{len(sizes)} of {sizes[0]}" if len(set(sizes)) == 1 else f"sizes {sizes}"
        raise_finding("BAT204", f"a step takes {required} samples, but got {got}", hint, job.path)


def with_denominator(batches: list[MicroBatch], num_labels: int, data: Axis, job: Job) -> list[MicroBatch]:
    """Append to each micro-batch's labels the denominator of its summed loss.

    DeepSpeed averages losses over micro-batches and replicas with equal weights, regardless of how many tokens count in
    each. To make this the mean over all counted tokens, each loss is the sum of its token losses divided by the *mean*
    number of counted tokens per micro-batch of the step. `num_labels` is the number of label tensors that the loss
    takes.
    """
    given = [labels if isinstance(labels, tuple) else (labels,) for _, labels in batches]
    if any(len(labels) != num_labels for labels in given):
        message = f"labels are {len(given[0])} tensors, but the model's own loss takes {num_labels}"
        raise_finding("BAT205", message, "give dslpar.initialize(criterion=...), which takes them", job.path)
    # One all-reduce of one number per step, for any number of micro-batches. If there are several label tensors, the
    # first one holds the token labels, and only these can be IGNORE_INDEX.
    counted = torch.stack([(labels[0] != IGNORE_INDEX).sum() for labels in given]).sum()
    total = collectives.all_reduce(counted, data).clamp(min=1)
    denominator = total.float() / (len(batches) * data.size)
    return [(inputs, (*labels, denominator)) for (inputs, _), labels in zip(batches, given, strict=True)]


def to_device(
    value: Any, device: torch.device, dtype: torch.dtype | None, path: str, *, non_blocking: bool = False
) -> Any:
    """Move a tensor or a tuple of tensors to the device; cast floating-point tensors to `dtype`, if given.

    `non_blocking`: the host does not wait for copies from pinned memory. The caller must not overwrite that memory
    until the copies are done.
    """
    if isinstance(value, list | tuple):
        return tuple(to_device(item, device, dtype, path, non_blocking=non_blocking) for item in value)
    if not isinstance(value, Tensor):
        message = f"a micro-batch holds a {type(value).__name__}"
        raise_finding("BAT205", message, "give tensors, or tuples of tensors: (inputs, labels)", path)
    return value.to(device, dtype if value.is_floating_point() else None, non_blocking=non_blocking)


def pin(batches: list[MicroBatch]) -> list[MicroBatch]:
    """Copy micro-batches to pinned memory, from which copies to the accelerator do not block."""
    return [(_pinned(inputs), _pinned(labels)) for inputs, labels in batches]


def _pinned(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return tuple(map(_pinned, value))
    return get_accelerator().pin_memory(value) if isinstance(value, Tensor) else value


def _pair(item: Any, job: Job) -> MicroBatch:
    if isinstance(item, Mapping):
        # In transformers, labels are a copy of the inputs, and the model shifts them. Used here unshifted, they would
        # train the model to repeat its input.
        message = f"a batch is a mapping of {', '.join(map(repr, item))}"
        hint = "give (inputs, labels), such as ((input_ids, attention_mask), labels): labels[i] follows input_ids[i]"
        raise_finding("BAT205", message, hint, job.path)
    if not isinstance(item, tuple | list) or len(item) != 2:
        what = f"{len(item)} values" if isinstance(item, tuple | list) else f"a {type(item).__name__}"
        hint = "give (inputs, labels), each a tensor or a tuple of tensors"
        raise_finding("BAT205", f"a batch is {what}", hint, job.path)
    inputs, labels = item
    return inputs, labels


def _split(value: Any, num: int) -> list[Any]:
    """Split a tensor, or each tensor of a tuple, into `num` equal parts along the first dim."""
    if isinstance(value, tuple | list):
        return list(zip(*(_split(item, num) for item in value), strict=True))
    return list(value.chunk(num))
