"""Layers and FLOPs of a ResMLP."""

from __future__ import annotations

from dslpar.costs.flops import Flops
from dslpar.costs.layers import (
    Affine,
    Classifier,
    Linear,
    MeanOfTokens,
    ModelLayers,
    PerSample,
    ResidualAdd,
    TokenLinear,
    mlp,
)
from dslpar.models.resmlp.layout import pipeline_weights
from dslpar.models.resmlp.section import ResMLP


def layers(model: ResMLP, seq_len: int) -> ModelLayers:
    """Return the model's layers: patches, blocks with two affine maps and two scales each, and the classifier."""
    hidden, patches = model.hidden_size, model.num_patches
    affine, scale, add = Affine(hidden), Affine(hidden, bias=False), ResidualAdd(hidden)
    return ModelLayers(
        first=(Linear(model.patch_features, hidden, "outward", input_grad=False),),
        block=(affine, TokenLinear(hidden, patches), scale, add, affine, *mlp(hidden, model.ffn_size), scale, add),
        last=(affine, MeanOfTokens(hidden, patches), PerSample((Classifier(hidden, model.num_classes),), patches)),
        boundary=hidden,
    )


def flops_per_token(model: ResMLP, seq_len: int) -> Flops:
    """Return the FLOPs per patch: an image's FLOPs over its patches. Without attention both conventions agree."""
    weights = pipeline_weights(model, "cost", seq_len)
    products = 6 * (weights.first + model.num_layers * weights.layer + weights.last) // model.num_patches
    return Flops(mfu_causal=products, mfu_6n=products)
