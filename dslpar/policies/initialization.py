"""Initial weights of transformers' own, module by module, for any piece of them."""

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
    """How a parameter begins: as its model's `_init_weights` has it."""

    model: Any
    """On the meta device; a PreTrainedModel."""
    sources: tuple[Source, ...]

    def piece(self, placement: Placement, coord: Mapping[str, int], seed: int, name: str) -> Tensor:
        """Draw the sources one after the other, whole, float32 on the CPU; return the piece of the rank at `coord`."""

        def draw(name: str) -> Tensor:
            owner, _, own = name.rpartition(".")
            drawn = _drawn(self.model, owner, seed).get_parameter(own)
            return drawn if is_filled(drawn) else _made(self.model, owner, own)

        return placement.cut(merged(self.sources, draw), coord)


@torch.no_grad()
def _drawn(model: Any, name: str, seed: int) -> nn.Module:
    """Return the module `name` of the model, alone in memory, as `_init_weights` of it and of those around it leave it.

    GPT-2 draws its outward projections anew when it comes to the attention around them.
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
            # Not torch.manual_seed, which would seed an accelerator's generators too: nothing here is drawn on one.
            torch.default_generator.manual_seed(stable_hash(seed, name))
            for length in range(len(path), -1, -1):
                model._init_weights(model.get_submodule(".".join(path[:length])))
    finally:
        setattr(parent, last, on_meta)
    return leaf


def _made(model: Any, owner: str, own: str) -> Tensor:
    """Return a parameter of which `_init_weights` knows nothing, as its constructor makes it.

    Raises:
        DslparError: that is not known either.
    """
    found = constructed(model, owner, own, model.get_submodule(owner).get_parameter(own))
    if found.is_meta:
        message = f"{owner}.{own}: transformers' `_init_weights` does not say how it begins"
        raise_finding("TEN234", message, "pretrained='folder' has its values", key="model.pretrained")
    return found.float()
