"""What the forecast asks of a model family: the module `costs` in the family's package."""

from __future__ import annotations

from typing import Any, Protocol, cast

from dslpar.core.mesh import Tensor
from dslpar.costs.flops import Flops
from dslpar.costs.memory import LayerMemory
from dslpar.costs.model_costs import ModelCosts
from dslpar.costs.ring import LayerTraffic, Number
from dslpar.schema import families
from dslpar.schema.sections import Model


class FamilyCosts(Protocol):
    """Costs of one family; `model` is its section, `tokens` those of a micro-batch."""

    def layer_traffic(self, model: Any, cuboid: Tensor, tokens: Number) -> LayerTraffic:
        """What a rank sends for one layer of a pipeline's cut."""
        ...

    def model_traffic(self, model: Any, cuboid: Tensor, tokens: Number) -> LayerTraffic:
        """What a rank sends for the whole model and its loss, all on one stage."""
        ...

    def layer_memory(self, model: Any, cuboid: Tensor, tokens: Number) -> LayerMemory:
        """What a rank holds of one layer."""
        ...

    def model_costs(self, model: Any, cuboid: Tensor, tokens: Number, seq_len: int) -> ModelCosts:
        """What a rank computes, sends and holds, of a layer and of what is before and after all of them."""
        ...

    def flops_per_token(self, model: Any, seq_len: int) -> Flops:
        """FLOPs of a token, forward and backward."""
        ...


def costs_of(model: Model) -> FamilyCosts:
    """Return the costs module of the family of `model`."""
    return cast(FamilyCosts, families.family_module(model, "costs"))
