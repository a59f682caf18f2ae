"""Moving between what a rank stores and what a product needs: gather the pieces, reduce the partial results.

Each operand of a product is stored in pieces along one axis of the cuboid and gathered for the product; each result is
a partial sum over one axis, reduced to pieces. `Kept` is one such axis for one operand; `gather` and `reduce` are each
other's backward. (AxoNN, arXiv 2305.13525, first wrote 1D, 2D and 3D as one algorithm; 3D is Agarwal's of 1995.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dslpar.distributed import collectives
from dslpar.distributed.collectives import Axis, Pending
from dslpar.distributed.groups import Groups
from dslpar.layers.placement import Letters


@dataclass(frozen=True)
class Kept:
    """How a tensor is kept over one axis."""

    axis: Axis
    dim: int | None
    """The dim that is in pieces; None: equal copies."""
    blocks: tuple[int, ...] = ()
    """`dim` is blocks (q, k, v), their lengths in these proportions, each in pieces by itself; (): it is one."""

    def gather(self, stored: Tensor) -> Tensor:
        """Stored, to the whole panel."""
        return self._gather(stored, collectives.all_gather)

    def join(self, stored: Tensor) -> Tensor:
        """As `gather`, differentiable, where all ranks go on with the same panel: backward takes this rank's pieces."""
        return self._gather(stored, collectives.gather_from_group)

    def _gather(self, stored: Tensor, gather: Callable[[Tensor, Axis, int], Tensor]) -> Tensor:
        if self.axis.size == 1 or self.dim is None:
            return stored
        if not self.blocks:
            return gather(stored, self.axis, self.dim)
        dim = self.dim % stored.dim()
        blocks = self._split(gather(stored.unsqueeze(0), self.axis, 0), dim + 1)
        return torch.cat([piece for block in blocks for piece in block.unbind()], dim)

    def start_reduce(self, partial: Tensor) -> Pending:
        """A partial panel, a temporary of the caller's, to its sum as it is stored; begun, not waited for."""
        if self.axis.size == 1:
            return Pending(partial)
        if self.dim is None:
            return collectives.start_all_reduce_(partial, self.axis)
        if not self.blocks:
            return collectives.start_reduce_scatter(partial, self.axis, self.dim)
        dim = self.dim % partial.dim()
        blocks = [torch.unflatten(block, dim, (self.axis.size, -1)) for block in self._split(partial, dim)]
        pieces = torch.cat([block.movedim(dim, 0) for block in blocks], dim + 1)
        return collectives.start_reduce_scatter(pieces.flatten(0, 1), self.axis)

    def reduce(self, partial: Tensor) -> Tensor:
        """As `start_reduce`, waited for."""
        return self.start_reduce(partial).wait()

    def _split(self, x: Tensor, dim: int) -> tuple[Tensor, ...]:
        """The blocks of `x`, or of a piece of it, as views."""
        length, total = x.shape[dim], sum(self.blocks)
        return torch.split(x, [length * block // total for block in self.blocks], dim)


def residual_over_y(groups: Groups) -> Kept:
    """How the residual stream [batch, sequence, hidden], or [tokens, hidden], is kept over y."""
    dims = {"replicated": None, "batch": 0, "sequence": -2, "hidden": -1}
    return Kept(groups.axis("y"), dims[groups.tensor.residual])


def inner_over_z(groups: Groups, blocks: tuple[int, ...] = ()) -> Kept:
    """How inner activations [batch, sequence, features], or [tokens, features], are kept over z."""
    if groups.tensor.inner == "batch":
        return Kept(groups.axis("z"), 0)
    return Kept(groups.axis("z"), -1, blocks)


def features_of(groups: Groups, letters: Letters, blocks: tuple[int, ...] = ()) -> tuple[Kept, ...]:
    """How features that `letters` cut, slowest first, are kept; in the order in which to gather them: fastest first."""
    return tuple(Kept(groups.axis(letter), -1, blocks) for letter in reversed(letters))


def weight_over_q(groups: Groups, blocks: tuple[int, ...] = ()) -> Kept:
    """How weights are kept over q: rows in pieces."""
    return Kept(groups.axis("q"), 0, blocks)
