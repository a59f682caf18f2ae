"""Placements of sharded tensors: the tables of docs/architecture.md ("The cuboid") as data.

A `Placement` lists for each dim of a tensor the axes of the cuboid that cut it, slowest cut first. Sharded init,
gradient reductions, DeepSpeed's model-parallel flags, checkpoints and exports read the placement, never the parameter's
name.

Letters: H residual features, F inner features, V vocabulary, S positions; d, q, y and z are the cuboid's axes. A
gradient is partial over an axis if each rank along the axis has only its own tokens' part of the sum.

===========================  ==============================  =========================================
parameter                    axes that cut each dim          gradient is partial over
===========================  ==============================  =========================================
`inward_weight`  (F, H)      F: y, q; H: z                   - (the product sums it over q, the layer or ZeRO over d)
`outward_weight` (H, F)      H: z, q; F: y                   -
`table`          (V, H)      V: y, q; H: z                   -
`inner_vector`   (F,)        F as the inner activations      axes that cut the inner activations' tokens
`residual_vector` (H,)       H as the residual               axes that cut the residual's tokens
`position_table` (S, H)      H as the residual               the same
===========================  ==============================  =========================================

The list of mesh axes per dim comes from GSPMD (arXiv 2105.04663). torch's DTensor stores one dim per mesh axis instead.
So DTensor cannot choose the order of two cuts of one dim, which matters here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from dslpar.core.catalog import finding
from dslpar.core.errors import DslparError, Finding
from dslpar.core.mesh import TENSOR_AXES, Mesh, TensorMesh
from dslpar.layout.divisors import vocabulary
from dslpar.layout.nearest import multiples
from dslpar.layout.sharding import INWARD_WEIGHT, OUTWARD_WEIGHT, ring_of
from dslpar.layout.sharding import ActivationSharding as ActivationSharding
from dslpar.layout.sharding import Letters as Letters
from dslpar.layout.sharding import inner_cuts as inner_cuts
from dslpar.layout.sharding import piece as piece
from dslpar.layout.sharding import residual_cuts as residual_cuts
from dslpar.layout.sharding import stored_runs as stored_runs
from dslpar.layout.token_order import Run, stored_order


def take(full: torch.Tensor, dim: int, tensor: TensorMesh, coord: Mapping[str, int], letters: Letters) -> torch.Tensor:
    """Return a view of the shard of `full` that belongs to the rank at `coord`.

    Dim `dim` is split evenly over the mesh axes in `letters`.
    """
    index, count = piece(tensor, coord, letters)
    assert full.shape[dim] % count == 0, f"dim {dim} of {tuple(full.shape)} in {count} pieces (over {letters})"
    length = full.shape[dim] // count
    return full.narrow(dim, index * length, length) if count > 1 else full


def take_tokens(
    full: torch.Tensor, dim: int, tensor: TensorMesh, coord: Mapping[str, int], letters: Letters
) -> torch.Tensor:
    """Return the tokens that the rank at `coord` stores; `full` has whole sequences along `dim`, cut over `letters`."""
    if ring_of(tensor, letters) == 1:
        return take(full, dim, tensor, coord, letters)
    return _select(full, dim, stored_runs(tensor, coord, letters, full.shape[dim]))


def to_stored_order(full: torch.Tensor, dim: int, tensor: TensorMesh, letters: Letters) -> torch.Tensor:
    """Reorder the tokens of whole sequences along `dim` to the order in which the ranks store them, rank by rank."""
    ring = ring_of(tensor, letters)
    return full if ring == 1 else _select(full, dim, stored_order(full.shape[dim], ring))


def from_stored_order(stored: torch.Tensor, dim: int, tensor: TensorMesh, letters: Letters) -> torch.Tensor:
    """Reorder the tokens of whole sequences along `dim` to sequence order: the inverse of `to_stored_order`."""
    ring = ring_of(tensor, letters)
    if ring == 1:
        return stored
    order = stored_order(stored.shape[dim], ring)
    pieces = torch.split(stored, [run.length for run in order], dim)
    return torch.cat([piece for _, piece in sorted(zip(order, pieces, strict=True), key=lambda each: each[0])], dim)


def _select(full: torch.Tensor, dim: int, tokens: Sequence[Run]) -> torch.Tensor:
    views = [full.narrow(dim, run.first, run.length) for run in tokens]
    return views[0] if len(views) == 1 else torch.cat(views, dim)


@dataclass(frozen=True)
class Placement:
    """Placement of one tensor's pieces on the cuboid of a tensor group; every rank has an equal `Placement`.

    Dims, after padding, must divide by the number of ranks that cut them. The linter checks that for GPT before any
    process starts, `check` for other models.
    """

    tensor: TensorMesh
    shape: tuple[int, ...]
    """Full shape without padding. The tensor is drawn, exported and compared in this shape."""
    cuts: tuple[Letters, ...]
    """For each dim, the axes that cut it, slowest cut first."""
    partial: Letters = ()
    """Axes over which autograd's gradient of this parameter is partial. Layers sum it over the axes in `summed`."""
    blocks: tuple[int, ...] = ()
    """Lengths of the blocks of dim 0 (q, k, v). Each block is cut over all ranks. (): one block."""
    padded_rows: int | None = None
    """Length of dim 0 with the zero rows that make it divisible; None: no padding."""
    sequence_dim: int | None = None
    """The dim of a sequence's tokens, which context parallelism may store in another order; None: no sequence dim."""
    summed_by_product: bool = False
    """Whether the tensor is an operand of `layers.linear`'s product, which sums its gradient over q, and over d unless
    ZeRO does."""

    @property
    def padded(self) -> tuple[int, ...]:
        """Full shape with padding: the shape that is cut."""
        return self.shape if self.padded_rows is None else (self.padded_rows, *self.shape[1:])

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of every rank's piece."""
        assert not self._uneven(), f"{self.shape} does not divide: {self._uneven()}"
        return tuple(length // count for length, count in zip(self.padded, self._counts(), strict=True))

    def check(self) -> None:
        """Raise DslparError, listing every length that is not divisible by the number of ranks that cut it."""
        if uneven := self._uneven():
            raise DslparError([_does_not_divide(length, count, self.tensor.mode) for length, count in uneven])

    def _counts(self) -> list[int]:
        """Return the number of pieces of each dim."""
        return [math.prod(getattr(self.tensor, letter) for letter in letters) for letters in self.cuts]

    def _uneven(self) -> list[tuple[int, int]]:
        """Return (length, pieces) of each block of the first dim, and of each other dim, that does not divide."""
        counts = self._counts()
        first = self.blocks or self.padded[:1]
        cuts = [*((length, counts[0]) for length in first), *zip(self.padded[1:], counts[1:], strict=True)]
        return [(length, count) for length, count in dict.fromkeys(cuts) if length % count]

    @property
    def summed(self) -> Letters:
        """Axes of `partial` over which layers sum the gradient. ZeRO may sum it over d instead."""
        return self.tensor.summed_by_layers(self.partial)

    @property
    def is_expert(self) -> bool:
        """Return whether data ranks hold different pieces, which only experts do. See `TensorMesh.e`."""
        return self.tensor.e > 1 and any("e" in letters for letters in self.cuts)

    @property
    def holders(self) -> str:
        """The axis of the ranks that together hold the whole tensor: "expert" or "tensor"."""
        return "expert" if self.is_expert else "tensor"

    @property
    def replicas(self) -> Letters:
        """Axes along which ranks hold equal copies."""
        cut = {letter for letters in self.cuts for letter in letters}
        return tuple(letter for letter in TENSOR_AXES if letter not in cut)

    def owner(self, coord: Mapping[str, int]) -> bool:
        """Return whether the rank at `coord` holds copy 0. Over all owners, every element counts once."""
        return all(coord[letter] == 0 for letter in self.replicas)

    def is_stepped_at(self, coord: Mapping[str, int]) -> bool:
        """Return whether global norms count the elements that the rank at `coord` updates in an optimizer step.

        They count the elements of copy 0. If ZeRO shards the copies along d, each rank along d updates another part of
        copy 0, and all these ranks count.
        """
        return self.owner({**coord, "d": 0} if self.tensor.zero_over_d else coord)

    def cut(self, full: torch.Tensor, coord: Mapping[str, int]) -> torch.Tensor:
        """Cut the piece of the rank at `coord` out of the unpadded `full`, as a new tensor."""
        assert tuple(full.shape) == self.shape, f"{tuple(full.shape)} is not {self.shape}"
        if self.padded != self.shape:
            full = torch.cat([full, full.new_zeros(self.padded[0] - self.shape[0], *self.shape[1:])])
        if self.sequence_dim is not None:
            full = to_stored_order(full, self.sequence_dim, self.tensor, self.cuts[self.sequence_dim])
        # cat copies even one piece: a view would keep the full tensor alive.
        return torch.cat(self._views(full, coord))

    def merge(self, pieces: Sequence[torch.Tensor]) -> torch.Tensor:
        """Merge the pieces of all ranks of the axis `holders`, in their order, to the full, unpadded tensor."""
        mesh = Mesh(data=self.tensor.e if self.is_expert else 1, tensor=self.tensor)
        assert len(pieces) == mesh.world_size, f"{len(pieces)} pieces of {mesh.world_size}"
        full = pieces[0].new_empty(self.padded)
        for coord, shard in zip(map(mesh.coord, range(mesh.world_size)), pieces, strict=True):
            # Copies are equal, so one copy of each piece is enough.
            if self.owner(coord):
                views = self._views(full, coord)
                for view, part in zip(views, torch.split(shard, [len(view) for view in views]), strict=True):
                    view.copy_(part)
        if self.sequence_dim is not None:
            full = from_stored_order(full, self.sequence_dim, self.tensor, self.cuts[self.sequence_dim])
        return full[: self.shape[0]] if self.padded_rows is not None else full

    def _views(self, padded: torch.Tensor, coord: Mapping[str, int]) -> list[torch.Tensor]:
        """Return the part of each block that the rank at `coord` holds, as views."""
        for dim, letters in list(enumerate(self.cuts))[1:]:
            padded = take(padded, dim, self.tensor, coord, letters)
        blocks = torch.split(padded, list(self.blocks) or len(padded))
        return [take(block, 0, self.tensor, coord, self.cuts[0]) for block in blocks]


def _does_not_divide(length: int, count: int, mode: str | None) -> Finding:
    sizes = " or ".join(map(str, multiples(length, count)))
    return finding(
        "TEN227",
        f"a layer has {length} features, but mode {mode!r} splits them into {count} shards",
        f"nearest legal: {sizes}; or a smaller tensor size",
        key="parallel.tensor",
    )


def inward_weight(tensor: TensorMesh, out_features: int | Sequence[int], in_features: int) -> Placement:
    """Place the weight (F, H) of a linear from the residual to inner features, or to blocks of them."""
    length, blocks = _blocks(out_features)
    return Placement(tensor, (length, in_features), INWARD_WEIGHT, blocks=blocks, summed_by_product=True)


def outward_weight(tensor: TensorMesh, out_features: int, in_features: int) -> Placement:
    """Place the weight (H, F) of a linear from inner features to the residual."""
    return Placement(tensor, (out_features, in_features), OUTWARD_WEIGHT, summed_by_product=True)


def table(tensor: TensorMesh, vocab_size: int, hidden_size: int) -> Placement:
    """Place the token table or the head (V, H), which is an inward weight with padded rows."""
    padded = vocabulary(vocab_size, tensor).value
    rows = padded if padded != vocab_size else None
    shape = (vocab_size, hidden_size)
    return Placement(tensor, shape, INWARD_WEIGHT, padded_rows=rows, summed_by_product=True)


def inner_vector(tensor: TensorMesh, features: int | Sequence[int]) -> Placement:
    """Place a vector (F,) that is added to inner activations, or to blocks of them."""
    cuts, (length, blocks) = inner_cuts(tensor), _blocks(features)
    return Placement(tensor, (length,), (cuts.features,), partial=cuts.tokens, blocks=blocks)


def logit_vector(tensor: TensorMesh, vocab_size: int) -> Placement:
    """Place a vector (V,) that is added to the padded logits."""
    cuts, padded = inner_cuts(tensor), vocabulary(vocab_size, tensor).value
    rows = padded if padded != vocab_size else None
    return Placement(tensor, (vocab_size,), (cuts.features,), partial=cuts.tokens, padded_rows=rows)


def _blocks(features: int | Sequence[int]) -> tuple[int, tuple[int, ...]]:
    """Return (the total number of features, the lengths of the blocks)."""
    return (features, ()) if isinstance(features, int) else (sum(features), tuple(features))


def residual_vector(tensor: TensorMesh, length: int) -> Placement:
    """Place a vector (H,) that is added to the stored residual, or multiplied with it."""
    cuts = residual_cuts(tensor)
    return Placement(tensor, (length,), (cuts.features,), partial=cuts.tokens)


def position_table(tensor: TensorMesh, num_positions: int, hidden_size: int) -> Placement:
    """Place a table (S, H) of positions. Its rows are never cut, and each rank slices those of its tokens."""
    cuts = residual_cuts(tensor)
    return Placement(tensor, (num_positions, hidden_size), ((), cuts.features), partial=cuts.tokens)


def residual(tensor: TensorMesh, *shape: int) -> Placement:
    """Place the residual stream [batch, sequence, hidden], or [tokens, hidden]."""
    return _activation(tensor, shape, residual_cuts(tensor))


def inner(tensor: TensorMesh, *shape: int) -> Placement:
    """Place an inner activation [batch, sequence, features], or [tokens, features]."""
    return _activation(tensor, shape, inner_cuts(tensor))


def _activation(tensor: TensorMesh, shape: tuple[int, ...], cuts: ActivationSharding) -> Placement:
    return Placement(tensor, shape, cuts.of(len(shape)), sequence_dim=1 if len(shape) == len(cuts) else None)
