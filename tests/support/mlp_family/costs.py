"""Layers and FLOPs of a ResidualMLP."""

from __future__ import annotations

from dslpar.costs import flops
from dslpar.costs.flops import Flops
from dslpar.costs.layers import CrossEntropy, Embedding, Head, ModelLayers, mlp
from tests.support.mlp_family.section import ResidualMLP


def layers(model: ResidualMLP, seq_len: int) -> ModelLayers:
    return ModelLayers(
        first=(Embedding(model.vocab_size, model.width),),
        block=mlp(model.width, model.width, activation=model.activation),
        last=(Head(model.width, model.vocab_size), CrossEntropy(model.vocab_size)),
        boundary=model.width,
    )


def flops_per_token(model: ResidualMLP, seq_len: int) -> Flops:
    matrices = 3 if model.activation == "swiglu" else 2
    return flops.per_token(model.num_layers * matrices * model.width**2 + model.width * model.vocab_size, 0)
