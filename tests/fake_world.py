"""Ranks of worlds that are not there: torch's fake process group, whose collectives return at once.

Shapes are right and numbers are not; so what is sent and what is kept can be counted for any world in one process. It
must not be the test's own: `on_last_ranks(fn, tensors)` runs `fn(tensor)` for one cuboid after another in a fork.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore  # here, and not in every fork: it takes a second

from dslpar.mesh import Tensor
from tests.ranks import on_ranks


def on_last_ranks(fn: Callable[[Tensor], Any], tensors: Sequence[Tensor], timeout: float = 240) -> list[Any]:
    """What `fn(tensor)` returns on the last rank of each cuboid, in a world of its ranks alone."""
    (values,) = on_ranks(1, _one_by_one, fn, tensors, timeout=timeout, init=None)
    return list(values)


def _one_by_one(fn: Callable[[Tensor], Any], tensors: Sequence[Tensor]) -> list[Any]:
    values = []
    for tensor in tensors:
        dist.init_process_group("fake", store=FakeStore(), rank=tensor.size - 1, world_size=tensor.size)
        values.append(fn(tensor))
        dist.destroy_process_group()
    return values
