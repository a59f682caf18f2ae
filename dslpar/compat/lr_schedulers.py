"""ColossalAI's LR schedulers, with its arithmetic. The program steps them, once per step or per epoch.

    lr_scheduler = CosineAnnealingWarmupLR(optimizer, total_steps=100, warmup_steps=10)

ColossalAI counts differently from most: its warm-ups begin above 0, and LinearWarmupLR reaches the full learning rate
one step after its warm-up. A warm-up steps another scheduler afterwards, which begins at the full learning rate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

Lambda = Callable[[int], float]


class LinearWarmupLR(LRScheduler):
    """Rise to the learning rate over `warmup_steps`, then fall to 0 at `total_steps`, both linearly."""

    def __init__(
        self, optimizer: Optimizer, total_steps: int, warmup_steps: int = 0, last_epoch: int = -1, **_: Any
    ) -> None:
        self.total_steps, self.warmup_steps = total_steps, warmup_steps
        super().__init__(optimizer, last_epoch)

    def get_lr(self) -> list[float | Tensor]:
        """Return the learning rate of each parameter group."""
        if self.last_epoch < self.warmup_steps:
            share = (self.last_epoch + 1) / (self.warmup_steps + 1)
        else:
            share = (self.total_steps - self.last_epoch) / (self.total_steps - self.warmup_steps)
        return [share * lr for lr in self.base_lrs]


class _Phases(LRScheduler):
    """A linear warm-up, then a constant learning rate, then another curve; each may have no steps.

    `curve` is the share of the learning rate above `floor`, by the number of steps since the curve began.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        warmup_steps: int,
        flat_steps: int,
        curve: Lambda,
        floor: float = 0.0,
        last_epoch: int = -1,
    ) -> None:
        if warmup_steps < 0 or flat_steps < 0:
            raise ValueError(f"a number of steps is negative: {warmup_steps} of warm-up, {flat_steps} constant")
        self.warmup_steps, self.flat_steps, self.curve, self.floor = warmup_steps, flat_steps, curve, floor
        super().__init__(optimizer, last_epoch)

    def get_lr(self) -> list[float | Tensor]:
        """Return the learning rate of each parameter group."""
        step = self.last_epoch
        if step < self.warmup_steps:
            return [(step + 1) / self.warmup_steps * lr for lr in self.base_lrs]
        if step < self.warmup_steps + self.flat_steps:
            return list(self.base_lrs)
        share = self.curve(step - self.warmup_steps - self.flat_steps)
        return [self.floor + (lr - self.floor) * share for lr in self.base_lrs]

    def state_dict(self) -> dict[str, Any]:
        """Return the state, without the curve, which the program makes anew."""
        return {name: value for name, value in super().state_dict().items() if name != "curve"}


def _half_cosine(steps: int) -> Lambda:
    return lambda step: (1 + math.cos(math.pi * step / steps)) / 2


class CosineAnnealingLR(lr_scheduler.CosineAnnealingLR):
    """Half a cosine from the learning rate to `eta_min` over `total_steps`, and up again after them, as torch's."""

    def __init__(
        self, optimizer: Optimizer, total_steps: int, eta_min: float = 0, last_epoch: int = -1, **_: Any
    ) -> None:
        super().__init__(optimizer, total_steps, eta_min, last_epoch)


class CosineAnnealingWarmupLR(_Phases):
    """A linear warm-up, then half a cosine to `eta_min`."""

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        warmup_steps: int = 0,
        eta_min: float = 0.0,
        last_epoch: int = -1,
    ) -> None:
        curve = _half_cosine(total_steps - warmup_steps)
        super().__init__(optimizer, int(warmup_steps), 0, curve, eta_min, last_epoch)


class FlatAnnealingLR(_Phases):
    """The learning rate for the share `pct_start` of the steps, then half a cosine to 0."""

    def __init__(
        self, optimizer: Optimizer, total_steps: int, pct_start: float = 0.72, last_epoch: int = -1, **_: Any
    ) -> None:
        flat = _flat_steps(total_steps, pct_start)
        super().__init__(optimizer, 0, flat, _half_cosine(total_steps - flat), last_epoch=last_epoch)


class FlatAnnealingWarmupLR(_Phases):
    """A linear warm-up, then the learning rate for the share `pct_start` of what is left, then half a cosine."""

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        warmup_steps: int = 0,
        pct_start: float = 0.72,
        eta_min: float = 0,
        last_epoch: int = -1,
        **_: Any,
    ) -> None:
        flat = _flat_steps(total_steps - warmup_steps, pct_start)
        curve = _half_cosine(total_steps - warmup_steps - flat)
        super().__init__(optimizer, warmup_steps, flat, curve, eta_min, last_epoch)


def _flat_steps(steps: int, share: float) -> int:
    if not 0.0 <= share <= 1.0:
        raise ValueError(f"pct_start is {share}: a share is between 0 and 1")
    return int(steps * share)


