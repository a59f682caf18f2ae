"""Gather the stored operands of a product, and reduce its partial results, over one axis of the cuboid.

Each operand of a product is stored in pieces along one axis of the cuboid (docs/architecture.md), and gathered to a
panel for the product. Each result is a partial sum over one axis, and is reduced to pieces. A `Sharding` describes how
one tensor is stored over one axis. Its `gather` and `reduce` are each other's backward. (AxoNN, arXiv 2305.13525, first
wrote 1D, 2D and 3D as one algorithm. The 3D algorithm is Agarwal's of 1995.)
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
    """Storage of a tensor over one axis: pieces along a dim, or equal copies."""

    axis: Axis
    dim: int | None
    """The dim that is cut into pieces; None: equal copies."""
    blocks: tuple[int, ...] = ()
    """Proportions of the blocks of `dim` (q, k, v), each of which is cut over all ranks; (): one block."""

    def gather(self, stored: Tensor, *, contiguous: bool = True) -> Tensor:
        """Gather the stored piece [..., n/size, ...] to the panel [..., n, ...].

        Without `contiguous` the panel keeps the memory order in which pieces arrive: sequence first for tokens.
        """
        return self._gather(stored, partial(collectives.all_gather, contiguous=contiguous))

    def join(self, stored: Tensor) -> Tensor:
        """Gather like `gather`, with a backward that takes this rank's piece of the gradient.

        All ranks must compute the same values from the panel.
        """
        return self._gather(stored, collectives.gather_from_group)

    def start_gather(self, stored: Tensor, *, contiguous: bool = True) -> Pending:
        """Start to gather; the `Pending`'s `wait` returns the panel."""
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
        """Join the ranks' pieces [size, ..., n/size, ...], each with its part of every block, to the panel."""
        assert self.dim is not None
        dim = self.dim % (pieces.dim() - 1)
        blocks = self._split(pieces, dim + 1)
        return torch.cat([piece for block in blocks for piece in block.unbind()], dim)

    def start_reduce(self, partial: Tensor) -> Pending:
        """Start to sum partial panels [..., n, ...] to stored pieces [..., n/size, ...]; may write into `partial`."""
        if self.axis.size == 1:
            return Pending(partial)
        if self.dim is None:
            # In place: the partial panel is a product's result, and nothing else refers to it.
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
        """Return the part of a weight along `dim` that belongs to the features of the axis' `rank`-th rank."""
        parts = [block.chunk(self.axis.size, dim)[rank] for block in self._split(weight, dim)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim)

    def _split(self, x: Tensor, dim: int) -> tuple[Tensor, ...]:
        """Split `x`, or a piece of it, into its blocks, as views."""
        blocks = self.blocks or (1,)
        length, total = x.shape[dim], sum(blocks)
        return torch.split(x, [length * block // total for block in blocks], dim)


def residual_over_y(groups: Groups) -> Sharding:
    """Return the sharding over y of the residual stream [batch, sequence, hidden] or [tokens, hidden]."""
    dims = {"replicated": None, "batch": 0, "sequence": -2, "hidden": -1}
    return Sharding(groups.axis("y"), dims[groups.tensor.residual])


def inner_over_z(groups: Groups, blocks: tuple[int, ...] = ()) -> Sharding:
    """Return the sharding over z of inner activations [batch, sequence, features] or [tokens, features]."""
    if groups.tensor.inner == "batch":
        return Sharding(groups.axis("z"), 0)
    return Sharding(groups.axis("z"), -1, blocks)


def features_over(groups: Groups, letters: Letters, blocks: tuple[int, ...] = ()) -> tuple[Sharding, ...]:
    """Return one sharding per axis for features that are cut over `letters`, which name the slowest axis first.

    The result has the fastest axis first, in the order in which the features must be gathered.
    """
    return tuple(Sharding(groups.axis(letter), -1, blocks) for letter in reversed(letters))


def weight_over_q(groups: Groups, blocks: tuple[int, ...] = ()) -> Sharding:
    """Return the sharding of weights over q, which cuts their rows."""
    return Sharding(groups.axis("q"), 0, blocks)
