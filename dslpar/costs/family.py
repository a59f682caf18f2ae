"""Costs of any model: a dslpar model family or a transformers class."""

from __future__ import annotations

from collections.abc import Callable

from dslpar.core.mesh import Tensor
from dslpar.costs.family_costs import costs_of
from dslpar.costs.flops import Flops
from dslpar.costs.model_costs import ModelCosts
from dslpar.costs.ring import Number
from dslpar.schema.sections import Model, OtherModel


def costs_function(model: Model | OtherModel, seq_len: int) -> Callable[[Tensor, Number], ModelCosts] | None:
    """Return a function from a cuboid and the tokens of a micro-batch to the costs of the model's parts on a rank.

    Return None if the costs are unknown before the model is built.
    """
    if isinstance(model, Model):
        of_family = costs_of(model).model_costs
        return lambda cuboid, tokens: of_family(model, cuboid, tokens, seq_len)
    if model.transformers is None:
        return None
    from dslpar.costs import transformers_costs  # most configs have a dslpar model

    return transformers_costs.costs_function(model.transformers, seq_len, model.lora)


def model_costs(model: Model | OtherModel, cuboid: Tensor, tokens: Number, seq_len: int) -> ModelCosts | None:
    """Return the costs of a model's parts on a rank for a micro-batch; None if unknown before the model is built."""
    costs = costs_function(model, seq_len)
    return None if costs is None else costs(cuboid, tokens)


def flops_per_token(model: Model | OtherModel, seq_len: int) -> Flops | None:
    """Return the FLOPs per token, forward and backward; None if unknown before the model is built."""
    if isinstance(model, Model):
        return costs_of(model).flops_per_token(model, seq_len)
    if model.transformers is None:
        return None
    from dslpar.costs import transformers_costs

    return transformers_costs.flops_per_token(model.transformers, seq_len, model.lora)
