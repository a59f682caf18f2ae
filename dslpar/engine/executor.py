"""Forward and backward over the micro-batches of a step, without the optimizer's step, on either DeepSpeed engine.

    result = pipeline_forward_backward(ds_engine, loss_fn, batches)    # or forward_backward, of the same arguments
    optimizer_step(ds_engine)

DeepSpeed's pipeline engine does both in one call, `train_batch`. Here its schedule runs without the last instruction,
which `optimizer_step` executes: the same instructions in the same order, so the same numbers to the bit. Of the
backward passes the last one is marked, since gradients are complete in it.

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
from deepspeed.runtime.pipe.schedule import BackwardPass, OptimizerStep, ReduceGrads, ReduceTiedGrads, TrainSchedule
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
    ds_engine: DeepSpeedEngine,
    loss_fn: LossFn,
    batches: MicroBatches,
    keep_outputs: bool = False,
    reduce: bool = True,
    begins: bool = True,
) -> Result:
    """Run a module without a pipeline forward and backward; `begins`: no gradient stands from a batch before."""
    losses, outputs = [], []
    with _training_mode(ds_engine.module, True):
        if not begins:
            with without_reduction(ds_engine):
                ds_engine.step()  # counts the last micro-batch of the batch before
        for index, (inputs, labels) in enumerate(batches):
            if index:
                ds_engine.step()  # between micro-batches it only counts them: the accumulation's boundary is the last
            with nullcontext() if reduce else without_reduction(ds_engine):
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


def pipeline_forward_backward(
    ds_engine: PipelineEngine,
    loss_fn: LossFn,
    batches: MicroBatches,
    keep_outputs: bool = False,
    reduce: bool = True,
) -> Result:
    """Run a pipeline forward and backward; `batches` are empty on stages between the first and the last."""
    with _training_mode(ds_engine.module, True), _last_stage(ds_engine.module, loss_fn, keep_outputs) as outputs:
        # What PipelineEngine.train_batch does before and after the schedule, but for timers and logs.
        ds_engine.set_dataiterator(iter(batches))
        # The losses of micro-batches are added to what stands here: the last step's would be counted again.
        ds_engine.total_loss = ds_engine.total_additional_losses = None
        ds_engine._compute_loss = True
        ds_engine._INSTRUCTION_MAP = _INSTRUCTIONS
        cls = _ScheduleWithoutStep if reduce else _ScheduleWithoutReduction
        ds_engine._exec_schedule(cls(ds_engine.micro_batches, ds_engine.num_stages, ds_engine.stage_id))
        with torch.no_grad():
            ds_engine.agg_train_loss = ds_engine._aggregate_total_loss()
    return Result(ds_engine.agg_train_loss, outputs)


def pipeline_forward_only(
    ds_engine: PipelineEngine, loss_fn: LossFn, batches: MicroBatches, keep_outputs: bool = False
) -> Result:
    """Run a pipeline forward, in evaluation mode."""
    last_stage = _last_stage(ds_engine.module, loss_fn, keep_outputs)
    with _training_mode(ds_engine.module, False), last_stage as outputs, torch.no_grad():
        return Result(ds_engine.eval_batch(iter(batches)), outputs)


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
    """Take the optimizer's step after `forward_backward` or `pipeline_forward_backward`."""
    if isinstance(ds_engine, PipelineEngine):
        # The instruction that `_ScheduleWithoutStep` has left out.
        ds_engine._exec_optimizer_step()
    else:
        ds_engine.step()


class _LastBackwardPass(BackwardPass):  # type: ignore[misc]
    """The backward pass of a step's last micro-batch, which completes the gradients."""


def _exec_last_backward_pass(ds_engine: PipelineEngine, buffer_id: int) -> None:
    """Execute a backward pass in which a gradient may be reduced as soon as it is there."""
    outputs = ds_engine.pipe_buffers["outputs"][buffer_id]
    several = isinstance(outputs, tuple) and sum(each.is_floating_point() for each in outputs) > 1
    # Of several outputs, DeepSpeed runs backward from one after the other, and each adds to the gradients.
    ds_engine._force_grad_boundary = ds_engine.is_last_stage() or not several
    try:
        ds_engine._exec_backward_pass(buffer_id)
    finally:
        ds_engine._force_grad_boundary = False


_INSTRUCTIONS = {**PipelineEngine._INSTRUCTION_MAP, _LastBackwardPass: _exec_last_backward_pass}


class _ScheduleWithoutStep(TrainSchedule):  # type: ignore[misc]
    """DeepSpeed's 1F1B schedule, up to the reduction of gradients."""

    def steps(self) -> Iterator[list[Any]]:
        num_backward = 0
        for instructions in super().steps():
            kept = []
            for each in instructions:
                num_backward += isinstance(each, BackwardPass)
                is_last = isinstance(each, BackwardPass) and num_backward == self.micro_batches
                kept += [_LastBackwardPass(**each.kwargs) if is_last else each]
            yield [each for each in kept if not isinstance(each, OptimizerStep)]


class _ScheduleWithoutReduction(TrainSchedule):  # type: ignore[misc]
    """DeepSpeed's 1F1B schedule, up to the last backward pass."""

    def steps(self) -> Iterator[list[Any]]:
        for instructions in super().steps():
            yield [each for each in instructions if not isinstance(each, ReduceTiedGrads | ReduceGrads | OptimizerStep)]


@contextmanager
def without_reduction(ds_engine: DeepSpeedEngine) -> Iterator[None]:
    """Have a backward without a pipeline reduce nothing, whichever micro-batch of the step it is; at ZeRO 0 and 1."""
    ds_engine.set_gradient_accumulation_boundary(False)
    try:
        yield
    finally:
        ds_engine.set_gradient_accumulation_boundary(None)  # as the micro-batches' count says


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
def _last_stage(module: Any, loss_fn: LossFn, keep: bool) -> Iterator[list[Any]]:
    """Have DeepSpeed compute this loss; collect the outputs of the last stage, which it gives to the loss alone."""
    outputs: list[Any] = []
    before = module.loss_fn

    def collecting(output: Any, labels: Any) -> Tensor:
        outputs.append(detach(output))
        loss: Tensor = loss_fn(output, labels)
        return loss

    # A plain function: an nn.Module would become a part of the model.
    module.loss_fn = collecting if keep else lambda output, labels: loss_fn(output, labels)
    try:
        yield outputs
    finally:
        module.loss_fn = before


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
