"""Forward and backward over the micro-batches of a step, without the optimizer's step, on DeepSpeed's engine.

    result = forward_backward(ds_engine, loss_fn, batches)    # with a pipeline: PipelineExecutor's, alike
    optimizer_step(ds_engine)

With `reduce=False` gradients add up on each rank, until `reduce_gradients` or a call that does reduce: torch's and
ColossalAI's `no_sync`. DeepSpeed's own refuses pipelines, and counts no micro-batches; its accumulation does the same.
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
"""(inputs, labels) of each micro-batch, on the device; tensors or tuples of them."""
LossFn = Callable[[Any, Any], Tensor]
Seed = Callable[[int], None]
"""Has the next forward draw for a micro-batch, by its index in the step."""


class Result(NamedTuple):
    """What the micro-batches of one replica gave, on ranks that have the model's output."""

    loss: Tensor
    """The mean of their losses; in a pipeline, over replicas too, and on all stages."""
    outputs: list[Any]
    """Of each micro-batch, detached; empty if not asked for, and on all stages but the last."""


def forward_backward(
    ds_engine: DeepSpeedEngine,
    loss_fn: LossFn,
    batches: MicroBatches,
    seed: Seed = lambda index: None,
    keep_outputs: bool = False,
    reduce: bool = True,
    begins: bool = True,
) -> Result:
    """Run a module without a pipeline forward and backward; `begins`: no gradient stands from a batch before."""
    losses, outputs = [], []
    with training_mode(ds_engine.module, True):
        if not begins:
            with without_reduction(ds_engine):
                ds_engine.step()  # counts the last micro-batch of the batch before
        for index, (inputs, labels) in enumerate(batches):
            if index:
                ds_engine.step()  # between micro-batches it only counts them: the accumulation's boundary is the last
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
    """Run a module without a pipeline forward, in evaluation mode."""
    losses, outputs = [], []
    with training_mode(ds_engine.module, False), torch.no_grad():
        for inputs, labels in batches:
            output = ds_engine(inputs)
            losses.append(loss_fn(output, labels))
            outputs += [output] if keep_outputs else []
    return Result(torch.stack(losses).mean(), outputs)


def reduce_gradients(ds_engine: DeepSpeedEngine) -> None:
    """Reduce the gradients of batches that ran with `reduce=False`: over tied weights, and over replicas."""
    if isinstance(ds_engine, PipelineEngine):
        ds_engine._exec_reduce_tied_grads()
        ds_engine._exec_reduce_grads()
        return
    overlap_comm = getattr(ds_engine.optimizer, "overlap_comm", False)
    # Where it overlaps, DeepSpeed takes what a backward has left for reduced.
    ds_engine.optimizer.overlap_comm = False
    try:
        ds_engine.allreduce_gradients()  # DeepSpeed's count stands at the last micro-batch of a step
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
    """Have a backward without a pipeline reduce nothing, whichever micro-batch of the step it is; at ZeRO 0 and 1."""
    ds_engine.set_gradient_accumulation_boundary(False)
    try:
        yield
    finally:
        ds_engine.set_gradient_accumulation_boundary(None)  # as the micro-batches' count says


@contextmanager
def training_mode(module: nn.Module, training: bool) -> Iterator[None]:
    """Put a module in training or evaluation mode; one that is in that mode is left as it is, with all within it.

    Afterwards each submodule is as it was: a norm that a program keeps in evaluation mode stays so.
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
    """Return a tensor, or a tuple of them, without its graph."""
    return tuple(map(detach, value)) if isinstance(value, tuple) else value.detach()


def first_tensor(value: Any) -> Tensor:
    """Return a tensor itself, or the first one of a tuple."""
    first: Tensor = value[0] if isinstance(value, tuple | list) else value
    return first


def concatenate(values: list[Any]) -> Any:
    """Concatenate tensors of several micro-batches along the first dim, or tuples or mappings of them.

    Scalars become a vector.
    """
    if isinstance(values[0], Mapping):
        cls: Any = type(values[0])  # such as transformers' ModelOutput
        return cls({name: concatenate([value[name] for value in values]) for name in values[0]})
    if isinstance(values[0], tuple):
        return tuple(concatenate(list(items)) for items in zip(*values, strict=True))
    return torch.cat(values) if values[0].dim() else torch.stack(values)
