"""Interface of the module `costs` of each model family, such as `dslpar.models.gpt.costs`."""

from __future__ import annotations

from typing import Any, Protocol, cast

from dslpar.costs.flops import Flops
from dslpar.costs.layers import ModelLayers
from dslpar.schema import families
from dslpar.schema.sections import Model


class FamilyCosts(Protocol):
    """Layers and FLOPs of a model family; `model` is the model's config section, `seq_len` the tokens of a sample."""

    def layers(self, model: Any, seq_len: int) -> ModelLayers:
        """Return the model's layers, from which memory, traffic and work are computed."""
        ...

    def flops_per_token(self, model: Any, seq_len: int) -> Flops:
        """Return the FLOPs per token, forward and backward."""
        ...


def costs_of(model: Model) -> FamilyCosts:
    """Return the costs module of the family of `model`."""
    return cast(FamilyCosts, families.family_module(model, "costs"))
