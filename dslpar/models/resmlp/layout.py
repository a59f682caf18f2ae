"""Sizes of a ResMLP: divisibility conditions, and the layer weights by which pipeline stages are balanced."""

from __future__ import annotations

from collections.abc import Sequence

from dslpar.core.mesh import TensorMesh
from dslpar.layout import divisors
from dslpar.layout.divisors import Condition
from dslpar.layout.inferred_value import InferredValue
from dslpar.layout.stages import EvenWeights, num_matches
from dslpar.models.resmlp.section import ResMLP


def conditions(model: ResMLP, cuboid: TensorMesh, seq_len: int) -> list[Condition]:
    """Return the divisibility conditions."""
    return [
        *divisors.residual_features(model.hidden_size, cuboid),
        *divisors.token_mixing(model.hidden_size, cuboid),
        *divisors.inner_features(model.ffn_size, cuboid),
        *divisors.patches(model.longest_sample, model.patch_features, cuboid),
    ]


def padding(model: ResMLP, cuboid: TensorMesh) -> list[Condition]:
    """Return an empty list, since there is no vocabulary to pad."""
    return []


def pipeline_weights(model: ResMLP, method: str, seq_len: int) -> EvenWeights:
    """Return the weight of each block, and of patches and classifier on the first and last stage, for pipeline cuts.

    'cost': multiplications in an image's forward. 'parameters': elements.

        >>> model = ResMLP(num_layers=2, hidden_size=4, image_size=4, patch_size=2, num_channels=1, num_classes=10)
        >>> pipeline_weights(model, "cost", 4)
        EvenWeights(first=64, layer=576, last=40)
    """
    hidden, tokens, features = model.hidden_size, model.num_patches, model.patch_features
    if method == "cost":
        first, last = tokens * features * hidden, hidden * model.num_classes
        return EvenWeights(first, hidden * tokens**2 + tokens * 2 * hidden * model.ffn_size, last)
    if method == "parameters":
        last = 2 * hidden + (hidden + 1) * model.num_classes
        return EvenWeights((features + 1) * hidden, block_parameters(model), last)
    patches, block, norm, head = (num_matches(method, [name]) for name in class_names(model))
    return EvenWeights(patches, block, norm + head)


def class_names(model: ResMLP) -> Sequence[str]:
    """Return the class names of the layers in order; the second is the class of all blocks."""
    return "PatchEmbedding", "ResMLPBlock", "Affine", "Classifier"


def block_parameters(model: ResMLP) -> int:
    """Return all elements of a block: two affine maps, two scales, the linear over patches, the MLP."""
    hidden, tokens, ffn = model.hidden_size, model.num_patches, model.ffn_size
    return 6 * hidden + tokens**2 + tokens + 2 * hidden * ffn + ffn + hidden


def inferred(model: ResMLP, field: str) -> InferredValue | None:
    """Return the value of a field that was left out; None if it does not follow from other fields."""
    if field == "ffn_hidden_size":
        return InferredValue(4 * model.hidden_size, f"4 * hidden_size {model.hidden_size}", ("model.hidden_size",))
    return None
