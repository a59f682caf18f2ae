"""How the three operands of a linear's product are stored: the table of `layers.linear`, as data."""

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


@dataclass(frozen=True)
class MatmulSharding:
    """How X, W and Y of one product are stored: all that `sharded_matmul` needs to know of the mesh."""

    x: Sharding
    w: Sharding
    y: Sharding
    depth: Axis
    """Ranks that hold equal weights for other tokens, as far as gradients are to be summed over them here."""
    keeps_x: bool
    """Whether the gathered X lives until the backward; else it is gathered again."""
    keeps_w: bool
    keeps_memory_order: bool = False
    """Whether tokens may come and go by sequence first in memory (memory_order.py); else all results are contiguous."""
    comm_overlap: bool = False
    """Whether collectives are cut into parts that run under products (overlap.py), and weights prefetched."""
    symmetric_memory: bool = False
    """Whether parts of tokens come through symmetric memory (symmetric_memory.py), not around rings."""
    prefetched: PrefetchedWeight | None = field(default=None, compare=False, repr=False)
    """The weight as linears before and after know it (weight_prefetch.py); None: each product waits for its own."""
    is_local: bool = field(init=False)
    """Whether no rank needs what another one stores."""

    def __post_init__(self) -> None:
        """Look once: a forward asks for each linear."""
        is_local = self.x.axis.size == self.w.axis.size == self.y.axis.size == self.depth.size == 1
        object.__setattr__(self, "is_local", is_local)

    def start_gather_x(self, x: Tensor) -> Pending:
        """Begin to gather X once more, for the backward; or hand on what was kept of it."""
        return Pending(x) if self.keeps_x else self.x.start_gather(x, contiguous=not self.keeps_memory_order)

    def overlaps(self, adapters: Sequence[lora.Applied]) -> bool:
        """Whether this product is computed in parts: adapters need whole panels, and so does a compiled layer."""
        return self.comm_overlap and not adapters and not torch.compiler.is_compiling()


def matmul_sharding(groups: Groups, role: Role, blocks: tuple[int, ...] = ()) -> MatmulSharding:
    """Return the sharding of a linear's product in `role`; inward, its output may be `blocks` of features."""
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
    """Have the linears in `module` prefetch each other's weights, as its `tensor.comm_overlap` asks; or no longer.

    A forward is a call of the module, or of one of those `within` it, if any are given: those whose weights are all
    there when it begins.
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
