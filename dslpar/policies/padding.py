"""Find what a model's forward computes from the padding mask outside attention: positions (OPT), alibi (Bloom).

Most models only pass the mask on to attention, where it becomes a recipe (`attention`). To find models that compute
with the mask, the forward is run on stand-ins, with and without a mask. If embedding tables or blocks get other
arguments (besides the residual), the forward computes with the mask.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dslpar.core.catalog import raise_finding
from dslpar.policies.errors import NEEDS_OWN_CODE
from dslpar.policies.probe import on_cpu
from dslpar.policies.skeleton import Skeleton
from dslpar.policies.stand_ins import BlockStandIn, LeafStandIn

_LENGTH = 6


class MaskUse(NamedTuple):
    """Use of the padding mask in a forward, apart from attention."""

    anything: bool
    """Whether the forward computes with the mask, so that it must run with the micro-batch's mask."""
    positions: bool
    """Whether it computes positions from the mask, so that no positions may be passed."""


@on_cpu
def mask_use(found: Skeleton) -> MaskUse:
    """Find the use of the mask in the model's forward by running it.

    Raises:
        DslparError: the forward computes positions from the mask and the residual's length; on a rank, the residual may
            be only a piece of the sequence.
    """
    arange = torch.arange(_LENGTH)[None]
    mask = (arange > 1) & (arange < _LENGTH - 1)
    with_mask = _seen(found, None, mask)
    if _equal(with_mask, _seen(found, None, None)):
        return MaskUse(False, False)
    positions = not _equal(with_mask, _seen(found, arange, mask))
    if positions and not _equal(with_mask, _seen(found, None, mask, _LENGTH // 2)):
        name = type(found.model).__name__
        message = (
            f"{name} computes positions from the padding mask and the residual's length, but the residual may be split"
        )
        raise_finding("TEN234", message, NEEDS_OWN_CODE, key="model.type")
    return MaskUse(True, positions)


@torch.no_grad()
def _seen(found: Skeleton, positions: Tensor | None, mask: Tensor | None, length: int = _LENGTH) -> list[Tensor]:
    """Run the forward; return the tensor arguments that blocks and embedding tables get, besides the residual."""
    part = found.part(()).eval()
    seen: list[Tensor] = []

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        rest = {name: value for name, value in kwargs.items() if name != "hidden_states"}
        seen.extend(_tensors((args[isinstance(module, BlockStandIn) :], rest)))

    for module in part.modules():
        if isinstance(module, BlockStandIn) or (isinstance(module, LeafStandIn) and module.gives_nothing):
            module.register_forward_pre_hook(note, with_kwargs=True)
    masks = {} if mask is None else {"attention_mask": mask.long()}
    found.run(part, torch.zeros(1, length, found.hidden_size(0)), length, position_ids=positions, **masks)
    return seen


def _equal(some: list[Tensor], others: list[Tensor]) -> bool:
    return len(some) == len(others) and all(map(torch.equal, some, others))


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _tensors(each)
