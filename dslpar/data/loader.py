"""Data loader: micro-batches in the order of `data.order`, with the same samples per step in every layout.

    loader = Loader(PairSamples(dataset), job, data_rank, consumed_samples=lambda: engine.consumed_samples)
    for x, y in loader: ...                          # one epoch, from the run's position; then the next
    for step in range(len(loader)): ...              # its steps, each of `accumulation` micro-batches
    for x, y in loader.step(consumed): ...           # the step that begins after so many samples

A pass yields whole steps of `accumulation` micro-batches. If an epoch ends within a step, the step takes its last
samples from the next epoch, and the next pass starts after them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

from dslpar.data.order import Samples, micro_batches
from dslpar.layout.resolve import Job


class StepData(Protocol):
    """Data that is read step by step; the position is a number of samples."""

    def step(self, consumed: int) -> Iterator[tuple[Any, Any]]:
        """Return this rank's micro-batches of the step after `consumed` samples; empty if the rank reads no data."""


class Loader:
    """Iterable over samples. Each pass starts at the run's position, `consumed_samples()`."""

    def __init__(self, samples: Samples, job: Job, data_rank: int, consumed_samples: Callable[[], int]) -> None:
        self.samples, self.job, self.data_rank, self.consumed_samples = samples, job, data_rank, consumed_samples

    @property
    def num_steps(self) -> int:
        """Number of steps of a pass that starts now."""
        consumed, size = self.consumed_samples(), self.samples.num_samples
        # Rounded up, since the step that straddles two epochs belongs to the first one.
        left = size - consumed % size
        return -(-left // self.job.batch.global_size)

    def __len__(self) -> int:
        """Return the number of *steps* of a pass that starts now, as loops over steps and LR schedulers count them.

        ColossalAI's programs use it so. Iterating yields `accumulation` times as many micro-batches.
        """
        return self.num_steps

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        start = self.consumed_samples()  # read once, since the engine steps during the pass
        for step in range(self.num_steps):
            yield from self.step(start + step * self.job.batch.global_size)

    def step(self, consumed: int) -> Iterator[tuple[Any, Any]]:
        """Yield this rank's micro-batches of the step after `consumed` samples, whatever the run's position is."""
        batch, data, seed = self.job.batch, self.job.mesh.data, self.job.spec.train.seed
        return micro_batches(self.samples, batch, seed, consumed, data, self.data_rank)
