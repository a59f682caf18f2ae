"""Sizes of a MoCo and their divisibility conditions. A MoCo is not a chain of layers, so it has no pipeline stages."""

from __future__ import annotations

from collections.abc import Sequence

from dslpar.core.mesh import TensorMesh
from dslpar.layout import divisors
from dslpar.layout.divisors import Attention, Condition
from dslpar.layout.inferred_value import InferredValue
from dslpar.layout.sharding import inner_cuts, residual_cuts
from dslpar.layout.stages import EvenWeights, num_matches
from dslpar.models.moco.section import MoCo

IS_CHAIN = False
"""Whether a pipeline can cut the model. It cannot: a MoCo's step is one micro-batch, whose samples are all compared."""


def conditions(model: MoCo, cuboid: TensorMesh, seq_len: int) -> list[Condition]:
    """Return the divisibility conditions."""
    sides = Condition("hidden_size", model.hidden_size, 4, "4 (sine and cosine of two sides' positions)", "TEN140")
    return [
        *divisors.attention(Attention(model.hidden_size, model.num_heads), cuboid),
        *divisors.inner_features(model.ffn_size, cuboid),
        sides,
        *divisors.patches(model.longest_sample, model.patch_features, cuboid),
        *divisors.residual_features(model.projection_hidden_size, cuboid, "projection_hidden_size"),
        *divisors.inner_features(model.projection_size, cuboid, "projection_size"),
    ]


def samples(cuboid: TensorMesh) -> Condition:
    """Return MoCo's condition on a micro-batch's samples: the heads cut them over all axes that cut tokens."""
    cuts = residual_cuts(cuboid).tokens, inner_cuts(cuboid).tokens
    axes = max(cuts, key=lambda letters: divisors.ranks(cuboid, letters))
    return divisors.cut("batch.micro_size", 0, cuboid, axes, "BAT221")


def padding(model: MoCo, cuboid: TensorMesh) -> list[Condition]:
    """Return an empty list, since there is no vocabulary to pad."""
    return []


def pipeline_weights(model: MoCo, method: str, seq_len: int) -> EvenWeights:
    """Return the weights of blocks, patches and heads for a pipeline cut. (A rule refuses pipelines of a MoCo.)"""
    if method.startswith("type:"):
        return EvenWeights(*(num_matches(method, [name]) for name in class_names(model)))
    hidden, tokens = model.hidden_size, model.longest_sample
    if method == "parameters":
        return EvenWeights((model.patch_features + tokens + 1) * hidden, block_parameters(model), head_weights(model))
    patches = model.num_patches * model.patch_features * hidden
    block = tokens * (block_weights(model) + 2 * tokens * hidden)
    return EvenWeights(patches, block, head_weights(model))


def class_names(model: MoCo) -> Sequence[str]:
    """Return the class names of the model's parts in order; the second is the class of all blocks."""
    return "PatchEmbedding", "Block", "Projector"


def block_weights(model: MoCo) -> int:
    """Return the elements of a block's matrices."""
    return 4 * model.hidden_size**2 + 2 * model.hidden_size * model.ffn_size


def block_parameters(model: MoCo) -> int:
    """Return all elements of a block: its matrices, their biases, two norms."""
    return block_weights(model) + 9 * model.hidden_size + model.ffn_size


def projector_weights(model: MoCo) -> int:
    """Return the elements of the projection's three matrices."""
    inner = model.projection_hidden_size
    return inner * (model.hidden_size + inner + model.projection_size)


def head_weights(model: MoCo) -> int:
    """Return the elements of the matrices of projection and prediction."""
    return projector_weights(model) + 2 * model.projection_hidden_size * model.projection_size


def inferred(model: MoCo, field: str) -> InferredValue | None:
    """Return the value of a field that was left out; None if it does not follow from other fields."""
    if field == "ffn_hidden_size":
        return InferredValue(4 * model.hidden_size, f"4 * hidden_size {model.hidden_size}", ("model.hidden_size",))
    return None
