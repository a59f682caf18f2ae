"""Communication, memory and compute of a MoCo: two views through an encoder, and its momentum copy (forward only).

Traffic over data replicas is not counted here, as for every model's gradients. For a MoCo it also has the loss's keys,
projection_size numbers per sample, and BatchNorm's statistics of the heads' features.
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
    """Return the traffic per rank of a block of both encoders for both views; `tokens` are those of one view."""
    trained = _block(model, cuboid, tokens)
    return (trained + LayerTraffic(forward=trained.forward)) * _VIEWS


def model_traffic(model: MoCo, cuboid: Tensor, tokens: Number) -> LayerTraffic:
    """Return the traffic per rank within the tensor group for one micro-batch; `tokens` are those of one view."""
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
    """Return the memory per rank of a block: its weights twice, and what two views save in the trained encoder."""
    hidden = model.hidden_size
    norm = memory.norm(cuboid, tokens, hidden)
    attention = memory.attention(cuboid, tokens, hidden, model.num_heads)
    block = norm + norm + attention + memory.mlp(cuboid, tokens, hidden, model.ffn_size)
    return LayerMemory(weights=2 * block.weights, saved=block.saved + block.saved)


def model_costs(model: MoCo, cuboid: Tensor, tokens: Number, seq_len: int) -> ModelCosts:
    """Return the costs per rank of patches, blocks and heads of both encoders; `tokens` are those of one view.

    The momentum encoder adds a forward: a third of a trained block's work, counted as further products.
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
