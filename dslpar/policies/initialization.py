"""Initial weights of transformers' own, module by module, for any piece of them."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dslpar.layers.parameter import stable_hash
from dslpar.layers.placement import Placement
from dslpar.models.pretrained import Source, merged


class TransformersInit(NamedTuple):
    """How a parameter begins: as its model's `_init_weights` has it."""

    model: Any
    """On the meta device; a PreTrainedModel."""
    sources: tuple[Source, ...]

    def piece(self, placement: Placement, coord: Mapping[str, int], seed: int, name: str) -> Tensor:
        """Draw the sources one after the other, whole, float32 on the CPU; return the piece of the rank at `coord`."""

        def draw(name: str) -> Tensor:
            owner, _, own = name.rpartition(".")
            return _drawn(self.model, owner, seed).get_parameter(own)

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
    path = name.split(".")
    setattr(parent, last, leaf)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(stable_hash(seed, name))
            for length in range(len(path), -1, -1):
                model._init_weights(model.get_submodule(".".join(path[:length])))
    finally:
        setattr(parent, last, on_meta)
    return leaf
