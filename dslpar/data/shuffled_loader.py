"""Order of a program's own torch DataLoader: the same on all ranks, and again after a resume.

    seed_shuffle(loader, seed)        # DataLoader(shuffle=True): the order no longer depends on other random draws
    begin_epoch(loader, epoch)        # samplers such as DistributedSampler shuffle by the number of the epoch

torch's RandomSampler draws its order from the global generator. There, the first and the last stage of a pipeline draw
different numbers, so inputs and labels would be of different samples. A resumed run would skip other samples than those
that it has used.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import RandomSampler


def seed_shuffle(loader: Any, seed: int) -> None:
    """Give a RandomSampler without a generator one of its own, seeded alike on all ranks."""
    for sampler in _samplers(loader):
        if isinstance(sampler, RandomSampler) and sampler.generator is None:
            sampler.generator = torch.Generator().manual_seed(seed)


def begin_epoch(loader: Any, epoch: int) -> None:
    """Tell the samplers the number of the epoch, as a torch program does with `set_epoch`."""
    for sampler in _samplers(loader):
        if callable(set_epoch := getattr(sampler, "set_epoch", None)):
            set_epoch(epoch)


def _samplers(loader: Any) -> Iterator[Any]:
    """Yield a loader's samplers: its own, and those of its batch sampler."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    for sampler in (getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None)):
        if sampler is not None:
            yield sampler
