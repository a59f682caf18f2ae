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
            be only a piece of the sequence. Or its positions are not 0, 1, ... (RoBERTa's begin after the padding id).
    """
    arange = torch.arange(_LENGTH)[None]
    if not _equal(_seen(found, None, None, tables_only=True), _seen(found, arange, None, tables_only=True)):
        message = f"{type(found.model).__name__}: its positions are not 0, 1, ..., but computed by its own code"
        hint = "inputs=['input_ids', 'attention_mask', 'token_type_ids'] in its policy, so that its code gets the ids"
        raise_finding("TEN234", message, hint, key="model.policy")
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
def _seen(
    found: Skeleton,
    positions: Tensor | None,
    mask: Tensor | None,
    length: int = _LENGTH,
    *,
    tables_only: bool = False,
) -> list[Tensor]:
    """Run the forward; return the tensor arguments that blocks and embedding tables get, besides the residual.

    `tables_only`: those of embedding tables alone.
    """
    part = found.part(()).eval()
    seen: list[Tensor] = []

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        rest = {name: value for name, value in kwargs.items() if name != "hidden_states"}
        seen.extend(_tensors((args[isinstance(module, BlockStandIn) :], rest)))

    for module in part.modules():
        is_block = isinstance(module, BlockStandIn) and not tables_only
        if is_block or (isinstance(module, LeafStandIn) and module.gives_nothing):
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
