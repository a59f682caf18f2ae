"""Merge the pieces of all ranks, each a rank's shard of a tensor, by their placements, and compare copies.

pieces = Pieces(mesh, [each.gradients for each in ranks])
pieces.whole("blocks.0.mlp.up.weight")     # the full tensor, of the first replica
pieces.unequal_copies()                    # [(name, how far, ranks), ...]
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dslpar.core.mesh import TENSOR_AXES, Mesh
from dslpar.layers.placement import Placement
from dslpar.parity.layout_ranks import Held

Change = Callable[[Mapping[int, Tensor]], Mapping[int, Tensor]]
"""Returns changed pieces, by rank, to merge in place of the given ones."""


class UnequalCopies(NamedTuple):
    """Copies of a parameter's piece that differ."""

    name: str
    off: float
    """Largest difference, relative to the largest element."""
    ranks: tuple[int, int]
    """The two ranks whose copies are compared."""
    tied: bool
    """True if the copies are on two stages, which sum in different orders."""


class Pieces:
    """Each rank's piece of each parameter."""

    def __init__(self, mesh: Mesh, by_rank: Sequence[Mapping[str, Held]]) -> None:
        self.mesh, self.by_rank = mesh, by_rank
        self.names = list(dict.fromkeys(name for held in by_rank for name in held))

    def holders(self, name: str) -> list[int]:
        """Return the ranks that hold a piece of a parameter: of one stage, or of all stages that tie the weight."""
        return [rank for rank, held in enumerate(self.by_rank) if name in held]

    def lacking(self, name: str) -> list[int]:
        """Return the ranks that lack a piece: if one rank of a stage holds a piece, all must."""
        holders = self.holders(name)
        stages = {self.mesh.coord(rank)["pipe"] for rank in holders}
        return [
            rank
            for rank in range(self.mesh.world_size)
            if self.mesh.coord(rank)["pipe"] in stages and rank not in holders
        ]

    def placement(self, name: str) -> Placement | None:
        """Return the placement of a parameter's pieces."""
        return self.by_rank[self.holders(name)[0]][name].placement

    def pieces(self, name: str) -> dict[int, Tensor]:
        """Return a parameter's pieces by rank."""
        return {rank: self.by_rank[rank][name].piece for rank in self.holders(name)}

    def whole(self, name: str, pieces: Mapping[int, Tensor] | None = None) -> Tensor:
        """Merge the pieces of the first replica and stage; `pieces` replaces the stored ones."""
        pieces = self.pieces(name) if pieces is None else pieces
        placement = self.placement(name)
        first = min(pieces)
        if placement is None:
            return pieces[first]
        return placement.merge([pieces[rank] for rank in self.mesh.peers(first, placement.holders)])

    def unequal_copies(self) -> Iterator[UnequalCopies]:
        """Yield the parameters whose copies differ, each with the worst pair of ranks."""
        for name in self.names:
            placement, pieces = self.placement(name), self.pieces(name)
            firsts: dict[tuple[int, ...], int] = {}
            worst: UnequalCopies | None = None
            for rank, piece in pieces.items():
                at = place_of(self.mesh, rank, placement)
                first = firsts.setdefault(at, rank)
                other = pieces[first]
                found = unequal(name, self.mesh, (first, rank), other, piece)
                if found is not None and (worst is None or not found.off <= worst.off):
                    worst = found
            if worst is not None:
                yield worst


def place_of(mesh: Mesh, rank: int, placement: Placement | None) -> tuple[int, ...]:
    """Return a rank's coordinates on the axes that shard a tensor; they identify the rank's piece."""
    copied = {"data", "pipe", *(TENSOR_AXES if placement is None else placement.replicas)}
    at = tuple(index for axis, index in mesh.coord(rank).items() if axis not in copied)
    return (mesh.index(rank, "e"), *at) if placement is not None and placement.is_expert else at


def unequal(name: str, mesh: Mesh, ranks: tuple[int, int], one: Tensor, other: Tensor) -> UnequalCopies | None:
    """Return the deviation between two ranks' copies of a piece; None: they are bit-identical."""
    if torch.equal(one, other):
        return None
    off = float((one - other).abs().max()) / max(float(one.abs().max()), 1e-30)
    first, second = (mesh.coord(rank)["pipe"] for rank in ranks)
    return UnequalCopies(name, off, ranks, first != second)
