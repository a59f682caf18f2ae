"""Products that exchange pieces of tokens through symmetric memory: `tensor=dict(comm_overlap='symmetric_memory')`.

These are torch's fused products, its async tensor parallelism (torchtitan's `enable_async_tensor_parallel`, which
needs compiled models). Each rank copies pieces from a peer's memory with the device's copy engines, while a ring
(overlap.py) occupies multiprocessors of the device to send and receive. They need CUDA devices of one host that can
access each other's memory. torch calls the feature alpha.

==========  ==================================  ====================================================================
function    returns                             order of the sum
==========  ==================================  ====================================================================
`gathered`  gather(X) W^T, and gather(X)        none
`reduced`   this rank's tokens of the sum of    by rank, in float32 for half precision: rounded once, while a ring
            X W^T                               rounds after each piece
==========  ==================================  ====================================================================

A group's pieces pass through one buffer per rank, torch's workspace, outside torch's allocator. It grows to twice the
largest piece. `reduced` takes as much memory as the whole sum, a ring only two pieces of it. On other devices the
pieces travel around rings. A run with CUDA devices that cannot access each other is refused before it starts
(dslpar.distributed.symmetric_memory).
"""

from __future__ import annotations

import importlib
from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor

from dslpar.distributed.collectives import Axis
from dslpar.distributed.symmetric_memory import MODULE


def is_reached(x: Tensor) -> bool:
    """Return whether pieces of `x` can travel through symmetric memory."""
    return x.is_cuda


def gathered(x: Tensor, weight: Tensor, axis: Axis, dim: int) -> tuple[Tensor, Tensor]:
    """Return gather(X) W^T and gather(X) for X in pieces of tokens along `dim`; both with `dim` slowest in memory."""
    pieces = x.movedim(dim, 0).contiguous()
    panel, (y,) = _products().fused_all_gather_matmul(pieces, [weight.t()], 0, axis.group_name)
    return y.movedim(0, dim), panel.movedim(0, dim)


def reduced(panel: Tensor, weight: Tensor, axis: Axis, dim: int) -> Tensor:
    """Return this rank's piece along `dim` of the sum over ranks of X W^T, with `dim` slowest in memory."""
    tokens = panel.movedim(dim, 0).contiguous()
    y = _products().fused_matmul_reduce_scatter(tokens, weight.t(), "sum", 0, axis.group_name)
    return cast("Tensor", y).movedim(0, dim)


@lru_cache
def _products() -> Any:
    """Return torch's operations on symmetric memory; raise ImportError if torch has none (2.4)."""
    importlib.import_module(MODULE)  # registers the operations
    return torch.ops.symm_mem
