"""What the forecast asks of a model family: the module `costs` in the family's package; and of other models."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, Protocol, cast

from dslpar.core.mesh import Tensor
from dslpar.forecast.flops import Flops
from dslpar.forecast.memory import LayerMemory
from dslpar.forecast.model_costs import ModelCosts
from dslpar.forecast.ring import LayerTraffic, Number
from dslpar.schema import families
from dslpar.schema.sections import Model, OtherModel


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


def costs_function(model: Model | OtherModel, seq_len: int) -> Callable[[Tensor, Number], ModelCosts] | None:
    """Return what tells the costs of a model's parts to a rank, of a cuboid, for a micro-batch of so many tokens.

    None where they are not known before the model is built.
    """
    if isinstance(model, Model):
        of_family = costs_of(model).model_costs
        return lambda cuboid, tokens: of_family(model, cuboid, tokens, seq_len)
    if model.transformers is None:
        return None
    found: Callable[[Tensor, Number], ModelCosts] | None
    found = _of_transformers().costs_function(model.transformers, seq_len, model.lora)
    return found


def model_costs(model: Model | OtherModel, cuboid: Tensor, tokens: Number, seq_len: int) -> ModelCosts | None:
    """Return what a model's parts cost a rank for a micro-batch; None where it is not known before it is built."""
    costs = costs_function(model, seq_len)
    return None if costs is None else costs(cuboid, tokens)


def flops_per_token(model: Model | OtherModel, seq_len: int) -> Flops | None:
    """Return the FLOPs of a token, forward and backward; None where they are not known before it is built."""
    if isinstance(model, Model):
        return costs_of(model).flops_per_token(model, seq_len)
    if model.transformers is None:
        return None
    found: Flops | None = _of_transformers().flops_per_token(model.transformers, seq_len, model.lora)
    return found


def _of_transformers() -> Any:
    """Return the module that knows what transformers' models cost: by name, as a family's modules are."""
    return import_module("dslpar.policies.costs")
