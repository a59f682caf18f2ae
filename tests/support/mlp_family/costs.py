"""What a ResidualMLP sends, holds and computes."""

from __future__ import annotations

from dslpar.core.mesh import Tensor
from dslpar.forecast import flops, memory, traffic
from dslpar.forecast.flops import Flops
from dslpar.forecast.memory import LayerMemory
from dslpar.forecast.ring import LayerTraffic, Number
from tests.support.mlp_family.section import ResidualMLP


def layer_traffic(model: ResidualMLP, cuboid: Tensor, tokens: Number) -> LayerTraffic:
    return traffic.mlp(cuboid, tokens, model.width, model.width, activation=model.activation)


def model_traffic(model: ResidualMLP, cuboid: Tensor, tokens: Number) -> LayerTraffic:
    return (
        traffic.embedding(cuboid, tokens, model.vocab_size, model.width)
        + layer_traffic(model, cuboid, tokens) * model.num_layers
        + traffic.head(cuboid, tokens, model.width, model.vocab_size)
        + traffic.cross_entropy(cuboid, tokens)
    )


def layer_memory(model: ResidualMLP, cuboid: Tensor, tokens: Number) -> LayerMemory:
    return memory.mlp(cuboid, tokens, model.width, model.width, activation=model.activation)


def flops_per_token(model: ResidualMLP, seq_len: int) -> Flops:
    matrices = 3 if model.activation == "swiglu" else 2
    return flops.per_token(model.num_layers * matrices * model.width**2 + model.width * model.vocab_size, 0)
