"""Metrics of ColossalAI's trainer: loss, accuracy, learning rate and throughput, over all replicas.

accuracy = Accuracy()                            # correct predictions of a batch, as a number
metric = AccuracyMetric(epoch_only=True, accuracy_func=accuracy)
metric.update(logits, labels, batch_size)
metric.get_accumulated_value()                   # all data ranks together
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from dslpar.compat.context import ParallelMode, global_context
from dslpar.distributed import collectives


def calc_acc(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the number of labels that the largest logit predicts."""
    return (logits.argmax(dim=-1) == targets).sum()


class Accuracy(nn.Module):
    """`calc_acc` as a module."""

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the number of correct predictions."""
        return calc_acc(logits, targets)


def sum_over_replicas(value: float) -> float:
    """Return the sum over all data ranks, which must call it together."""
    return sum(collectives.gather_objects(value, global_context.run.groups.axis(*ParallelMode.DATA.axes)))


class Metric(ABC):
    """Base of metrics. `epoch_only`: the metric has a meaning for whole epochs only."""

    def __init__(self, epoch_only: bool) -> None:
        self._epoch_only = epoch_only

    @property
    def epoch_only(self) -> bool:
        """True if the metric has a meaning for whole epochs only."""
        return self._epoch_only

    @abstractmethod
    def reset(self) -> None:
        """Begin an epoch."""

    @abstractmethod
    def update(self, *args: Any) -> None:
        """Count a batch."""

    @abstractmethod
    def get_last_step_value(self) -> Any:
        """Return the value of the last batch."""

    @abstractmethod
    def get_accumulated_value(self) -> Any:
        """Return the value since the last reset."""

    @staticmethod
    @abstractmethod
    def is_better(a: Any, b: Any) -> bool:
        """Return whether `a` is better than `b`."""


class LossMetric(Metric):
    """Mean loss."""

    def __init__(self, epoch_only: bool) -> None:
        super().__init__(epoch_only)
        self.reset()

    def reset(self) -> None:
        """Begin an epoch."""
        self.last, self.total, self.count = 0.0, 0.0, 0

    def update(self, loss: Tensor) -> None:
        """Count a batch's loss."""
        self.last = float(loss.detach())
        self.total, self.count = self.total + self.last, self.count + 1

    def get_last_step_value(self) -> float:
        """Return the last batch's loss, on this rank."""
        return self.last

    def get_accumulated_value(self) -> float:
        """Return the mean over batches and replicas."""
        mean = sum_over_replicas(self.total) / global_context.data_parallel_size
        return mean / self.count if self.count else float("nan")

    @staticmethod
    def is_better(a: float, b: float) -> bool:
        """Return whether `a` is lower."""
        return a < b


class LearningRateMetric(Metric):
    """Learning rate of the first parameter group."""

    def __init__(self, epoch_only: bool, initial_lr: float = 0.0) -> None:
        super().__init__(epoch_only)
        self.lr = initial_lr

    def reset(self) -> None:
        """Do nothing."""

    def update(self, lr: float) -> None:
        """Set the learning rate."""
        self.lr = lr

    def get_last_step_value(self) -> float:
        """Return the learning rate."""
        return self.lr

    def get_accumulated_value(self) -> float:
        """Return the learning rate."""
        return self.lr

    @staticmethod
    def is_better(a: float, b: float) -> bool:
        """Return False: no learning rate is better than another."""
        return False


class AccuracyMetric(Metric):
    """Share of correct predictions; `accuracy_func` counts those of a batch."""

    def __init__(self, epoch_only: bool, accuracy_func: Callable[[Any, Any], Any]) -> None:
        super().__init__(epoch_only)
        self.acc = accuracy_func
        self.reset()

    def reset(self) -> None:
        """Begin an epoch."""
        self.last_correct = self.last_samples = self.correct = self.samples = 0.0

    def update(self, logits: Any, targets: Any, batch_size: int) -> None:
        """Count a batch; of lists, the first tensor."""
        logits = logits[0] if isinstance(logits, (list, tuple)) else logits
        targets = targets[0] if isinstance(targets, (list, tuple)) else targets
        targets = targets.to(logits.device) if isinstance(targets, Tensor) else targets
        self.last_correct, self.last_samples = float(self.acc(logits, targets)), float(batch_size)
        self.correct, self.samples = self.correct + self.last_correct, self.samples + self.last_samples

    def get_last_step_value(self) -> float:
        """Return the share in the last batch of all replicas."""
        return sum_over_replicas(self.last_correct) / sum_over_replicas(self.last_samples)

    def get_accumulated_value(self) -> float:
        """Return the share since the last reset."""
        return sum_over_replicas(self.correct) / sum_over_replicas(self.samples)

    @staticmethod
    def is_better(a: float, b: float) -> bool:
        """Return whether `a` is higher."""
        return a > b


class ThroughputMetric(Metric):
    """Samples per second of all replicas, without the first `ignored_steps`.

    `tflop_per_step` adds TFLOPS to `get_last_step_info`. `use_local`: this rank's time counts, not the mean of all.
    """

    def __init__(
        self, epoch_only: bool, ignored_steps: int = 0, tflop_per_step: float = 0, use_local: bool = False
    ) -> None:
        super().__init__(epoch_only)
        self.ignored_steps, self.tflop_per_step, self.use_local, self.cur_steps = (
            ignored_steps,
            tflop_per_step,
            use_local,
            0,
        )
        self.reset()

    def reset(self) -> None:
        """Begin an epoch."""
        self.last_samples = self.last_s = self.samples = self.used_s = 0.0

    def update(self, num_samples: int, time: float) -> None:
        """Count a batch that took `time` seconds."""
        self.cur_steps += 1
        self.last_samples, self.last_s = float(num_samples), time
        if self.cur_steps >= self.ignored_steps:
            self.samples, self.used_s = self.samples + num_samples, self.used_s + time

    def _of_all(self, samples: float, seconds: float) -> tuple[float, float]:
        replicas = global_context.data_parallel_size
        if self.use_local:
            return samples * replicas, seconds
        return sum_over_replicas(samples), sum_over_replicas(seconds) / replicas

    def get_last_step_value(self) -> float:
        """Return the samples per second of the last batch."""
        samples, seconds = self._of_all(self.last_samples, self.last_s)
        return samples / (seconds + 1e-12)

    def get_last_step_info(self) -> str:
        """Return the last batch's throughput as a text."""
        samples, seconds = self._of_all(self.last_samples, self.last_s)
        text = f"{format_number(samples / (seconds + 1e-12))} sample_per_sec"
        if self.tflop_per_step <= 0:
            return text
        return f"{text}, {format_number(self.tflop_per_step / (seconds + 1e-12))} Tflops"

    def get_accumulated_value(self) -> float:
        """Return the samples per second since the last reset."""
        samples, seconds = self._of_all(self.samples, self.used_s)
        return samples / (seconds + 1e-12)

    @staticmethod
    def is_better(a: float, b: float) -> bool:
        """Return whether `a` is higher."""
        return a > b


def format_number(value: float, precision: int = 5) -> str:
    """Return a number as ColossalAI's logs write it."""
    return f"{value:.{precision}g}" if isinstance(value, float) else str(value)
