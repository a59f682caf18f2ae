"""Sums in the order of NCCL's ring: one rank after the other, each in the tensor's own precision.

    monkeypatch.setattr(collectives, "start_reduce_scatter", ring_sums.start_reduce_scatter)

gloo sums bfloat16 once in a wider dtype, which understates the rounding. A ring rounds at each hop.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dslpar.distributed import collectives
from dslpar.distributed.collectives import Axis, Pending

_start_all_reduce_ = collectives.start_all_reduce_


def in_order(pieces: list[Tensor], last: int) -> Tensor:
    """Return the sum that ends at rank `last`: it begins at the next rank, and goes around."""
    size = len(pieces)
    total = pieces[(last + 1) % size]
    for step in range(2, size + 1):
        total = total + pieces[(last + step) % size]
    return total


def start_reduce_scatter(x: Tensor, axis: Axis, dim: int = 0) -> Pending:
    """Replace `collectives.start_reduce_scatter`."""
    if axis.size == 1:
        return Pending(x)
    whole = collectives.all_gather(x.unsqueeze(0).contiguous(), axis)
    return Pending(in_order([one.chunk(axis.size, dim)[axis.index] for one in whole], axis.index).contiguous())


def start_all_reduce_(x: Tensor, axis: Axis, op: str = "sum") -> Pending:
    """Replace `collectives.start_all_reduce_`: each rank sums a piece, and all ranks get all pieces."""
    if axis.size == 1 or op != "sum":
        return _start_all_reduce_(x, axis, op)
    whole = collectives.all_gather(x.reshape(1, -1), axis)
    pieces = [one.tensor_split(axis.size) for one in whole]
    sums = [in_order([piece[last] for piece in pieces], last) for last in range(axis.size)]
    return Pending(torch.cat(sums).view(x.shape))


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use these sums in all layers, here and on later forks."""
    monkeypatch.setattr(collectives, "start_reduce_scatter", start_reduce_scatter)
    monkeypatch.setattr(collectives, "start_all_reduce_", start_all_reduce_)
