"""Micro-batches of a data set in the order of `data.order`: the same samples a step in every layout.

    loader = Loader(PairSamples(dataset), job, data_rank, consumed_samples=lambda: engine.consumed_samples)
    for x, y in loader: ...                          # one epoch, from the run's position; then the next
    for step in range(len(loader)): ...              # its steps, each of `accumulation` micro-batches
    for x, y in loader.step(consumed): ...           # the step that begins after so many samples

A pass yields whole steps, `accumulation` micro-batches each. Where a step does not end with the epoch, it takes its
last samples from the next one, and the next pass begins after them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from torch.utils.data import default_collate

from dslpar.core.catalog import raise_finding
from dslpar.data.order import Samples, micro_batches
from dslpar.layout.resolve import Job


class StepData(Protocol):
    """Data by steps: the position is a number of samples."""

    def step(self, consumed: int) -> Iterator[tuple[Any, Any]]:
        """Return this rank's micro-batches of the step after `consumed` samples; none where it reads none."""


class Dataset(Protocol):
    """A map-style data set of (input, label) pairs, as in torch."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Sequence[object]: ...


class PairSamples:
    """A map-style data set as samples; pairs are collated as torch's DataLoader does, with tuples for lists."""

    def __init__(self, dataset: Dataset, path: str = "<program>") -> None:
        self.dataset, self.num_samples = dataset, len(dataset)
        first = dataset[0] if self.num_samples else None
        if not isinstance(first, tuple | list) or len(first) != 2:
            wrong_item = "an item of the data set is not an (input, label) pair"
            message = wrong_item if self.num_samples else "the data set is empty"
            hint = "give a data set of (input, label) pairs, each a tensor or a tuple of tensors"
            raise_finding("BAT207", message, hint, path)

    all_counted = False

    def batch(self, samples: Sequence[int], numbers: Sequence[int] = ()) -> tuple[Any, Any]:
        """Return inputs and labels, each [len(samples), ...]; nothing is drawn here by `numbers`."""
        inputs, labels = default_collate([tuple(self.dataset[index]) for index in samples])
        return _tuples(inputs), _tuples(labels)


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


def is_dataset(data: object) -> bool:
    """Return whether data can be read in our order; what can only be iterated is used as it is."""
    return hasattr(data, "__getitem__") and hasattr(data, "__len__")


def _tuples(value: object) -> object:
    return tuple(map(_tuples, value)) if isinstance(value, list | tuple) else value
