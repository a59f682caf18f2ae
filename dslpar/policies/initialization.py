"""Initialize parameters by transformers' `_init_weights`, one module at a time; a rank keeps only its shard."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dslpar.core.catalog import raise_finding
from dslpar.layers.parameter import stable_hash
from dslpar.layers.placement import Placement
from dslpar.models.pretrained import Source, merged
from dslpar.policies.constructed import constructed, is_filled, unfilled


class TransformersInit(NamedTuple):
    """Initialization of a parameter by its model's `_init_weights`."""

    model: Any
    """PreTrainedModel on the meta device."""
    sources: tuple[Source, ...]

    def piece(self, placement: Placement, coord: Mapping[str, int], seed: int, name: str) -> Tensor:
        """Draw the full transformers tensors one by one, in float32 on the CPU; return the shard of `coord`."""

        def draw(name: str) -> Tensor:
            owner, _, own = name.rpartition(".")
            drawn = _drawn(self.model, owner, seed).get_parameter(own)
            return drawn if is_filled(drawn) else _made(self.model, owner, own)

        return placement.cut(merged(self.sources, draw), coord)


@torch.no_grad()
def _drawn(model: Any, name: str, seed: int) -> nn.Module:
    """Return a copy of the module `name`, initialized by `_init_weights` of itself and of all modules around it.

    The modules around it matter: GPT-2 initializes its output projections again when it initializes the attention
    around them. Only this module has memory; all others stay on the meta device.
    """
    parent_name, _, last = name.rpartition(".")
    parent = model.get_submodule(parent_name)
    on_meta = getattr(parent, last)
    leaf: nn.Module = copy.deepcopy(on_meta).float().to_empty(device="cpu")
    for p in leaf.parameters():
        p.copy_(unfilled(p))
    path = name.split(".")
    setattr(parent, last, leaf)
    try:
        with torch.random.fork_rng(devices=[]):
            # Not torch.manual_seed, which would also seed the accelerator's generators; all draws are on the CPU.
            torch.default_generator.manual_seed(stable_hash(seed, name))
            for length in range(len(path), -1, -1):
                model._init_weights(model.get_submodule(".".join(path[:length])))
    finally:
        setattr(parent, last, on_meta)
    return leaf


def _made(model: Any, owner: str, own: str) -> Tensor:
    """Return the values of a parameter that `_init_weights` does not set: those of the module's constructor.

    Raises:
        DslparError: the constructor's values cannot be computed either.
    """
    found = constructed(model, owner, own, model.get_submodule(owner).get_parameter(own))
    if found.is_meta:
        message = f"{owner}.{own}: transformers' `_init_weights` does not set its values"
        raise_finding("TEN234", message, "pretrained='folder' has its values", key="model.pretrained")
    return found.float()
