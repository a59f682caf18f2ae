"""Costs of a ResidualMLP: traffic, memory and FLOPs."""

from __future__ import annotations

from dslpar.core.mesh import Tensor
from dslpar.costs import flops, memory, traffic, work
from dslpar.costs.flops import Flops
from dslpar.costs.memory import LayerMemory
from dslpar.costs.model_costs import Costs, ModelCosts
from dslpar.costs.ring import LayerTraffic, Number
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


def model_costs(model: ResidualMLP, cuboid: Tensor, tokens: Number, seq_len: int) -> ModelCosts:
    width, vocab = model.width, model.vocab_size
    return ModelCosts(
        first=Costs(
            work=work.embedding(cuboid, tokens, width),
            traffic=traffic.embedding(cuboid, tokens, vocab, width),
            memory=memory.embedding(cuboid, vocab, width),
        ),
        layer=Costs(
            work=work.mlp(cuboid, tokens, width, width, activation=model.activation),
            traffic=layer_traffic(model, cuboid, tokens),
            memory=layer_memory(model, cuboid, tokens),
        ),
        last=Costs(
            work=work.head(cuboid, tokens, width, vocab),
            traffic=traffic.head(cuboid, tokens, width, vocab) + traffic.cross_entropy(cuboid, tokens),
            memory=memory.head(cuboid, tokens, width, vocab),
        ),
        boundary=memory.residual(cuboid, tokens, width),
        logits=memory.logits(cuboid, tokens, vocab),
    )


def flops_per_token(model: ResidualMLP, seq_len: int) -> Flops:
    matrices = 3 if model.activation == "swiglu" else 2
    return flops.per_token(model.num_layers * matrices * model.width**2 + model.width * model.vocab_size, 0)
