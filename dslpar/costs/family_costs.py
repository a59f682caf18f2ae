"""Interface of the module `costs` of each model family, such as `dslpar.models.gpt.costs`; the forecast calls it."""

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
    """Costs of a model family.

    Arguments: `model` is the model's config section, `cuboid` the tensor group, `tokens` the tokens of a micro-batch,
    and `seq_len` the tokens of a sample.
    """

    def layer_traffic(self, model: Any, cuboid: Tensor, tokens: Number) -> LayerTraffic:
        """Return a rank's traffic for one layer of the pipeline partition."""
        ...

    def model_traffic(self, model: Any, cuboid: Tensor, tokens: Number) -> LayerTraffic:
        """Return a rank's traffic for the whole model and its loss, all on one stage."""
        ...

    def layer_memory(self, model: Any, cuboid: Tensor, tokens: Number) -> LayerMemory:
        """Return a rank's memory for one layer."""
        ...

    def model_costs(self, model: Any, cuboid: Tensor, tokens: Number, seq_len: int) -> ModelCosts:
        """Return a rank's compute, traffic and memory for one layer, and for the parts before and after all layers."""
        ...

    def flops_per_token(self, model: Any, seq_len: int) -> Flops:
        """Return the FLOPs per token, forward and backward."""
        ...


def costs_of(model: Model) -> FamilyCosts:
    """Return the costs module of the family of `model`."""
    return cast(FamilyCosts, families.family_module(model, "costs"))
