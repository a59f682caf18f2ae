"""Micro-batches of a data set in the order of `data.order`: the same samples a step in every layout.

    loader = Loader(PairSamples(dataset), job, data_rank, consumed_samples=lambda: engine.consumed_samples)
    for x, y in loader: ...                          # one epoch, from the run's position; then the next
    for step in range(len(loader)): ...              # its steps, each of `accumulation` micro-batches
    for x, y in loader.step(consumed): ...           # the step that begins after so many samples

A pass yields whole steps, `accumulation` micro-batches each. Where a step does not end with the epoch, it takes its
last samples from the next one, and the next pass begins after them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

from dslpar.data.order import Samples, micro_batches
from dslpar.layout.resolve import Job


class StepData(Protocol):
    """Data by steps: the position is a number of samples."""

    def step(self, consumed: int) -> Iterator[tuple[Any, Any]]:
        """Return this rank's micro-batches of the step after `consumed` samples; none where it reads none."""


class Loader:
    """Passes over samples; each begins at the run's position, `consumed_samples()`."""

    def __init__(self, samples: Samples, job: Job, data_rank: int, consumed_samples: Callable[[], int]) -> None:
        self.samples, self.job, self.data_rank, self.consumed_samples = samples, job, data_rank, consumed_samples

    @property
    def num_steps(self) -> int:
        """The number of steps of a pass that begins now."""
        consumed, size = self.consumed_samples(), self.samples.num_samples
        # Rounded up: the step that straddles two epochs belongs to the first.
        left = size - consumed % size
        return -(-left // self.job.batch.global_size)

    def __len__(self) -> int:
        """The number of *steps* of a pass that begins now, as a loop over steps and an LR scheduler count them.

        ColossalAI's programs take them from here; an iteration yields `accumulation` times as many micro-batches.
        """
        return self.num_steps

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        start = self.consumed_samples()  # once: the engine steps while the pass goes on
        for step in range(self.num_steps):
            yield from self.step(start + step * self.job.batch.global_size)

    def step(self, consumed: int) -> Iterator[tuple[Any, Any]]:
        """Yield this rank's micro-batches of the step that begins after `consumed` samples, wherever the run is."""
        batch, data, seed = self.job.batch, self.job.mesh.data, self.job.spec.train.seed
        return micro_batches(self.samples, batch, seed, consumed, data, self.data_rank)
