"""Which axes of the cuboid cut weights and activations: those of the residual stream, and those inside a layer.

An inward layer leads from the residual to inner features, an outward one back. Axis x (its letters are d and q) splits
tokens, y inner features, z the features of the residual; how the residual is kept over y, and inner activations over z,
is the mode's choice. The layers' placements, the divisors and the closed forms of memory and traffic all read this.
"""

from __future__ import annotations

from collections.abc import Mapping

from dslpar.core.mesh import TENSOR_AXES, Tensor
from dslpar.core.named_tuple import NamedTuple

Letters = tuple[str, ...]
"""Axes of the cuboid: "d", "q", "y", "z"."""


INWARD_WEIGHT: tuple[Letters, Letters] = (("y", "q"), ("z",))
"""The weight [inner, residual] of a layer from the residual to inner features."""
OUTWARD_WEIGHT: tuple[Letters, Letters] = (("z", "q"), ("y",))
"""The weight [residual, inner] of a layer back to the residual."""


class Cuts(NamedTuple):
    """Which axes cut each dim of an activation [batch, sequence, features], slowest first."""

    batch: Letters
    sequence: Letters
    features: Letters

    @property
    def tokens(self) -> Letters:
        """All axes that cut tokens: over these a vector's gradient comes in parts.

        They are in the order in which they cut the one dim of [tokens, features]: d, q, then y or z.
        """
        return tuple(letter for letter in TENSOR_AXES if letter in self.batch + self.sequence)

    def of(self, num_dims: int) -> tuple[Letters, ...]:
        """Return the cuts of [batch, sequence, features], or of [tokens, features]."""
        return tuple(self) if num_dims == len(self) else (self.tokens, self.features)


def residual_cuts(tensor: Tensor) -> Cuts:
    """Return how the residual stream is stored; also what crosses a pipeline boundary."""
    over_y = {tensor.residual: ("y",)}
    x = {tensor.split: ("d", "q")}
    return Cuts(
        batch=x.get("batch", ()) + over_y.get("batch", ()),
        sequence=x.get("sequence", ()) + over_y.get("sequence", ()),
        features=("z", *over_y.get("hidden", ())),
    )


def inner_cuts(tensor: Tensor) -> Cuts:
    """Return how qkv, the MLP's hidden layer and the logits are stored."""
    over_z = {tensor.inner: ("z",)}
    x = {tensor.split: ("d", "q")}
    return Cuts(
        batch=x.get("batch", ()) + over_z.get("batch", ()),
        sequence=x.get("sequence", ()),
        features=("y", *over_z.get("heads", ())),
    )


def piece(tensor: Tensor, coord: Mapping[str, int], letters: Letters) -> tuple[int, int]:
    """Return (index, count): which of how many equal pieces of a dim cut by `letters` the rank at `coord` holds."""
    index, count = 0, 1
    for letter in letters:
        size = getattr(tensor, letter)
        index, count = index * size + coord[letter], count * size
    return index, count
