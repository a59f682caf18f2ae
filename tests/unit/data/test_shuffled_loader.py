"""Order of a program's own DataLoader."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler

from dslpar.data.shuffled_loader import begin_epoch, seed_shuffle

DATA: Any = list(range(12))


def order(loader: Any) -> list[int]:
    return [int(x) for batch in loader for x in batch]


@pytest.mark.parametrize("how", ["shuffle", "batch_sampler"])
def test_shuffling_depends_on_the_seed_alone(how: str) -> None:
    orders = []
    for other_draws, seed in ((1, 5), (2, 5), (1, 6)):
        torch.manual_seed(other_draws)
        batches = {"batch_sampler": BatchSampler(RandomSampler(DATA), 4, drop_last=True)}
        loader = DataLoader(DATA, **(batches if how == "batch_sampler" else {"shuffle": True, "batch_size": 4}))
        seed_shuffle(loader, seed)
        orders.append((order(loader), order(loader)))
    assert orders[0] == orders[1]
    assert orders[0] != orders[2]
    assert orders[0][0] != orders[0][1], "each epoch has an order of its own"


def test_a_generator_of_the_program_stays() -> None:
    generator = torch.Generator().manual_seed(3)
    loader = DataLoader(DATA, shuffle=True, generator=generator)
    seed_shuffle(loader, 5)
    assert loader.sampler.generator is generator  # type: ignore[attr-defined]


def test_a_distributed_sampler_shuffles_each_epoch_anew() -> None:
    loader = DataLoader(DATA, batch_size=4, sampler=DistributedSampler(DATA, 1, 0))
    orders = []
    for epoch in (0, 1, 0):
        begin_epoch(loader, epoch)
        orders.append(order(loader))
    assert orders[0] == orders[2] != orders[1]


def test_what_is_no_loader_is_left_alone() -> None:
    for other in ([1, 2], iter([1]), None, DataLoader(DATA)):
        seed_shuffle(other, 1)
        begin_epoch(other, 1)
