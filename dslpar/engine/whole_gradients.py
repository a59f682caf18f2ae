"""Divide complete gradients by the number of ranks over which ZeRO will sum them.

    share_whole_gradients(module, groups)     # before DeepSpeed's engine is built

d is a tensor axis whose ranks have different tokens and equal weights (docs/architecture.md, The cuboid). With
`zero_over_d`, ZeRO shards over d and sums gradients over d. For dslpar's layers each rank has a partial gradient, and
the sum completes it. All ranks of a tensor group compute other modules identically, and each has the complete gradient.
Here each rank divides such a gradient by d, so that ZeRO's sum is the gradient again.
"""

from __future__ import annotations

from torch import Tensor, nn

from dslpar.distributed.groups import Groups
from dslpar.layers.parameter import placement_of


def share_whole_gradients(module: nn.Module, groups: Groups) -> None:
    """Divide gradients that are complete on each rank of d by the size of d, if ZeRO sums over d."""
    if not groups.tensor.zero_over_d:
        return
    d = groups.tensor.d

    def share(gradient: Tensor) -> Tensor:
        return gradient / d

    for p in module.parameters():
        if p.requires_grad and not _is_in_parts(p):
            p.register_hook(share)  # type: ignore[no-untyped-call]


def _is_in_parts(p: nn.Parameter) -> bool:
    """Return whether each rank of d has a partial gradient for a parameter."""
    placement = placement_of(p)
    return placement is not None and ("d" in placement.partial or placement.summed_by_product)
