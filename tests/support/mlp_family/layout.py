"""Layout of a ResidualMLP: its divisors, and the weights of its layers in a pipeline."""

from __future__ import annotations

from collections.abc import Sequence

from dslpar.core.mesh import TensorMesh
from dslpar.layout import divisors
from dslpar.layout.divisors import Condition
from dslpar.layout.inferred_value import InferredValue
from dslpar.layout.stages import EvenWeights, num_matches
from tests.support.mlp_family.section import ResidualMLP


def conditions(model: ResidualMLP, cuboid: TensorMesh, seq_len: int) -> list[Condition]:
    return [
        *divisors.residual_features(model.width, cuboid, "width"),
        *divisors.sequence(seq_len, cuboid),
    ]


def padding(model: ResidualMLP, cuboid: TensorMesh) -> list[Condition]:
    return [divisors.vocabulary(model.vocab_size, cuboid)]


def pipeline_weights(model: ResidualMLP, method: str, seq_len: int) -> EvenWeights:
    if method.startswith("type:"):
        return EvenWeights(*(num_matches(method, [name]) for name in class_names(model)))
    table, layer = model.width * model.vocab_size, 2 * model.width**2
    return EvenWeights(first=table if method == "parameters" else 0, layer=layer, last=table)


def class_names(model: ResidualMLP) -> Sequence[str]:
    return "Embedding", "MLP", "Head"


def inferred(model: ResidualMLP, field: str) -> InferredValue | None:
    return None
