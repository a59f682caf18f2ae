"""ColossalAI's data loaders: torch's DataLoader over this data rank's share of a data set.

    train_dataloader = get_dataloader(dataset, batch_size=8, shuffle=True)

All ranks of a replica load the same samples. A data set that the program passes to `colossalai.initialize` itself is
loaded by dslpar instead, in an order that does not depend on the layout.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Sampler

from dslpar.compat.context import ParallelMode, global_context


class DataParallelSampler(Sampler[int]):
    """Indices of this data rank's samples: every `data_parallel_size`th one, in one order for all ranks.

    Each iteration is an epoch, and is shuffled by `seed` plus the number of the epoch. If the samples cannot be divided
    evenly, the first ones come twice; with `drop_last`, the last ones are left out.
    """

    def __init__(self, dataset: Any, shuffle: bool = False, seed: int = 0, drop_last: bool = False) -> None:
        self.dataset, self.shuffle, self.seed, self.drop_last = dataset, shuffle, seed, drop_last
        self.num_replicas = global_context.get_world_size(ParallelMode.DATA)
        self.rank, self.epoch = global_context.get_local_rank(ParallelMode.DATA), 0
        divide = math.floor if drop_last else math.ceil
        self.num_samples = divide(len(dataset) / self.num_replicas)

    def __iter__(self) -> Iterator[int]:
        indices = list(range(len(self.dataset)))
        if self.shuffle:
            generator = torch.Generator().manual_seed(self.seed + self.epoch)
            indices = torch.randperm(len(self.dataset), generator=generator).tolist()
            self.epoch += 1
        total = self.num_samples * self.num_replicas
        indices = (indices * math.ceil(total / len(indices)))[:total]
        return iter(indices[self.rank :: self.num_replicas])

    def __len__(self) -> int:
        return self.num_samples

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the next epoch."""
        self.epoch = epoch


def get_dataloader(
    dataset: Any,
    shuffle: bool = False,
    seed: int = 1024,
    add_sampler: bool = True,
    drop_last: bool = False,
    pin_memory: bool = False,
    num_workers: int = 0,
    **kwargs: Any,
) -> DataLoader[Any]:
    """Return a DataLoader over this data rank's samples; `kwargs` are DataLoader's own.

    With one data rank, or `add_sampler=False`, it loads all samples, and shuffles by the run's seed: all stages of a
    pipeline load the same samples. As in ColossalAI, `seed` is that of the loader's processes, and the order of samples
    does not depend on it.
    """
    common: dict[str, Any] = dict(
        drop_last=drop_last, pin_memory=pin_memory and torch.cuda.is_available(), num_workers=num_workers
    )
    common |= dict(worker_init_fn=partial(_seed_worker, seed), **kwargs)
    if add_sampler and global_context.data_parallel_size > 1:
        return DataLoader(dataset, sampler=DataParallelSampler(dataset, shuffle), **common)
    # A generator of its own: a stage draws other numbers than the next one from torch's, and all need the same order.
    generator = torch.Generator().manual_seed(global_context.run.job.spec.train.seed)
    return DataLoader(dataset, shuffle=shuffle, **{"generator": generator, **common})


def _seed_worker(seed: int, worker: int) -> None:
    random.seed(seed)
    np.random.seed(seed)  # the generator that a program's transforms draw from
    torch.manual_seed(seed)


class GradAccumDataloader:
    """A loader without the last batches of an epoch that do not fill an optimizer step; `initialize` returns it."""

    def __init__(self, dataloader: Any, accumulate_size: int) -> None:
        self.dataloader = dataloader
        self.steps_per_epoch = len(dataloader) - len(dataloader) % accumulate_size

    def __getattr__(self, name: str) -> Any:
        return getattr(self.dataloader, name)

    def __len__(self) -> int:
        return self.steps_per_epoch

    def __iter__(self) -> Iterator[Any]:
        for number, batch in enumerate(self.dataloader):
            if number < self.steps_per_epoch:  # a loader that keeps a state, such as DALI's, must reach its end
                yield batch
