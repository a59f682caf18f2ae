"""Costs of any model: a dslpar model family or a transformers class."""

from __future__ import annotations

from dslpar.core.mesh import TensorMesh
from dslpar.costs import memory, traffic
from dslpar.costs.collective_traffic import LayerTraffic, Number
from dslpar.costs.family_interface import costs_of
from dslpar.costs.flops import Flops
from dslpar.costs.memory import LayerMemory
from dslpar.costs.model_costs import CostsFunction, ModelCosts, function_of
from dslpar.schema.sections import Model, OtherModel


def layer_traffic(model: Model, tensor: TensorMesh, tokens: Number) -> LayerTraffic:
    """Return a rank's traffic for one layer of the pipeline's partition and a micro-batch of `tokens`."""
    return traffic.total(costs_of(model).layers(model, model.longest_sample).layer, tensor, tokens)


def layer_memory(model: Model, tensor: TensorMesh, tokens: Number) -> LayerMemory:
    """Return a rank's memory for one layer of the pipeline's partition."""
    return memory.total(costs_of(model).layers(model, model.longest_sample).layer, tensor, tokens)


def model_traffic(model: Model, tensor: TensorMesh, tokens: Number) -> LayerTraffic:
    """Return a rank's traffic for the whole model and its loss, all on one stage."""
    layers = costs_of(model).layers(model, model.longest_sample)
    if layers.unequal:
        return traffic.total(layers.whole, tensor, tokens)
    first, layer, last = (traffic.total(each, tensor, tokens) for each in (layers.first, layers.layer, layers.last))
    return first + layer * model.num_layers + last


def costs_function(model: Model | OtherModel, seq_len: int) -> CostsFunction | None:
    """Return a function from a cuboid and the tokens of a micro-batch to the costs of the model's parts on a rank.

    Return None if the costs are unknown before the model is built.
    """
    if isinstance(model, Model):
        return function_of(costs_of(model).layers(model, seq_len))
    if model.transformers is None:
        return None
    from dslpar.costs import transformers_costs  # most configs have a dslpar model

    return transformers_costs.costs_function(model.transformers, seq_len, model.lora)


def model_costs(model: Model | OtherModel, cuboid: TensorMesh, tokens: Number, seq_len: int) -> ModelCosts | None:
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
