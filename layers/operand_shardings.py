"""Shardings of the three operands of a linear's product: the table of `layers.linear` as data."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor, nn

from dslpar.distributed.collectives import Axis, Pending
from dslpar.distributed.groups import Groups
from dslpar.layers import lora
from dslpar.layers.gather_reduce import Sharding, inner_over_z, residual_over_y, weight_over_q
from dslpar.layers.weight_prefetch import PrefetchedWeight, WeightPrefetch

Role = Literal["inward", "outward"]
"""Role of a linear: "inward" maps the residual to inner features, "outward" maps inner features to the residual."""


@dataclass(frozen=True)
class MatmulSharding:
    """Shardings of X, W and Y of one product: all that `sharded_matmul` needs to know about the mesh."""

    x: Sharding
    w: Sharding
    y: Sharding
    depth: Axis
    """Axis of ranks with equal weights and different tokens. The layer sums dW over it; one rank if ZeRO sums dW."""
    keeps_x: bool
    """Whether the gathered X lives until the backward; if not, it is gathered again."""
    keeps_w: bool
    """Whether the gathered W lives until the backward; if not, it is gathered again."""
    keeps_memory_order: bool = False
    """Whether tokens may be sequence first in memory (memory_order.py); if not, all results are contiguous."""
    comm_overlap: bool = False
    """Whether collectives run under products: in parts (overlap.py), and of weights in advance (weight_prefetch.py)."""
    symmetric_memory: bool = False
    """Whether pieces of tokens travel through symmetric memory (symmetric_memory.py) instead of rings."""
    prefetched: PrefetchedWeight | None = field(default=None, compare=False, repr=False)
    """Handle by which other linears prefetch this weight (weight_prefetch.py); None: no prefetching."""
    is_local: bool = field(init=False)
    """Whether the product needs no communication."""

    def __post_init__(self) -> None:
        """Compute `is_local` once, since every forward of every linear reads it."""
        is_local = self.x.axis.size == self.w.axis.size == self.y.axis.size == self.depth.size == 1
        object.__setattr__(self, "is_local", is_local)

    def start_gather_x(self, x: Tensor) -> Pending:
        """Start to gather X again for the backward, or return the panel that was kept."""
        return Pending(x) if self.keeps_x else self.x.start_gather(x, contiguous=not self.keeps_memory_order)

    def overlaps(self, adapters: Sequence[lora.Applied]) -> bool:
        """Return whether this product is computed in parts. Adapters and compiled layers need whole panels."""
        return self.comm_overlap and not adapters and not torch.compiler.is_compiling()


def matmul_sharding(groups: Groups, role: Role, blocks: tuple[int, ...] = ()) -> MatmulSharding:
    """Return how a linear layer with this `role` is sharded. Only an inward layer's output may have `blocks`."""
    residual, inner = residual_over_y(groups), inner_over_z(groups, blocks)
    keep = groups.tensor.keep
    return MatmulSharding(
        x=residual if role == "inward" else inner,
        w=weight_over_q(groups, blocks),
        y=inner if role == "inward" else residual,
        depth=groups.axis(*groups.tensor.summed_by_layers(("d",))),
        keeps_x=keep in ("x", "both"),
        keeps_w=keep in ("w", "both"),
        comm_overlap=groups.tensor.comm_overlap,
        symmetric_memory=groups.tensor.symmetric_memory,
    )


def prefetch_weights(module: nn.Module, enabled: bool = True, within: Iterable[nn.Module] = ()) -> None:
    """Have the linears in `module` prefetch each other's weights if the mesh has `comm_overlap`.

    With `enabled=False` they stop prefetching. A forward pass (weight_prefetch.py) is a call of `module` or, if
    `within` is given, of a module in `within`. All weights of the called module must be in memory when the call begins.
    """
    before = getattr(module, "weight_prefetch", None)
    if before is not None:
        before.remove()
    prefetch, found = WeightPrefetch(), False
    for part in module.modules():
        for name, sharding in list(vars(part).items()):
            if isinstance(sharding, MatmulSharding):
                prefetches = enabled and sharding.comm_overlap and sharding.w.axis.size > 1
                weight = PrefetchedWeight(prefetch, sharding.w) if prefetches else None
                setattr(part, name, replace(sharding, prefetched=weight))
                found = found or prefetches
    module.weight_prefetch = prefetch if found else None  # type: ignore[assignment]
    for each in (tuple(within) or (module,)) if found else ():
        prefetch.watch(each)
