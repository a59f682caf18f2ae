"""Gradients that every rank of d has whole, where ZeRO sums those of all ranks of d.

    share_whole_gradients(module, groups)     # before DeepSpeed's engine is built

Ranks of d have other tokens, so the gradients of dslpar's layers are in parts there, and ZeRO's sum makes them whole.
Modules that are not of dslpar.layers are computed alike on all ranks of a tensor group, and have whole gradients: here
each rank gives its share of them.
"""

from __future__ import annotations

from torch import Tensor, nn

from dslpar.distributed.groups import Groups
from dslpar.layers.parameter import placement_of


def share_whole_gradients(module: nn.Module, groups: Groups) -> None:
    """Divide gradients that are whole on each rank of d by their number, where ZeRO sums them over d."""
    if not groups.tensor.zero_over_d:
        return
    d = groups.tensor.d

    def share(gradient: Tensor) -> Tensor:
        return gradient / d

    for p in module.parameters():
        if p.requires_grad and not _is_in_parts(p):
            p.register_hook(share)  # type: ignore[no-untyped-call]


def _is_in_parts(p: nn.Parameter) -> bool:
    """Return whether ranks of d have a part each of a parameter's gradient."""
    placement = placement_of(p)
    return placement is not None and ("d" in placement.partial or placement.summed_by_product)
