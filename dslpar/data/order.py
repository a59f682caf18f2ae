"""Order of samples: a function of the seed and the step, independent of the layout.

Sample k of a run over N samples is perm_(k // N)[k % N], with a new permutation in each epoch. With `data.replacement`
it is a hash of k, modulo N (`SamplesWithReplacement`). Each step takes the next `global_size` samples. Of these,
micro-batch a of data rank d (of D) takes `micro_size` samples from (a * D + d) * micro_size on. Blends have their own
order instead (`OrderedSamples`).
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
    """Training samples, accessed by index."""

    num_samples: int
    """Number of samples in the data set, which is an epoch."""
    all_counted: bool
    """Whether every label counts in the loss. If not, ranks must sum the numbers of counted labels for its mean."""

    def batch(self, samples: Sequence[int], numbers: Sequence[int]) -> tuple[Any, Any]:
        """Return inputs and labels, each a tensor [len(samples), ...] or a tuple of such tensors.

        `samples` are indices in the data set, from 0. `numbers` are the positions of the same samples in the training
        run, from 0. An index comes again in each epoch, but a position occurs once in a run. Random choices for a
        sample, such as masks, depend on its position.
        """


@runtime_checkable
class OrderedSamples(Samples, Protocol):
    """Samples that determine their own order, as a blend does."""

    def in_order(self, numbers: Sequence[int]) -> Sequence[int]:
        """Return the indices of the samples at these positions of the run."""


class SamplesWithReplacement:
    """Samples that a run draws with replacement, as torch's RandomSampler(replacement=True) does.

    Each draw depends only on the seed and the position in the run, so a resume on any layout continues the same draws.
    """

    def __init__(self, samples: Samples, seed: int) -> None:
        self.samples, self.seed = samples, seed
        self.num_samples, self.all_counted = samples.num_samples, samples.all_counted

    def in_order(self, numbers: Sequence[int]) -> Sequence[int]:
        """Return the indices of the samples at these positions of the run."""
        return list(map(self.sample_index, numbers))

    def sample_index(self, k: int) -> int:
        """Return the index of the k-th sample of the run, or of those that a blend takes from this data set."""
        return stable_hash("drawn", self.seed, k) % self.num_samples

    def batch(self, samples: Sequence[int], numbers: Sequence[int]) -> tuple[Any, Any]:
        """Return inputs and labels of the samples."""
        return self.samples.batch(samples, numbers)


def micro_batches(
    samples: Samples, batch: Batch, seed: int, consumed: int, data: int, data_rank: int
) -> Iterator[tuple[Any, Any]]:
    """Yield the micro-batches of data rank `data_rank` of `data` in the step after `consumed` samples."""
    for index in range(batch.accumulation):
        first = consumed + (index * data + data_rank) * batch.micro_size
        numbers = range(first, first + batch.micro_size)
        yield samples.batch(sample_indices(samples, numbers, seed), numbers)


def sample_indices(samples: Samples, numbers: Sequence[int], seed: int) -> Sequence[int]:
    """Return the dataset indices of the samples with these numbers, counted from the start of the run."""
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
"""Largest number of samples whose permutation is drawn and cached (128 MiB); beyond it, each index is computed."""


class Permutations:
    """Order of one data set of a blend, which has its own epochs."""

    def __init__(self, num_samples: int, seed: int) -> None:
        self.num_samples, self.seed = num_samples, seed
        self._of_epoch = lru_cache(maxsize=2)(_draw)  # a step may straddle two epochs

    def sample_index(self, k: int) -> int:
        """Return the index of the k-th sample that a run takes from this data set."""
        if self.num_samples > MOST_DRAWN:
            return sample_index(k, self.num_samples, self.seed)
        epoch, position = divmod(k, self.num_samples)
        return int(self._of_epoch(self.num_samples, self.seed, epoch)[position])


@lru_cache(maxsize=4)  # a step may straddle two epochs, of train and of held-out data
def epoch_permutation(num_samples: int, seed: int, epoch: int) -> Tensor:
    """Return the order of one epoch, equal on every machine."""
    return _draw(num_samples, seed, epoch)


def _draw(num_samples: int, seed: int, epoch: int) -> Tensor:
    # On the CPU, since other devices' generators draw other numbers, and the order must not depend on the machine.
    generator = torch.Generator("cpu").manual_seed(stable_hash("epoch", seed, epoch))
    return torch.randperm(num_samples, generator=generator)
