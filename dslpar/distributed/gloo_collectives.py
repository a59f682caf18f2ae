"""Collectives that gloo has no fast form of, in terms of those that it has; each sends as many elements.

    if gloo_collectives.serves(group):
        received, work = gloo_collectives.start_reduce_scatter(pieces, group)

`dslpar.distributed.collectives` calls these in place of torch's own. On a device's backend none of them is used.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def serves(group: dist.ProcessGroup | None) -> bool:
    """Return True if messages of the group go over gloo."""
    return str(dist.get_backend(group)) == "gloo"


def start_reduce_scatter(pieces: Tensor, group: dist.ProcessGroup | None) -> tuple[Tensor, Any]:
    """Start sending each rank its piece of `pieces`, by dim 0; the sum over dim 0 of what is received is the result.

    gloo's own reduce-scatter takes twice as long as its all-reduce. An all-to-all sends as many elements.
    """
    received = torch.empty_like(pieces)
    return received, dist.all_to_all_single(received, pieces, group=group, async_op=True)


def start_all_reduce_of_two(x: Tensor, index: int, group: dist.ProcessGroup | None) -> tuple[Tensor, Any]:
    """Start exchanging a whole tensor between two ranks; the sum of both is the result.

    They send as many elements as in gloo's own all-reduce, in a third of its time. Addition commutes, so both results
    are bit-identical. `index`: this rank's place in the group, 0 or 1.
    """
    received = torch.empty_like(x)
    return received, start_exchange(x, received, index, group)


def start_exchange(x: Tensor, received: Tensor, index: int, group: dist.ProcessGroup | None) -> Any:
    """Start sending `x` to the other one of two ranks, and receiving into `received`.

    gloo's socket thread spins while a sender holds the lock of a pair. A send from this thread holds it, longer if
    cores are busy. An all-to-all sends from another gloo thread and takes two thirds of the CPU time.
    """
    sizes = [0, x.numel()] if index == 0 else [x.numel(), 0]
    return dist.all_to_all_single(received.view(-1), x.view(-1), sizes, sizes, group=group, async_op=True)
