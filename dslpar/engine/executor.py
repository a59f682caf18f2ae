"""Forward and backward over the micro-batches of a step, without the step: over either of DeepSpeed's two engines.

    passed = piped(runner, batches)           # or plain(runner, loss, batches)
    take_step(runner)

DeepSpeed's pipeline engine has these two in one, `train_batch`; here its schedule runs without the last instruction,
which `take_step` executes: the same instructions in the same order, so the same numbers to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.pipe.schedule import OptimizerStep, TrainSchedule
from torch import Tensor, nn

Batches = Sequence[tuple[Any, Any]]
"""(inputs, labels) of each micro-batch, on the device; tensors or tuples of them."""
Loss = Callable[[Any, Any], Tensor]


class Passed(NamedTuple):
    """What one replica's micro-batches gave, on ranks that have the model's output."""

    loss: Tensor
    """The mean of their losses; of a pipeline, over replicas too, and on all stages."""
    outputs: list[Any]
    """Of each micro-batch, detached; empty where they were not asked for, or on other stages than the last."""


def plain(runner: Any, loss: Loss, batches: Batches, keep: bool = False) -> Passed:
    """A module without pipeline. DeepSpeed's `step` between micro-batches only counts them."""
    losses, outputs = [], []
    with _mode(runner.module, training=True):
        for index, (inputs, labels) in enumerate(batches):
            if index:
                runner.step()
            output = runner(inputs)
            one = loss(output, labels)
            runner.backward(one)
            losses.append(one.detach())
            outputs += [detached(output)] if keep else []
    return Passed(torch.stack(losses).mean(), outputs)


def plain_forward(runner: Any, loss: Loss, batches: Batches, keep: bool = False) -> Passed:
    """The same without backward, as in evaluation."""
    losses, outputs = [], []
    with _mode(runner.module, training=False), torch.no_grad():
        for inputs, labels in batches:
            output = runner(inputs)
            losses.append(loss(output, labels))
            outputs += [output] if keep else []
    return Passed(torch.stack(losses).mean(), outputs)


def piped(runner: PipelineEngine, batches: Batches, keep: bool = False) -> Passed:
    """A pipeline; `batches` are empty on stages between the first and the last."""
    with _mode(runner.module, training=True), _kept(runner.module, keep) as outputs:
        runner.set_dataiterator(iter(batches))
        runner.total_loss = runner.total_additional_losses = None
        runner._compute_loss = True
        runner._exec_schedule(_WithoutStep(runner.micro_batches, runner.num_stages, runner.stage_id))
        with torch.no_grad():
            runner.agg_train_loss = runner._aggregate_total_loss()
    return Passed(runner.agg_train_loss, outputs)


def piped_forward(runner: PipelineEngine, batches: Batches, keep: bool = False) -> Passed:
    """The same without backward, as in evaluation."""
    with _mode(runner.module, training=False), _kept(runner.module, keep) as outputs, torch.no_grad():
        return Passed(runner.eval_batch(iter(batches)), outputs)


def take_step(runner: Any) -> None:
    """The optimizer's step after `plain` or `piped`."""
    runner._exec_optimizer_step() if isinstance(runner, PipelineEngine) else runner.step()


class _WithoutStep(TrainSchedule):  # type: ignore[misc]
    """DeepSpeed's 1F1B, up to the reduction of gradients."""

    def steps(self) -> Iterator[list[Any]]:
        for instructions in super().steps():
            yield [each for each in instructions if not isinstance(each, OptimizerStep)]


@contextmanager
def _mode(module: nn.Module, training: bool) -> Iterator[None]:
    """Training or evaluation while this lasts; a module that is in that mode is left as it is, with all within it.

    Afterwards each part is as it was: a norm that a program keeps in evaluation mode stays so.
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
def _kept(module: Any, keep: bool) -> Iterator[list[Any]]:
    """Outputs of the last stage, which DeepSpeed shows to nobody but the loss."""
    outputs: list[Any] = []
    loss = module.loss_fn

    def keeping(output: Any, labels: Any) -> Tensor:
        outputs.append(detached(output))
        value: Tensor = loss(output, labels)
        return value

    module.loss_fn = keeping if keep else loss
    try:
        yield outputs
    finally:
        module.loss_fn = loss


def detached(value: Any) -> Any:
    """A tensor or a tuple of them, without its graph."""
    return tuple(map(detached, value)) if isinstance(value, tuple) else value.detach()
