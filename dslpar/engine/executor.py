"""Forward and backward over the micro-batches of a step, without the optimizer's step, on either DeepSpeed engine.

    result = pipeline_forward_backward(ds_engine, batches)    # or forward_backward(ds_engine, loss_fn, batches)
    optimizer_step(ds_engine)

DeepSpeed's pipeline engine does both in one call, `train_batch`. Here its schedule runs without the last instruction,
which `optimizer_step` executes: the same instructions in the same order, so the same numbers to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.pipe.schedule import OptimizerStep, TrainSchedule
from torch import Tensor, nn

MicroBatches = Sequence[tuple[Any, Any]]
"""(inputs, labels) of each micro-batch, on the device; tensors or tuples of them."""
LossFn = Callable[[Any, Any], Tensor]


class Result(NamedTuple):
    """What the micro-batches of one replica gave, on ranks that have the model's output."""

    loss: Tensor
    """The mean of their losses; in a pipeline, over replicas too, and on all stages."""
    outputs: list[Any]
    """Of each micro-batch, detached; empty if not asked for, and on all stages but the last."""


def forward_backward(
    ds_engine: DeepSpeedEngine, loss_fn: LossFn, batches: MicroBatches, keep_outputs: bool = False
) -> Result:
    """Run a module without a pipeline forward and backward."""
    losses, outputs = [], []
    with _training_mode(ds_engine.module, True):
        for index, (inputs, labels) in enumerate(batches):
            if index:
                ds_engine.step()  # between micro-batches it only counts them: the accumulation's boundary is the last
            output = ds_engine(inputs)
            loss = loss_fn(output, labels)
            ds_engine.backward(loss)
            losses.append(loss.detach())
            outputs += [detach(output)] if keep_outputs else []
    return Result(torch.stack(losses).mean(), outputs)


def forward_only(
    ds_engine: DeepSpeedEngine, loss_fn: LossFn, batches: MicroBatches, keep_outputs: bool = False
) -> Result:
    """Run a module without a pipeline forward, in evaluation mode."""
    losses, outputs = [], []
    with _training_mode(ds_engine.module, False), torch.no_grad():
        for inputs, labels in batches:
            output = ds_engine(inputs)
            losses.append(loss_fn(output, labels))
            outputs += [output] if keep_outputs else []
    return Result(torch.stack(losses).mean(), outputs)


def pipeline_forward_backward(ds_engine: PipelineEngine, batches: MicroBatches, keep_outputs: bool = False) -> Result:
    """Run a pipeline forward and backward; `batches` are empty on stages between the first and the last."""
    with _training_mode(ds_engine.module, True), _collected_outputs(ds_engine.module, keep_outputs) as outputs:
        # What PipelineEngine.train_batch does before and after the schedule, but for timers and logs.
        ds_engine.set_dataiterator(iter(batches))
        # The losses of micro-batches are added to what stands here: the last step's would be counted again.
        ds_engine.total_loss = ds_engine.total_additional_losses = None
        ds_engine._compute_loss = True
        schedule = _ScheduleWithoutStep(ds_engine.micro_batches, ds_engine.num_stages, ds_engine.stage_id)
        ds_engine._exec_schedule(schedule)
        with torch.no_grad():
            ds_engine.agg_train_loss = ds_engine._aggregate_total_loss()
    return Result(ds_engine.agg_train_loss, outputs)


def pipeline_forward_only(ds_engine: PipelineEngine, batches: MicroBatches, keep_outputs: bool = False) -> Result:
    """Run a pipeline forward, in evaluation mode."""
    collected = _collected_outputs(ds_engine.module, keep_outputs)
    with _training_mode(ds_engine.module, False), collected as outputs, torch.no_grad():
        return Result(ds_engine.eval_batch(iter(batches)), outputs)


def optimizer_step(ds_engine: DeepSpeedEngine) -> None:
    """Take the optimizer's step after `forward_backward` or `pipeline_forward_backward`."""
    if isinstance(ds_engine, PipelineEngine):
        # The instruction that `_ScheduleWithoutStep` has left out.
        ds_engine._exec_optimizer_step()
    else:
        ds_engine.step()


class _ScheduleWithoutStep(TrainSchedule):  # type: ignore[misc]
    """DeepSpeed's 1F1B schedule, up to the reduction of gradients."""

    def steps(self) -> Iterator[list[Any]]:
        for instructions in super().steps():
            yield [each for each in instructions if not isinstance(each, OptimizerStep)]


@contextmanager
def _training_mode(module: nn.Module, training: bool) -> Iterator[None]:
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


@contextmanager
def _collected_outputs(module: Any, keep: bool) -> Iterator[list[Any]]:
    """Collect the outputs of the last stage, which DeepSpeed passes to the loss function alone."""
    outputs: list[Any] = []
    loss_fn = module.loss_fn

    def collecting(output: Any, labels: Any) -> Tensor:
        outputs.append(detach(output))
        loss: Tensor = loss_fn(output, labels)
        return loss

    module.loss_fn = collecting if keep else loss_fn
    try:
        yield outputs
    finally:
        module.loss_fn = loss_fn


def detach(value: Any) -> Any:
    """Return a tensor, or a tuple of them, without its graph."""
    return tuple(map(detach, value)) if isinstance(value, tuple) else value.detach()


def first_tensor(value: Any) -> Tensor:
    """Return a tensor itself, or the first one of a tuple."""
    first: Tensor = value[0] if isinstance(value, tuple) else value
    return first


def concatenate(values: list[Any]) -> Any:
    """Concatenate tensors of several micro-batches, or tuples of them, along the first dim; scalars become a vector."""
    if isinstance(values[0], tuple):
        return tuple(concatenate(list(items)) for items in zip(*values, strict=True))
    return torch.cat(values) if values[0].dim() else torch.stack(values)
