"""The order of samples: a function of the seed and the step alone, never of the layout.

Sample k of a run over N samples is perm_(k // N)[k % N], a new permutation each epoch; step t takes the next
`global_size` of them; micro-batch a of data rank d takes `micro_size` rows of these from (a * D + d) * micro_size on.
Samples may have an order of their own, as blends do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from dslpar.data.permutation import permuted
from dslpar.layers.parameter import stable_hash
from dslpar.layout.batch import Batch


@runtime_checkable
class Samples(Protocol):
    """Samples that can be trained on, by index."""

    num_samples: int

    all_counted: bool
    """Whether every label counts, so that the ranks need not sum up how many do."""

    def batch(self, samples: Sequence[int], numbers: Sequence[int]) -> tuple[Any, Any]:
        """Return inputs and labels, each [len(samples), ...], or tuples of them.

        `numbers` are the samples' places in the run, from 0, none of which comes twice: what is drawn for a sample,
        such as masks, is drawn by its number.
        """


@runtime_checkable
class OrderedSamples(Samples, Protocol):
    """Samples with an order of their own."""

    def in_order(self, numbers: Sequence[int]) -> Sequence[int]:
        """Return the samples at these places of the run."""


def micro_batches(
    samples: Samples, batch: Batch, seed: int, consumed: int, data: int, data_rank: int
) -> Iterator[tuple[Any, Any]]:
    """Yield the micro-batches of data rank `data_rank` of `data`, in the step that begins after `consumed` samples."""
    for index in range(batch.accumulation):
        first = consumed + (index * data + data_rank) * batch.micro_size
        numbers = range(first, first + batch.micro_size)
        yield samples.batch(sample_indices(samples, numbers, seed), numbers)


def sample_indices(samples: Samples, numbers: Sequence[int], seed: int) -> Sequence[int]:
    """Return the samples at these places of a run."""
    if isinstance(samples, OrderedSamples):
        return samples.in_order(numbers)
    return [sample_index(number, samples.num_samples, seed) for number in numbers]


def sample_index(k: int, num_samples: int, seed: int) -> int:
    """Return the index of the k-th sample of a run."""
    epoch, position = divmod(k, num_samples)
    if num_samples > MOST_DRAWN:
        return permuted(position, num_samples, ("epoch", seed, epoch))
    return int(epoch_permutation(num_samples, seed, epoch)[position])


MOST_DRAWN = 1 << 24
"""Samples of which an epoch's order is drawn, and kept: 128 MiB. That of more is computed, sample by sample."""


class Permutations:
    """The order of one set of samples among others, each of which keeps its own epochs."""

    def __init__(self, num_samples: int, seed: int) -> None:
        self.num_samples, self.seed = num_samples, seed
        self._of_epoch = lru_cache(maxsize=2)(_draw)  # a step may straddle two epochs

    def sample_index(self, k: int) -> int:
        """Return the index of the k-th sample of a run that is of this set."""
        if self.num_samples > MOST_DRAWN:
            return sample_index(k, self.num_samples, self.seed)
        epoch, position = divmod(k, self.num_samples)
        return int(self._of_epoch(self.num_samples, self.seed, epoch)[position])


@lru_cache(maxsize=4)  # a step may straddle two epochs, of train and of held-out data
def epoch_permutation(num_samples: int, seed: int, epoch: int) -> Tensor:
    """Return the order of one epoch, equal on every machine."""
    return _draw(num_samples, seed, epoch)


def _draw(num_samples: int, seed: int, epoch: int) -> Tensor:
    # On the CPU: generators of other devices draw other numbers, and the order must not depend on the machine.
    generator = torch.Generator("cpu").manual_seed(stable_hash("epoch", seed, epoch))
    return torch.randperm(num_samples, generator=generator)
