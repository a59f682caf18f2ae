"""Layers and FLOPs of a MoCo: two views through an encoder, and its momentum copy (forward only).

Traffic over data replicas is not counted here, as for every model's gradients. For a MoCo it also has the loss's keys,
projection_size numbers per sample, and BatchNorm's statistics of the heads' features.
"""

from __future__ import annotations

from dslpar.costs.flops import Flops
from dslpar.costs.layers import (
    BatchNorm,
    FirstToken,
    ForwardOnly,
    GatheredInner,
    Layers,
    Linear,
    ModelLayers,
    Norm,
    PerSample,
    Repeated,
    ResidualAdd,
    Vectors,
    attention,
    mlp,
)
from dslpar.models.moco.layout import block_weights, head_weights, projector_weights
from dslpar.models.moco.section import MoCo

_VIEWS = 2


def layers(model: MoCo, seq_len: int) -> ModelLayers:
    """Return the layers of both encoders and of the heads. Tokens are those of one view, for which each layer runs."""
    hidden, ffn, tokens = model.hidden_size, model.ffn_size, model.longest_sample
    around = Norm(hidden), ResidualAdd(hidden)
    block = *around, *attention(hidden, model.num_heads, tokens, causal=False), *around, *mlp(hidden, ffn)
    # The projection of patches is frozen, and positions are constants. The class token is trained.
    fixed = Linear(model.patch_features, hidden, "outward", bias=False), Vectors(tokens * hidden)
    class_token = Vectors(hidden)
    projected = Norm(hidden), PerSample(_projector(model), tokens)
    compared = GatheredInner(model.projection_size)
    heads = *projected, PerSample((*_predictor(model), compared), tokens)
    of_keys = ForwardOnly((*projected, PerSample((compared,), tokens)))
    return ModelLayers(
        first=(Repeated((ForwardOnly(fixed), class_token, ForwardOnly((*fixed, class_token))), _VIEWS),),
        block=(Repeated((*block, ForwardOnly(block)), _VIEWS),),
        last=(Repeated((*heads, of_keys), _VIEWS),),
        boundary=hidden * _VIEWS,
    )


def _projector(model: MoCo) -> Layers:
    inner, size = model.projection_hidden_size, model.projection_size
    return (
        FirstToken(model.hidden_size),
        Linear(model.hidden_size, inner, "inward", bias=False),
        BatchNorm(inner, "inward"),
        Linear(inner, inner, "outward", bias=False),
        BatchNorm(inner, "outward"),
        Linear(inner, size, "inward", bias=False),
        BatchNorm(size, "inward", affine=False),
    )


def _predictor(model: MoCo) -> Layers:
    inner, size = model.projection_hidden_size, model.projection_size
    return (
        Linear(size, inner, "outward", bias=False),
        BatchNorm(inner, "outward"),
        Linear(inner, size, "inward", bias=False),
        BatchNorm(size, "inward", affine=False),
    )


def flops_per_token(model: MoCo, seq_len: int) -> Flops:
    """Return the FLOPs per token of one view, including the other view and the momentum encoder.

    Forward and backward take three times a forward, and the momentum encoder one more. For two views that is eight
    products per weight, of two FLOPs each. Attention has no causal mask, so nothing is halved.
    """
    tokens = model.longest_sample
    blocks = model.num_layers * block_weights(model)
    heads = (3 * head_weights(model) + projector_weights(model)) // tokens
    patches = model.patch_features * model.hidden_size * model.num_patches // tokens
    # The frozen projection of patches runs only forward, in both encoders.
    products = 2 * _VIEWS * (4 * blocks + heads + 2 * patches)
    scores = 2 * _VIEWS * 4 * model.num_layers * 2 * model.hidden_size * tokens
    return Flops(mfu_causal=products + scores, mfu_6n=products)
