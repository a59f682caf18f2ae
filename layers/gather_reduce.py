"""Gather the stored operands of a product, and reduce its partial results, over one axis of the cuboid.

Each operand of a product is stored in pieces along one axis and gathered for the product to a panel; each result is a
partial sum over one axis, reduced to pieces. A `Sharding` says how one operand is stored over that axis; its `gather`
and `reduce` are each other's backward. (AxoNN, arXiv 2305.13525, first wrote 1D, 2D and 3D as one algorithm; 3D is
Agarwal's of 1995.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from dslpar.distributed import collectives
from dslpar.distributed.collectives import Axis, Pending
from dslpar.distributed.groups import Groups
from dslpar.layers.placement import Letters


@dataclass(frozen=True)
class Sharding:
    """How a tensor is stored over one axis: in pieces along a dim, or as equal copies."""

    axis: Axis
    dim: int | None
    """The dim that is in pieces; None: equal copies."""
    blocks: tuple[int, ...] = ()
    """`dim` is blocks (q, k, v), with lengths in these proportions, each cut by itself; (): it is one block."""

    def gather(self, stored: Tensor, *, contiguous: bool = True) -> Tensor:
        """Gather the stored piece [..., n/size, ...] to the panel [..., n, ...].

        Not `contiguous`, the panel stands in memory as pieces arrive: tokens of a sequence by sequence first.
        """
        return self._gather(stored, partial(collectives.all_gather, contiguous=contiguous))

    def join(self, stored: Tensor) -> Tensor:
        """Gather, differentiable, where all ranks go on alike with the panel: the backward takes this rank's piece."""
        return self._gather(stored, collectives.gather_from_group)

    def start_gather(self, stored: Tensor, *, contiguous: bool = True) -> Pending:
        """Begin to `gather`."""
        if self.axis.size == 1 or self.dim is None:
            return Pending(stored)
        if not self.blocks:
            return collectives.start_all_gather(stored, self.axis, self.dim, contiguous=contiguous)
        pieces = collectives.start_all_gather(stored.unsqueeze(0), self.axis)
        return Pending(stored, finish=lambda _: self.join_pieces(pieces.wait()))

    def _gather(self, stored: Tensor, gather: Callable[[Tensor, Axis, int], Tensor]) -> Tensor:
        if self.axis.size == 1 or self.dim is None:
            return stored
        if not self.blocks:
            return gather(stored, self.axis, self.dim)
        return self.join_pieces(gather(stored.unsqueeze(0), self.axis, 0))

    def join_pieces(self, pieces: Tensor) -> Tensor:
        """Join ranks' pieces [size, ..., n/size, ...], each of which has its part of every block, to the panel."""
        assert self.dim is not None
        dim = self.dim % (pieces.dim() - 1)
        blocks = self._split(pieces, dim + 1)
        return torch.cat([piece for block in blocks for piece in block.unbind()], dim)

    def start_reduce(self, partial: Tensor) -> Pending:
        """Begin to sum partial panels [..., n, ...] to stored pieces [..., n/size, ...]; may write into `partial`."""
        if self.axis.size == 1:
            return Pending(partial)
        if self.dim is None:
            # In place: a partial panel is a product's own result, which nobody else holds.
            return collectives.start_all_reduce_(partial, self.axis)
        if not self.blocks:
            return collectives.start_reduce_scatter(partial, self.axis, self.dim)
        dim = self.dim % partial.dim()
        blocks = [torch.unflatten(block, dim, (self.axis.size, -1)) for block in self._split(partial, dim)]
        pieces = torch.cat([block.movedim(dim, 0) for block in blocks], dim + 1)
        return collectives.start_reduce_scatter(pieces.flatten(0, 1), self.axis)

    def reduce(self, partial: Tensor) -> Tensor:
        """Sum partial panels to stored pieces, and wait for the result."""
        return self.start_reduce(partial).wait()

    def features_of(self, rank: int, weight: Tensor, dim: int) -> Tensor:
        """Return what a weight has along `dim` of the features that the axis's `rank`-th rank stores."""
        parts = [block.chunk(self.axis.size, dim)[rank] for block in self._split(weight, dim)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim)

    def _split(self, x: Tensor, dim: int) -> tuple[Tensor, ...]:
        """Split `x`, or a piece of it, into its blocks, as views."""
        blocks = self.blocks or (1,)
        length, total = x.shape[dim], sum(blocks)
        return torch.split(x, [length * block // total for block in blocks], dim)


def residual_over_y(groups: Groups) -> Sharding:
    """Return how the residual stream [batch, sequence, hidden], or [tokens, hidden], is stored over y."""
    dims = {"replicated": None, "batch": 0, "sequence": -2, "hidden": -1}
    return Sharding(groups.axis("y"), dims[groups.tensor.residual])


def inner_over_z(groups: Groups, blocks: tuple[int, ...] = ()) -> Sharding:
    """Return how inner activations [batch, sequence, features], or [tokens, features], are stored over z."""
    if groups.tensor.inner == "batch":
        return Sharding(groups.axis("z"), 0)
    return Sharding(groups.axis("z"), -1, blocks)


def features_over(groups: Groups, letters: Letters, blocks: tuple[int, ...] = ()) -> tuple[Sharding, ...]:
    """Return how features cut by `letters`, slowest first, are stored over each: fastest first, as to gather."""
    return tuple(Sharding(groups.axis(letter), -1, blocks) for letter in reversed(letters))


def weight_over_q(groups: Groups, blocks: tuple[int, ...] = ()) -> Sharding:
    """Return how weights are stored over q: their rows in pieces."""
    return Sharding(groups.axis("q"), 0, blocks)
