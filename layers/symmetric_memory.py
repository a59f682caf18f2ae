"""Products whose pieces of tokens come through symmetric memory: `tensor=dict(comm_overlap='symmetric_memory')`.

torch's fused products, which are its async tensor parallelism (torchtitan's `enable_async_tensor_parallel`, there for
compiled models alone): each rank copies a piece from a peer's memory by the device's copy engines, where a ring
(overlap.py) takes processors of the device to send and receive. They are for CUDA devices that reach each other's
memory: those of a host, or of one NVLink fabric. torch calls them alpha.

==========  ==================================  ====================================================================
function    gives                               order of the sum
==========  ==================================  ====================================================================
`gathered`  gather(X) W^T, and gather(X)        none
`reduced`   this rank's tokens of the sum of    by rank, in float32 for half precision: rounded once, where a ring
            X W^T                               rounds after each piece
==========  ==================================  ====================================================================

A group's pieces go through one buffer on each rank, torch's workspace, which grows to twice the largest piece. On other
devices, and of tensors without memory, pieces go around rings. CUDA devices that cannot reach each other `require`
refuses before a run.
"""

from __future__ import annotations

import importlib
import logging
from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor

from dslpar.core.catalog import raise_finding
from dslpar.distributed.collectives import Axis
from dslpar.distributed.groups import Groups

log = logging.getLogger("dslpar")
_MODULE = "torch.distributed._symmetric_memory"


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
    importlib.import_module(_MODULE)  # which defines the products
    return torch.ops.symm_mem


def require(groups: Groups, device: torch.device) -> None:
    """Raise DslparError where CUDA devices cannot reach each other's memory over y and z. All ranks together.

    Makes what torch needs for it.
    """
    if device.type != "cuda":
        log.info("comm_overlap='symmetric_memory': on %s, pieces go around rings", device.type)
        return
    for axis in (groups.axis("y"), groups.axis("z")):
        reason = _why_not(axis) if axis.size > 1 else None
        if reason is not None:
            message = f"comm_overlap='symmetric_memory': {reason}"
            hint = "comm_overlap=True, whose pieces go around rings"
            raise_finding("HST234", message, hint, key="parallel.tensor.comm_overlap")


def _why_not(axis: Axis) -> str | None:
    try:
        memory: Any = importlib.import_module(_MODULE)
    except ImportError:
        return f"torch {torch.__version__} has none"
    enable = memory.enable_symm_mem_for_group
    try:
        if not hasattr(enable, "__deprecated__"):  # later ones need no such call
            enable(axis.group_name)
        memory.get_symm_mem_workspace(axis.group_name, min_size=1)
    except RuntimeError as error:
        first_line = str(error).partition("\n")[0]
        return f"ranks {', '.join(map(str, axis.peers))} cannot reach each other's memory: {first_line}"
    return None
