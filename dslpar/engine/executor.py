"""Run forward and backward of a step's micro-batches on DeepSpeed's engine, without the optimizer step.

    result = forward_backward(ds_engine, loss_fn, batches)    # with a pipeline: PipelineExecutor's, alike
    optimizer_step(ds_engine)

With `reduce=False`, gradients accumulate on each rank until `reduce_gradients` or a call with `reduce=True`, like
`no_sync` in torch and ColossalAI. DeepSpeed's own `no_sync` is not used: it refuses pipelines and does not count
micro-batches. Instead, DeepSpeed's gradient accumulation boundary is switched off for these micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import Tensor, nn

from dslpar.layers.gradient_accumulation_fusion import fused_accumulation

MicroBatches = Sequence[tuple[Any, Any]]
"""(inputs, labels) of each micro-batch, on the device, each a tensor or a tuple of tensors."""
LossFn = Callable[[Any, Any], Tensor]
Seed = Callable[[int], None]
"""Seeds the next forward's random draws, given the micro-batch's index in the step."""


class Result(NamedTuple):
    """Results of one replica's micro-batches, on ranks that have the model's output."""

    loss: Tensor
    """Mean loss of the micro-batches. In a pipeline it is also averaged over replicas, and all stages have it."""
    outputs: list[Any]
    """Each micro-batch's output, detached. Empty if not requested, and on all stages but the last."""


def forward_backward(
    ds_engine: DeepSpeedEngine,
    loss_fn: LossFn,
    batches: MicroBatches,
    seed: Seed = lambda index: None,
    keep_outputs: bool = False,
    reduce: bool = True,
    begins: bool = True,
) -> Result:
    """Run forward and backward without a pipeline.

    begins: True for the first batch of a step. Otherwise gradients add to those of the step's earlier batches.
    """
    losses, outputs = [], []
    with training_mode(ds_engine.module, True):
        if not begins:
            with without_reduction(ds_engine):
                ds_engine.step()  # only counts the last micro-batch of the batch before
        for index, (inputs, labels) in enumerate(batches):
            if index:
                ds_engine.step()  # only counts: the optimizer steps after the last micro-batch
            seed(index)
            with nullcontext() if reduce else without_reduction(ds_engine):
                output = ds_engine(inputs)
                loss = loss_fn(output, labels)
                with fused_accumulation():
                    ds_engine.backward(loss)
            losses.append(loss.detach())
            outputs += [detach(output)] if keep_outputs else []
    return Result(torch.stack(losses).mean(), outputs)


def forward_only(
    ds_engine: DeepSpeedEngine, loss_fn: LossFn, batches: MicroBatches, keep_outputs: bool = False
) -> Result:
    """Run only the forward, without a pipeline, in evaluation mode."""
    losses, outputs = [], []
    with training_mode(ds_engine.module, False), torch.no_grad():
        for inputs, labels in batches:
            output = ds_engine(inputs)
            losses.append(loss_fn(output, labels))
            outputs += [output] if keep_outputs else []
    return Result(torch.stack(losses).mean(), outputs)


def reduce_gradients(ds_engine: DeepSpeedEngine) -> None:
    """Sum tied weights' gradients over stages, and average all gradients over replicas, after `reduce=False`."""
    if isinstance(ds_engine, PipelineEngine):
        ds_engine._exec_reduce_tied_grads()
        ds_engine._exec_reduce_grads()
        return
    overlap_comm = getattr(ds_engine.optimizer, "overlap_comm", False)
    # With overlap_comm, DeepSpeed assumes that the backward has already reduced its gradients.
    ds_engine.optimizer.overlap_comm = False
    try:
        ds_engine.allreduce_gradients()  # reduces only because DeepSpeed's counter is at the step's last micro-batch
    finally:
        ds_engine.optimizer.overlap_comm = overlap_comm


def optimizer_step(ds_engine: DeepSpeedEngine) -> None:
    """Take the optimizer's step after `forward_backward`, with a pipeline or without."""
    if isinstance(ds_engine, PipelineEngine):
        ds_engine._exec_optimizer_step()
    else:
        ds_engine.step()


@contextmanager
def without_reduction(ds_engine: DeepSpeedEngine) -> Iterator[None]:
    """Suppress gradient reduction in backwards without a pipeline, on any micro-batch; for ZeRO 0 and 1."""
    ds_engine.set_gradient_accumulation_boundary(False)
    try:
        yield
    finally:
        ds_engine.set_gradient_accumulation_boundary(None)  # again decided by the count of micro-batches


@contextmanager
def training_mode(module: nn.Module, training: bool) -> Iterator[None]:
    """Put a module in training or evaluation mode; leave it and its submodules alone if it already is in that mode.

    On exit each submodule's mode is restored, so that a norm that a program keeps in evaluation mode stays in it.
    """
    before = [] if training == module.training else [(part, part.training) for part in module.modules()]
    if before:
        module.train(training)
    try:
        yield
    finally:
        for part, mode in before:
            part.training = mode


def detach(value: Any) -> Any:
    """Detach a tensor or a nested tuple of tensors from its graph."""
    return tuple(map(detach, value)) if isinstance(value, tuple) else value.detach()


def first_tensor(value: Any) -> Tensor:
    """Return a tensor itself, or the first element of a tuple or list."""
    first: Tensor = value[0] if isinstance(value, tuple | list) else value
    return first


def concatenate(values: list[Any]) -> Any:
    """Concatenate several micro-batches' tensors, or tuples or mappings of tensors, along the first dim.

    Scalars are stacked to a vector.
    """
    if isinstance(values[0], Mapping):
        cls: Any = type(values[0])  # such as transformers' ModelOutput
        return cls({name: concatenate([value[name] for value in values]) for name in values[0]})
    if isinstance(values[0], tuple):
        return tuple(concatenate(list(items)) for items in zip(*values, strict=True))
    return torch.cat(values) if values[0].dim() else torch.stack(values)
