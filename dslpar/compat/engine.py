"""ColossalAI's Engine: dslpar's engine with ColossalAI's attributes, calls by keyword, and a schedule.

    engine, train_dataloader, *_ = colossalai.initialize(model, optimizer, criterion, train_dataloader)
    engine.execute_schedule(data_iter)               # or: loss = engine.criterion(engine(x, mask=m), y)
    engine.step()

A model without a pipeline is called as the program calls it, with any arguments. The program steps its LR scheduler.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor, nn

from dslpar.compat.schedules import OutputLabelLoss, Schedule
from dslpar.distributed.groups import Groups
from dslpar.engine.model import to_fp32
from dslpar.models.layered import LayerSpec
from dslpar.models.sequential import SingleModule
from dslpar.training.user_loop_engine import ProgramEngine


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Arguments of a model's forward, as one value: an engine passes on one."""

    positional: tuple[Any, ...]
    named: dict[str, Any]

    @property
    def device(self) -> torch.device:
        """The device of the tensors."""
        return current_device()


class CalledModule(SingleModule):
    """A module that is called with the program's own arguments; names of its weights are those of the module."""

    def layers(self, groups: Groups) -> list[LayerSpec]:
        """Return the single layer."""
        return [LayerSpec(name="model", build=self.build, forward=_call)]


def _call(module: nn.Module, x: Any) -> Any:
    if isinstance(x, Arguments):
        return module(*x.positional, **x.named)
    return module(*x) if isinstance(x, tuple) else module(x)


class ColossalaiEngine(ProgramEngine):
    """Engine of a ColossalAI program; `colossalai.initialize` makes it."""

    model: nn.Module
    """The module that the program has passed, with its own names: this rank's stage, if there is a pipeline."""
    optimizer: Any
    """The optimizer that the program has passed, or DeepSpeed's."""
    schedule: Schedule
    """What `execute_schedule` runs."""
    own_criterion: Callable[..., Any] | None = None
    """The criterion that the program has passed."""

    @property
    def uses_pipeline(self) -> bool:
        """True if the model runs in several stages."""
        return self._has_pipeline

    @property
    def training(self) -> bool:
        """True in training mode."""
        return bool(self.deepspeed.module.training)

    def execute_schedule(self, data_iter: Iterator[Any] | None, **kwargs: Any) -> OutputLabelLoss:
        """Run the next batch through `schedule`; return its output, label and loss."""
        return self.schedule.forward_backward_step(self, data_iter, **kwargs)

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """Return the model's output for one micro-batch; tensors are moved to the device."""
        takes_any = self.deepspeed.module.specs[0].forward is _call
        if not takes_any or (len(inputs) == 1 and not named and isinstance(inputs[0], Tensor)):
            return super().__call__(*inputs)
        return super().__call__(Arguments(to_device(inputs), to_device(named)))

    def _to_device(self, value: Any, inputs: bool = False, non_blocking: bool = False) -> Any:
        if isinstance(value, Arguments):
            return Arguments(self._cast(value.positional), self._cast(value.named))
        return super()._to_device(value, inputs, non_blocking)

    def _cast(self, value: Any) -> Any:
        """Cast floating-point tensors to the model's dtype."""
        if isinstance(value, Tensor):
            return super()._to_device(value, inputs=True)
        return _each(value, self._cast)

    def criterion(self, *outputs_and_labels: Any, **named: Any) -> Any:
        """Return the loss of one micro-batch, by the program's criterion, which receives outputs in fp32."""
        if self.own_criterion is None:
            return super().criterion(*outputs_and_labels, **named)
        values = [to_fp32(to_device(value)) for value in outputs_and_labels]
        return self.own_criterion(*values, **{key: to_fp32(to_device(value)) for key, value in named.items()})


def to_device(value: Any) -> Any:
    """Move the tensors in a value, with nested lists, tuples and dicts, to this rank's device."""
    if isinstance(value, Tensor):
        return value.to(current_device())
    return _each(value, to_device)


def _each(value: Any, convert: Callable[[Any], Any]) -> Any:
    if isinstance(value, Mapping):
        return {key: convert(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(convert(item) for item in value)
    return value


def current_device() -> torch.device:
    """Return this rank's device."""
    return torch.device(get_accelerator().current_device_name())
