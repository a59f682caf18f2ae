"""Which axes of the cuboid cut weights and activations: those of the residual stream, and those inside a layer.

An inward layer leads from the residual to inner features, an outward one back. Axis x (its letters are d and q) splits
tokens: q samples, d samples too or, in context parallelism, each sequence. y splits inner features, z the features of
the residual; how the residual is kept over y, and inner activations over z, is the mode's choice. The layers'
placements, the divisors and the closed forms of memory and traffic all read this.
"""

from __future__ import annotations

from collections.abc import Mapping

from dslpar.core.mesh import TENSOR_AXES, Tensor
from dslpar.core.named_tuple import NamedTuple
from dslpar.layout.token_order import Runs, runs

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


def samples_are_cut_first(tensor: Tensor, cuts: Cuts) -> bool:
    """Whether samples that are cut as [batch, ...], and then by what cuts a sequence, are cut as [tokens, ...]."""
    ways = (cuts.batch + cuts.sequence, cuts.tokens)
    one, other = ([letter for letter in letters if getattr(tensor, letter) > 1] for letters in ways)
    return one == other


def residual_cuts(tensor: Tensor) -> Cuts:
    """Return how the residual stream is stored; also what crosses a pipeline boundary."""
    over_y = {tensor.residual: ("y",)}
    batch, sequence = _token_cuts(tensor)
    return Cuts(
        batch=batch + over_y.get("batch", ()),
        sequence=sequence + over_y.get("sequence", ()),
        features=("z", *over_y.get("hidden", ())),
    )


def inner_cuts(tensor: Tensor) -> Cuts:
    """Return how qkv, the MLP's hidden layer and the logits are stored."""
    over_z = {tensor.inner: ("z",)}
    batch, sequence = _token_cuts(tensor)
    return Cuts(
        batch=batch + over_z.get("batch", ()),
        sequence=sequence,
        features=("y", *over_z.get("heads", ())),
    )


def _token_cuts(tensor: Tensor) -> tuple[Letters, Letters]:
    """Return what of x cuts the batch, and what each sequence."""
    return (("q",), ("d",)) if tensor.split == "sequence" else (("d", "q"), ())


def stored_runs(tensor: Tensor, coord: Mapping[str, int], letters: Letters, length: int) -> Runs:
    """Return which tokens of a sequence of `length` the rank at `coord` stores, where `letters` cut it."""
    index, count = piece(tensor, coord, letters)
    return runs(length, ring_of(tensor, letters), index, count)


def ring_of(tensor: Tensor, letters: Letters) -> int:
    """Return over how many ranks the tokens of a sequence that `letters` cut stand in zigzag; 1: as they follow."""
    return tensor.ring if tensor.zigzag and "d" in letters else 1


def piece(tensor: Tensor, coord: Mapping[str, int], letters: Letters) -> tuple[int, int]:
    """Return (index, count): which of how many equal pieces of a dim cut by `letters` the rank at `coord` holds."""
    index, count = 0, 1
    for letter in letters:
        size = getattr(tensor, letter)
        index, count = index * size + coord[letter], count * size
    return index, count
