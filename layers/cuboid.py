"""Moving between what a rank stores and what a product needs: gather the pieces, reduce the partial results.

Each operand of a product is stored in pieces along one axis of the cuboid and gathered for the product; each result is
a partial sum over one axis, reduced to pieces. `Kept` is one such axis for one operand; `gather` and `reduce` are each
other's backward. (AxoNN, arXiv 2305.13525, first wrote 1D, 2D and 3D as one algorithm; 3D is Agarwal's of 1995.)
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from dslpar import comm
from dslpar.comm import Axis, Pending
from dslpar.groups import Groups


@dataclass(frozen=True)
class Kept:
    """How a tensor is kept over one axis."""

    axis: Axis
    dim: int | None
    """The dim that is in pieces; None: equal copies."""
    blocks: int = 1
    """`dim` is so many equal blocks, each in pieces."""

    def gather(self, stored: Tensor) -> Tensor:
        """Stored, to the whole panel."""
        if self.axis.size == 1 or self.dim is None:
            return stored
        if self.blocks == 1:
            return comm.all_gather(stored, self.axis, self.dim)
        dim = self.dim % stored.dim()
        panel = comm.all_gather(comm.in_blocks(stored, dim, self.blocks), self.axis, dim + 1)
        return panel.flatten(dim, dim + 1)

    def start_reduce(self, partial: Tensor) -> Pending:
        """A partial panel, a temporary of the caller's, to its sum as it is stored; begun, not waited for."""
        if self.axis.size == 1:
            return Pending(partial)
        if self.dim is None:
            return comm.start_all_reduce_(partial, self.axis)
        if self.blocks == 1:
            return comm.start_reduce_scatter(partial, self.axis, self.dim)
        dim = self.dim % partial.dim()
        pending = comm.start_reduce_scatter(comm.in_blocks(partial, dim, self.blocks), self.axis, dim + 1)
        return Pending(pending.result.flatten(dim, dim + 1), pending.work)

    def reduce(self, partial: Tensor) -> Tensor:
        """As `start_reduce`, waited for."""
        return self.start_reduce(partial).wait()


def residual_over_y(groups: Groups) -> Kept:
    """How the residual stream [batch, sequence, hidden] is kept over y."""
    dims = {"replicated": None, "batch": 0, "sequence": 1, "hidden": -1}
    return Kept(groups.axis("y"), dims[groups.tensor.residual])


def inner_over_z(groups: Groups, blocks: int = 1) -> Kept:
    """How inner activations [batch, sequence, blocks * features] are kept over z."""
    if groups.tensor.inner == "batch":
        return Kept(groups.axis("z"), 0)
    return Kept(groups.axis("z"), -1, blocks)


def weight_over_q(groups: Groups, blocks: int = 1) -> Kept:
    """How weights are kept over q: rows in pieces."""
    return Kept(groups.axis("q"), 0, blocks)
