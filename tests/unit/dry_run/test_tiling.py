"""Shards tile a parameter exactly once; gaps and overlaps are found, by closed form and by brute force."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch

from dslpar.core.mesh import Mesh, TensorMesh
from dslpar.dry_run.tiling import tiling_errors
from dslpar.layers import placement
from dslpar.layers.placement import Placement
from tests.support.layouts import CUBOIDS, LAYOUTS


def _placements(tensor: TensorMesh) -> list[Placement]:
    return [
        placement.inward_weight(tensor, (24, 24, 24), 24),
        placement.outward_weight(tensor, 24, 24),
        placement.table(tensor, 29, 24),
        placement.inner_vector(tensor, (24, 24)),
        placement.logit_vector(tensor, 29),
        placement.residual_vector(tensor, 24),
        placement.position_table(tensor, 24, 24),
    ]


@pytest.mark.parametrize("tensor", (LAYOUTS | CUBOIDS).values(), ids=LAYOUTS | CUBOIDS)
def test_every_parameter_of_every_layout_is_tiled(tensor: TensorMesh) -> None:
    for each in _placements(tensor):
        if not each._uneven():
            assert tiling_errors(each) == []


@pytest.mark.parametrize("tensor", LAYOUTS.values(), ids=LAYOUTS)
def test_errors_are_those_of_all_elements(tensor: TensorMesh) -> None:
    """Partitions over any axes, right or wrong, get the same verdict as a count of all elements."""
    cuts = (("y", "q"), ("z",)), (("z",), ("z",)), (("d", "q"), ("y", "y")), (("y", "y"), ()), ((), ("q", "d"))
    seen = set()
    for each in cuts:
        at = Placement(tensor, (2 * 36, 36 * 36), each)
        assert bool(tiling_errors(at)) == (not _tiles(at)), each
        seen.add(_tiles(at))
    assert True in seen


def _tiles(at: Placement) -> bool:
    """Return whether each element is on equally many ranks, with one owner."""
    mesh, elements = Mesh(tensor=at.tensor), torch.arange(72 * 36 * 36).view(at.shape)
    try:
        pieces = [(mesh.coord(rank), at.cut(elements, mesh.coord(rank)).flatten()) for rank in range(mesh.world_size)]
    except AssertionError:  # it does not divide
        return False
    on_ranks = torch.bincount(torch.cat([piece for _, piece in pieces]), minlength=elements.numel())
    owned = torch.bincount(torch.cat([p for c, p in pieces if at.owner(c)]), minlength=elements.numel())
    return bool((on_ranks == on_ranks[0]).all() and (owned == 1).all())


TWO = TensorMesh(q=2, y=2, mode="2d", residual="hidden")


@pytest.mark.parametrize(
    ("cuts", "message"),
    [
        ((("y", "y"), ("z",)), "dim 0, sharded over y y: 4 of 8 indices are on no rank, such as 2"),
        ((("y",), ("y",)), "2 of 4 shards are on no rank: two dims are sharded over one axis"),
        ((("y", "data"), ()), "sharded over data, which is not an axis of the cuboid"),
        ((("y",),), "1 cuts of 2 dims"),
        ((("y", "q", "q"), ()), "dim 0, sharded over y q q: 4 of 8 indices are on no rank, such as 1"),
    ],
)
def test_messages(cuts: tuple[tuple[str, ...], ...], message: str) -> None:
    assert tiling_errors(Placement(TWO, (8, 4), cuts)) == [message]


def test_a_cut_that_gives_all_ranks_one_piece_is_found() -> None:
    with patch.object(placement, "piece", lambda tensor, coord, letters: (0, 2 ** len(letters))):
        (error,) = tiling_errors(Placement(TWO, (8, 4), (("y",), ())))
    assert error == "dim 0, sharded over y: 4 of 8 indices are on no rank, such as 4"


def test_pieces_that_overlap_are_found() -> None:
    def overlapping(
        full: torch.Tensor, dim: int, tensor: TensorMesh, coord: dict[str, int], letters: object
    ) -> torch.Tensor:
        return full[:5] if letters and coord["y"] == 0 else full[4:] if letters else full

    with patch.object(placement, "take", overlapping):
        (error,) = tiling_errors(Placement(TWO, (8,), (("y",),)))
    assert error == "dim 0, sharded over y: 1 of 8 indices are in two shards, such as 4"


def test_two_owners_are_found() -> None:
    with patch.object(Placement, "owner", lambda self, coord: coord["y"] == 0):
        (error,) = tiling_errors(Placement(TWO, (8,), (("y",),)))
    assert error.startswith("2 of 2 shards have no owner, or several")


def test_a_length_that_does_not_divide_is_found() -> None:
    assert tiling_errors(replace(placement.outward_weight(TWO, 24, 24), shape=(24, 25)))
