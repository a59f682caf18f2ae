"""What a model costs, whatever it is: one of a family of dslpar's, or of transformers'."""

from __future__ import annotations

from collections.abc import Callable

from dslpar.core.mesh import Tensor
from dslpar.costs.family_costs import costs_of
from dslpar.costs.flops import Flops
from dslpar.costs.model_costs import ModelCosts
from dslpar.costs.ring import Number
from dslpar.schema.sections import Model, OtherModel


def costs_function(model: Model | OtherModel, seq_len: int) -> Callable[[Tensor, Number], ModelCosts] | None:
    """Return what tells the costs of a model's parts to a rank, of a cuboid, for a micro-batch of so many tokens.

    None where they are not known before the model is built.
    """
    if isinstance(model, Model):
        of_family = costs_of(model).model_costs
        return lambda cuboid, tokens: of_family(model, cuboid, tokens, seq_len)
    if model.transformers is None:
        return None
    from dslpar.costs import transformers_costs  # most configs have a model of dslpar's own

    return transformers_costs.costs_function(model.transformers, seq_len, model.lora)


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
    from dslpar.costs import transformers_costs

    return transformers_costs.flops_per_token(model.transformers, seq_len, model.lora)
