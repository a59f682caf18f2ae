"""Products whose pieces of tokens come through symmetric memory: `tensor=dict(comm_overlap='symmetric_memory')`.

torch's fused products, which are its async tensor parallelism (torchtitan's `enable_async_tensor_parallel`, there for
compiled models alone): each rank copies a piece from a peer's memory by the device's copy engines, where a ring
(overlap.py) takes processors of the device to send and receive. They are for CUDA devices of a host, which reach each
other's memory. torch calls them alpha.

==========  ==================================  ====================================================================
function    gives                               order of the sum
==========  ==================================  ====================================================================
`gathered`  gather(X) W^T, and gather(X)        none
`reduced`   this rank's tokens of the sum of    by rank, in float32 for half precision: rounded once, where a ring
            X W^T                               rounds after each piece
==========  ==================================  ====================================================================

A group's pieces go through one buffer on each rank, torch's workspace, beside what torch's allocator has; it grows to
twice the largest piece. `reduced` takes as much memory as the whole sum, where a ring has two pieces of it. On other
devices pieces go around rings. CUDA devices that do not reach each other are refused before a run
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
    """Whether pieces of `x` can come through symmetric memory."""
    return x.is_cuda


def gathered(x: Tensor, weight: Tensor, axis: Axis, dim: int) -> tuple[Tensor, Tensor]:
    """Return gather(X) W^T and gather(X), of X in pieces of tokens along `dim`; both with `dim` slowest in memory."""
    pieces = x.movedim(dim, 0).contiguous()
    panel, (y,) = _products().fused_all_gather_matmul(pieces, [weight.t()], 0, axis.group_name)
    return y.movedim(0, dim), panel.movedim(0, dim)


def reduced(panel: Tensor, weight: Tensor, axis: Axis, dim: int) -> Tensor:
    """Return the sum over ranks of X W^T, this rank's piece along `dim`, which is slowest in memory."""
    tokens = panel.movedim(dim, 0).contiguous()
    y = _products().fused_matmul_reduce_scatter(tokens, weight.t(), "sum", 0, axis.group_name)
    return cast("Tensor", y).movedim(0, dim)


@lru_cache
def _products() -> Any:
    """Return torch's operations on symmetric memory; raise ImportError where it has none (2.4)."""
    importlib.import_module(MODULE)  # which defines the products
    return torch.ops.symm_mem
