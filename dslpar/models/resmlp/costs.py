"""Communication, memory and compute of a ResMLP: the sums of its layers' closed forms."""

from __future__ import annotations

from dslpar.core.mesh import Tensor
from dslpar.costs import memory, traffic, work
from dslpar.costs.flops import Flops
from dslpar.costs.memory import LayerMemory, Saved
from dslpar.costs.model_costs import Costs, ModelCosts
from dslpar.costs.ring import LayerTraffic, Number, ratio
from dslpar.costs.work import Product, Work
from dslpar.models.resmlp.layout import pipeline_weights
from dslpar.models.resmlp.section import ResMLP


def layer_traffic(model: ResMLP, cuboid: Tensor, tokens: Number) -> LayerTraffic:
    """Return the traffic per rank of a block: two affine maps, two scales, both linear parts."""
    hidden = model.hidden_size
    return (
        traffic.residual_vectors(cuboid, 6 * hidden)
        + traffic.token_linear(cuboid, tokens, hidden, model.num_patches)
        + traffic.mlp(cuboid, tokens, hidden, model.ffn_size)
    )


def model_traffic(model: ResMLP, cuboid: Tensor, tokens: Number) -> LayerTraffic:
    """Return the traffic per rank of the whole model for a micro-batch of `tokens`, all on one stage."""
    hidden = model.hidden_size
    return (
        traffic.linear(cuboid, tokens, model.patch_features, hidden, role="outward", input_grad=False)
        + layer_traffic(model, cuboid, tokens) * model.num_layers
        + traffic.residual_vectors(cuboid, 2 * hidden)
        + traffic.mean_of_tokens(cuboid, tokens, hidden, model.num_patches)
    )


def layer_memory(model: ResMLP, cuboid: Tensor, tokens: Number) -> LayerMemory:
    """Return the memory per rank of a block."""
    hidden = model.hidden_size
    affine = memory.affine(cuboid, tokens, hidden)
    scale = memory.affine(cuboid, tokens, hidden, bias=False)
    mixing = memory.token_linear(cuboid, tokens, hidden, model.num_patches)
    mlp = memory.mlp(cuboid, tokens, hidden, model.ffn_size)
    return affine + mixing + scale + affine + mlp + scale


def model_costs(model: ResMLP, cuboid: Tensor, tokens: Number, seq_len: int) -> ModelCosts:
    """Return the costs per rank of patches, blocks, and classifier for a micro-batch of `tokens`."""
    hidden, features = model.hidden_size, model.patch_features
    samples = ratio(tokens, model.num_patches)
    patches = cuboid, tokens, features, hidden
    first = Costs(
        work=work.linear(*patches, role="outward"),
        traffic=traffic.linear(*patches, role="outward", input_grad=False),
        memory=memory.linear(*patches, role="outward"),
    )
    block = Costs(
        work=work.norm(cuboid, tokens, hidden) * 2
        + work.token_linear(cuboid, tokens, hidden, model.num_patches)
        + work.residual_add(cuboid, tokens, hidden) * 2
        + work.mlp(cuboid, tokens, hidden, model.ffn_size),
        traffic=layer_traffic(model, cuboid, tokens),
        memory=layer_memory(model, cuboid, tokens),
    )
    classes = model.num_classes
    last = Costs(
        work=work.norm(cuboid, tokens, hidden)
        + Work(products=(Product(float(samples), hidden, classes),), losses=float(samples) * classes),
        traffic=traffic.residual_vectors(cuboid, 2 * hidden)
        + traffic.mean_of_tokens(cuboid, tokens, hidden, model.num_patches),
        memory=memory.affine(cuboid, tokens, hidden)
        + LayerMemory(weights=(hidden + 1) * classes, saved=Saved(elements=samples * hidden)),
    )
    return ModelCosts(
        first=first,
        layer=block,
        last=last,
        boundary=memory.residual(cuboid, tokens, hidden),
        logits=samples * classes,
    )


def flops_per_token(model: ResMLP, seq_len: int) -> Flops:
    """Return the FLOPs per patch: an image's FLOPs over its patches. Without attention both conventions agree."""
    weights = pipeline_weights(model, "cost", seq_len)
    products = 6 * (weights.first + model.num_layers * weights.layer + weights.last) // model.num_patches
    return Flops(mfu_causal=products, mfu_6n=products)