class PolynomialLR(_Phases):
    """A power of what is left of the steps, to `end_lr`."""

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        end_lr: float = 0.0001,
        power: float = 1.0,
        last_epoch: int = -1,
        **_: Any,
    ) -> None:
        super().__init__(optimizer, 0, 0, _power_of_rest(total_steps, power), _above_0(end_lr), last_epoch)


class PolynomialWarmupLR(_Phases):
    """A linear warm-up, then a power of what is left of the steps, to `end_lr`."""

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        warmup_steps: int = 0,
        end_lr: float = 0.0001,
        power: float = 1.0,
        last_epoch: int = -1,
        **_: Any,
    ) -> None:
        curve = _power_of_rest(total_steps - warmup_steps, power)
        super().__init__(optimizer, warmup_steps, 0, curve, _above_0(end_lr), last_epoch)


def _power_of_rest(steps: int, power: float) -> Lambda:
    return lambda step: float((1 - min(step, steps) / steps) ** power)


def _above_0(end_lr: float) -> float:
    if end_lr < 0:
        raise ValueError(f"end_lr is {end_lr}: it must not be negative")
    return end_lr


class MultiStepLR(lr_scheduler.MultiStepLR):
    """Multiply the learning rate by `gamma` at each milestone; `total_steps` has no effect."""

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        milestones: Sequence[int] = (),
        gamma: float = 0.1,
        last_epoch: int = -1,
        **_: Any,
    ) -> None:
        super().__init__(optimizer, list(milestones), gamma, last_epoch)


class MultiStepWarmupLR(_Phases):
    """A linear warm-up, then the learning rate times `gamma` for each milestone that has passed."""

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        warmup_steps: int = 0,
        milestones: Sequence[int] = (),
        gamma: float = 0.1,
        last_epoch: int = -1,
        **_: Any,
    ) -> None:
        if not milestones:
            raise ValueError("MultiStepWarmupLR needs milestones: the steps at which the learning rate falls")
        later = [step - warmup_steps for step in milestones if step >= warmup_steps]
        curve: Lambda = lambda step: gamma ** sum(step >= each for each in later)  # noqa: E731
        super().__init__(optimizer, warmup_steps, 0, curve, last_epoch=last_epoch)


class OneCycleLR(lr_scheduler.OneCycleLR):
    """torch's one cycle, whose peak is the optimizer's learning rate."""

    def __init__(self, optimizer: Optimizer, total_steps: int, last_epoch: int = -1, **kwargs: Any) -> None:
        peaks = [group["lr"] for group in optimizer.param_groups]
        super().__init__(optimizer, peaks, total_steps=total_steps, last_epoch=last_epoch, **kwargs)


class LambdaLR(lr_scheduler.LambdaLR):
    """torch's; `total_steps` has no effect."""

    def __init__(self, optimizer: Optimizer, total_steps: int, lr_lambda: Any = None, last_epoch: int = -1) -> None:
        super().__init__(optimizer, lr_lambda, last_epoch)


class MultiplicativeLR(lr_scheduler.MultiplicativeLR):
    """torch's; `total_steps` has no effect."""

    def __init__(self, optimizer: Optimizer, total_steps: int, lr_lambda: Any = None, last_epoch: int = -1) -> None:
        super().__init__(optimizer, lr_lambda, last_epoch)


class StepLR(lr_scheduler.StepLR):
    """torch's; `total_steps` has no effect."""

    def __init__(
        self, optimizer: Optimizer, total_steps: int, step_size: int = 1, gamma: float = 0.1, last_epoch: int = -1
    ) -> None:
        super().__init__(optimizer, step_size, gamma, last_epoch)


class ExponentialLR(lr_scheduler.ExponentialLR):
    """torch's; `total_steps` has no effect."""

    def __init__(self, optimizer: Optimizer, total_steps: int, gamma: float = 1.0, last_epoch: int = -1) -> None:
        super().__init__(optimizer, gamma, last_epoch)


class GradAccumLrSchedulerByStep:
    """Steps a scheduler at every `accumulate_size`th call; `colossalai.initialize` returns it."""

    def __init__(self, lr_scheduler: Any, accumulate_size: int) -> None:
        self.lr_scheduler, self.accumulate_size, self.accumulate_step = lr_scheduler, accumulate_size, 0

    @staticmethod
    def compute_effective_steps_per_epoch(dataloader: Any, accumulate_size: int) -> int:
        """Return the number of optimizer steps per epoch."""
        return len(dataloader) // accumulate_size

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Count the call; at each `accumulate_size`th one, step the scheduler."""
        self.accumulate_step = (self.accumulate_step + 1) % self.accumulate_size
        if self.accumulate_step == 0:
            self.lr_scheduler.step(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.lr_scheduler, name)
