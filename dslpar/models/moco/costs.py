"""What a MoCo sends, holds and computes: two views through an encoder, and forward alone through its momentum copy.

What the loss and BatchNorm send over data replicas is not counted here, as no model's gradients are: keys of
projection_size numbers a sample, and statistics of the heads' features.
"""

from __future__ import annotations

from dslpar.core.mesh import Tensor
from dslpar.costs import memory, traffic, work
from dslpar.costs.flops import Flops
from dslpar.costs.memory import LayerMemory, Saved
from dslpar.costs.model_costs import Costs, ModelCosts
from dslpar.costs.ring import LayerTraffic, Number, ratio
from dslpar.costs.work import Work
from dslpar.models.moco.layout import block_weights, head_weights, projector_weights
from dslpar.models.moco.section import MoCo

_VIEWS = 2


def layer_traffic(model: MoCo, cuboid: Tensor, tokens: Number) -> LayerTraffic:
    """Return what a rank sends for a block of both encoders: of both views, tokens counted of one."""
    trained = _block(model, cuboid, tokens)
    return (trained + LayerTraffic(forward=trained.forward)) * _VIEWS


def model_traffic(model: MoCo, cuboid: Tensor, tokens: Number) -> LayerTraffic:
    """Return what a rank sends within its tensor group: one micro-batch, `tokens` of one view."""
    samples, hidden = ratio(tokens, model.longest_sample), model.hidden_size
    inner, size = model.projection_hidden_size, model.projection_size
    patches = traffic.linear(
        *(cuboid, tokens, model.patch_features, hidden),
        role="outward",
        bias=False,
        input_grad=False,
        weight_grad=False,
    )
    trained = (
        LayerTraffic(forward=patches.forward)  # the projection of patches is frozen
        + traffic.residual_vectors(cuboid, hidden)  # the class token
        + _block(model, cuboid, tokens) * model.num_layers
        + traffic.norm(cuboid, tokens, hidden)
        + traffic.first_token(cuboid, samples, hidden)
        + traffic.linear(cuboid, samples, hidden, inner, role="inward", bias=False)
        + traffic.batch_norm(cuboid, inner, after="inward")
        + traffic.linear(cuboid, samples, inner, inner, role="outward", bias=False)
        + traffic.batch_norm(cuboid, inner, after="outward")
        + traffic.linear(cuboid, samples, inner, size, role="inward", bias=False)
        + traffic.batch_norm(cuboid, size, after="inward", affine=False)
    )
    prediction = (
        traffic.linear(cuboid, samples, size, inner, role="outward", bias=False)
        + traffic.batch_norm(cuboid, inner, after="outward")
        + traffic.linear(cuboid, samples, inner, size, role="inward", bias=False)
        + traffic.batch_norm(cuboid, size, after="inward", affine=False)
    )
    whole = traffic.whole_inner(cuboid, samples, size)
    return (trained + prediction + LayerTraffic(forward=trained.forward) + whole * 2) * _VIEWS


def _block(model: MoCo, cuboid: Tensor, tokens: Number) -> LayerTraffic:
    hidden = model.hidden_size
    return (
        traffic.norm(cuboid, tokens, hidden) * 2
        + traffic.attention(cuboid, tokens, hidden, model.num_heads)
        + traffic.mlp(cuboid, tokens, hidden, model.ffn_size)
    )


def layer_memory(model: MoCo, cuboid: Tensor, tokens: Number) -> LayerMemory:
    """Return what a rank holds of a block: its weights twice, and what two views save in the trained encoder."""
    hidden = model.hidden_size
    norm = memory.norm(cuboid, tokens, hidden)
    attention = memory.attention(cuboid, tokens, hidden, model.num_heads)
    block = norm + norm + attention + memory.mlp(cuboid, tokens, hidden, model.ffn_size)
    return LayerMemory(weights=2 * block.weights, saved=block.saved + block.saved)


def model_costs(model: MoCo, cuboid: Tensor, tokens: Number, seq_len: int) -> ModelCosts:
    """Return what patches, blocks of both encoders, and heads cost a rank for a micro-batch: `tokens` of one view.

    The momentum encoder computes a forward more: a third of what a trained block does, counted as further products.
    """
    hidden, samples = model.hidden_size, ratio(tokens, model.longest_sample)
    patches = work.linear(cuboid, tokens, model.patch_features, hidden, role="outward")
    heads = _heads_work(model, cuboid, samples)
    block = _block_work(model, cuboid, tokens)
    whole = model_traffic(model, cuboid, tokens)
    layers = layer_traffic(model, cuboid, tokens) * model.num_layers
    held = ratio(head_weights(model) + projector_weights(model), cuboid.size // cuboid.d)
    return ModelCosts(
        first=Costs(
            work=patches * (2 * _VIEWS),
            memory=LayerMemory(
                weights=2 * memory.linear(cuboid, tokens, model.patch_features, hidden, role="outward").weights,
                saved=Saved(),
            ),
        ),
        layer=Costs(
            work=block * _VIEWS + block * (_VIEWS / 3),
            traffic=layer_traffic(model, cuboid, tokens),
            memory=layer_memory(model, cuboid, tokens),
        ),
        last=Costs(
            work=heads * _VIEWS,
            traffic=LayerTraffic(
                forward=whole.forward - layers.forward,
                backward=whole.backward - layers.backward,
            ),
            memory=LayerMemory(
                weights=held,
                saved=Saved(elements=_VIEWS * samples * 4 * model.projection_hidden_size / cuboid.x),
            ),
        ),
        boundary=memory.residual(cuboid, tokens, hidden) * _VIEWS,
    )


def _block_work(model: MoCo, cuboid: Tensor, tokens: Number) -> Work:
    hidden = model.hidden_size
    around = work.norm(cuboid, tokens, hidden) + work.residual_add(cuboid, tokens, hidden)
    attention = work.attention(cuboid, tokens, model.longest_sample, hidden, model.num_heads, causal=False)
    return around * 2 + attention + work.mlp(cuboid, tokens, hidden, model.ffn_size)


def _heads_work(model: MoCo, cuboid: Tensor, samples: Number) -> Work:
    hidden, inner, size = model.hidden_size, model.projection_hidden_size, model.projection_size
    return (
        work.linear(cuboid, samples, hidden, inner, role="inward")
        + work.linear(cuboid, samples, inner, inner, role="outward")
        + work.linear(cuboid, samples, inner, size, role="inward")
        + work.linear(cuboid, samples, size, inner, role="outward")
        + work.linear(cuboid, samples, inner, size, role="inward")
    )


def flops_per_token(model: MoCo, seq_len: int) -> Flops:
    """Return the FLOPs of a token of one view, those of the other and of the momentum encoder among them.

    Forward and backward take three times a forward, and the momentum encoder one more: eight products of a weight, two
    FLOPs each. Attention has no causal mask: nothing is halved.
    """
    tokens = model.longest_sample
    blocks = model.num_layers * block_weights(model)
    heads = (3 * head_weights(model) + projector_weights(model)) // tokens
    patches = model.patch_features * model.hidden_size * model.num_patches // tokens
    # The frozen projection of patches is computed forward alone, in both encoders.
    products = 2 * _VIEWS * (4 * blocks + heads + 2 * patches)
    scores = 2 * _VIEWS * 4 * model.num_layers * 2 * model.hidden_size * tokens
    return Flops(mfu_causal=products + scores, mfu_6n=products)
