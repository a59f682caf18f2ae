"""The order of samples: a function of the seed and the step alone, never of the layout.

Sample k of a run over N samples is perm_(k // N)[k % N], a new permutation each epoch; step t takes the next
`global_size` of them; micro-batch a of data rank d takes `micro_size` rows of these from (a * D + d) * micro_size on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

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


def micro_batches(
    samples: Samples, batch: Batch, seed: int, consumed: int, data: int, data_rank: int
) -> Iterator[tuple[Any, Any]]:
    """Yield the micro-batches of data rank `data_rank` of `data`, in the step that begins after `consumed` samples."""
    for index in range(batch.accumulation):
        first = consumed + (index * data + data_rank) * batch.micro_size
        numbers = range(first, first + batch.micro_size)
        yield samples.batch([sample_index(k, samples.num_samples, seed) for k in numbers], numbers)


def sample_index(k: int, num_samples: int, seed: int) -> int:
    """Return the index of the k-th sample of a run."""
    epoch, position = divmod(k, num_samples)
    return int(epoch_permutation(num_samples, seed, epoch)[position])


@lru_cache(maxsize=4)  # a step may straddle two epochs, of train and of held-out data
def epoch_permutation(num_samples: int, seed: int, epoch: int) -> Tensor:
    """Return the order of one epoch, equal on every machine."""
    # On the CPU: generators of other devices draw other numbers, and the order must not depend on the machine.
    generator = torch.Generator("cpu").manual_seed(stable_hash("epoch", seed, epoch))
    return torch.randperm(num_samples, generator=generator)
