"""Sharding of weights and activations over the cuboid's axes, in the residual stream and inside layers.

An inward layer maps the residual to inner features, and an outward layer maps them back. Axis x, which consists of d
and q, splits tokens: q splits samples. d splits samples too, or each sequence in context parallelism. y splits inner
features, and z splits the features of the residual. The mode of tensor parallelism decides how ranks along y store the
residual, and how ranks along z store inner activations (docs/architecture.md, The cuboid). The layers' placements, the
divisors and the closed forms of memory and traffic all use this module.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from dslpar.core.mesh import TENSOR_AXES, TensorMesh
from dslpar.layout.token_order import Runs, runs

Letters = tuple[str, ...]
"""Axes of the cuboid: "d", "q", "y", "z"."""


INWARD_WEIGHT: tuple[Letters, Letters] = (("y", "q"), ("z",))
"""Axes that shard the weight [inner, residual] of an inward layer."""
OUTWARD_WEIGHT: tuple[Letters, Letters] = (("z", "q"), ("y",))
"""Axes that shard the weight [residual, inner] of an outward layer."""


class ActivationSharding(NamedTuple):
    """Axes that shard each dim of an activation [batch, sequence, features], slowest first."""

    batch: Letters
    sequence: Letters
    features: Letters

    @property
    def tokens(self) -> Letters:
        """All axes that split tokens; the gradient of a vector parameter is partial over these.

        They are in the order in which they shard the first dim of [tokens, features]: d, q, then y or z.
        """
        return tuple(letter for letter in TENSOR_AXES if letter in self.batch + self.sequence)

    def of(self, num_dims: int) -> tuple[Letters, ...]:
        """Return the axes of each dim of [batch, sequence, features], or of [tokens, features]."""
        return tuple(self) if num_dims == len(self) else (self.tokens, self.features)


def samples_are_cut_first(tensor: TensorMesh, cuts: ActivationSharding) -> bool:
    """Return whether sharding the dims of [batch, sequence, ...] gives each rank the same tokens as [tokens, ...]."""
    ways = (cuts.batch + cuts.sequence, cuts.tokens)
    one, other = ([letter for letter in letters if getattr(tensor, letter) > 1] for letters in ways)
    return one == other


def residual_cuts(tensor: TensorMesh) -> ActivationSharding:
    """Return the sharding of the residual stream, which is also that of activations sent between stages."""
    over_y = {tensor.residual: ("y",)}
    batch, sequence = _token_cuts(tensor)
    return ActivationSharding(
        batch=batch + over_y.get("batch", ()),
        sequence=sequence + over_y.get("sequence", ()),
        features=("z", *over_y.get("hidden", ())),
    )


def inner_cuts(tensor: TensorMesh) -> ActivationSharding:
    """Return the sharding of qkv, the MLP's hidden layer and the logits."""
    over_z = {tensor.inner: ("z",)}
    batch, sequence = _token_cuts(tensor)
    return ActivationSharding(
        batch=batch + over_z.get("batch", ()),
        sequence=sequence,
        features=("y", *over_z.get("heads", ())),
    )


def _token_cuts(tensor: TensorMesh) -> tuple[Letters, Letters]:
    """Return the axes of x that split the batch, and the axes that split each sequence."""
    return (("q",), ("d",)) if tensor.split == "sequence" else (("d", "q"), ())


def stored_runs(tensor: TensorMesh, coord: Mapping[str, int], letters: Letters, length: int) -> Runs:
    """Return which of a sequence's `length` tokens the rank at `coord` stores, if the axes `letters` split it."""
    index, count = piece(tensor, coord, letters)
    return runs(length, ring_of(tensor, letters), index, count)


def ring_of(tensor: TensorMesh, letters: Letters) -> int:
    """Return the number of ranks that store a sequence split by `letters` in zigzag order; 1 for plain order."""
    return tensor.ring if tensor.zigzag and "d" in letters else 1


def piece(tensor: TensorMesh, coord: Mapping[str, int], letters: Letters) -> tuple[int, int]:
    """Return (index, count) of the piece that the rank at `coord` holds of a dim split equally by `letters`.

    The letter "e" is a part of the data axis, over which experts are divided (`TensorMesh.e`).
    """
    index, count = 0, 1
    for letter in letters:
        size = getattr(tensor, letter)
        own = coord.get("data", 0) % size if letter == "e" else coord[letter]
        index, count = index * size + own, count * size
    return index, count
