"""Placements: cut and merge undo each other, copies count once, padding is stripped; no ranks needed."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from dslpar.layers import placement
from dslpar.layers.placement import Placement
from dslpar.mesh import Mesh, Tensor
from tests.layouts import LAYOUTS

TABLES: dict[str, Callable[[Tensor], Placement]] = {
    "inward": lambda tensor: placement.inward_weight(tensor, 48, 24),
    "qkv": lambda tensor: placement.inward_weight(tensor, 24, 24, blocks=3),
    "outward": lambda tensor: placement.outward_weight(tensor, 24, 48),
    "table": lambda tensor: placement.table(tensor, 17, 24),
    "inner vector": lambda tensor: placement.inner_vector(tensor, 24, blocks=3),
    "residual vector": lambda tensor: placement.residual_vector(tensor, 24),
    "positions": lambda tensor: placement.position_table(tensor, 5, 24),
    "residual": lambda tensor: placement.residual(tensor, 12, 12, 24),
    "inner": lambda tensor: placement.inner(tensor, 12, 12, 24),
}
CASES = list(itertools.product(LAYOUTS, TABLES))


def coords(tensor: Tensor) -> list[dict[str, int]]:
    mesh = Mesh(tensor=tensor)
    return [mesh.coord(rank) for rank in range(mesh.world_size)]


@pytest.mark.parametrize(("layout", "name"), CASES)
def test_merge_undoes_cut(layout: str, name: str) -> None:
    tensor = LAYOUTS[layout]
    at = TABLES[name](tensor)
    full = torch.randn(at.shape)
    pieces = [at.cut(full, coord) for coord in coords(tensor)]
    assert {tuple(piece.shape) for piece in pieces} == {at.local_shape}
    assert torch.equal(at.merge(pieces), full)


@pytest.mark.parametrize(("layout", "name"), CASES)
def test_owners_hold_every_element_once(layout: str, name: str) -> None:
    tensor = LAYOUTS[layout]
    at = TABLES[name](tensor)
    full = torch.randn(at.shape, dtype=torch.float64)
    owned = sum(at.cut(full, coord).square().sum() for coord in coords(tensor) if at.owner(coord))
    torch.testing.assert_close(owned, full.square().sum())  # default: 1e-7, the order of a sum of some hundred terms


def test_qkv_is_cut_within_each_of_q_k_v() -> None:
    at = placement.inward_weight(Tensor(y=2), 4, 1, blocks=3)
    second = at.cut(torch.arange(12).view(12, 1), {"d": 0, "q": 0, "y": 1, "z": 0})
    assert second.flatten().tolist() == [2, 3, 6, 7, 10, 11]


def test_two_cuts_of_one_dim_go_slowest_first() -> None:
    tensor = Tensor(y=2, z=2, residual="hidden")
    at = placement.residual_vector(tensor, 4)
    held = [at.cut(torch.arange(4), coord).item() for coord in coords(tensor)]  # ranks by (y, z)
    assert held == [0, 2, 1, 3], "z cuts before y"


@pytest.mark.parametrize(
    ("tensor", "padded"),
    [
        (Tensor(), 17),
        (Tensor(y=2), 18),
        (Tensor(q=2, y=3, z=2), 18),
        (Tensor(q=2, y=2, z=3, inner="heads"), 24),
        (Tensor(q=2, y=2, z=3, inner="batch"), 20),
    ],
)
def test_vocabulary_is_padded_to_what_cuts_it(tensor: Tensor, padded: int) -> None:
    assert placement.padded_vocab(tensor, 17) == padded


def test_padding_is_zero_rows_that_never_come_back() -> None:
    at = placement.table(Tensor(y=2), 3, 2)
    last = at.cut(torch.ones(3, 2), {"d": 0, "q": 0, "y": 1, "z": 0})
    assert last.tolist() == [[1, 1], [0, 0]]


def test_layers_is_imported_under_one_name() -> None:
    source = Path(__file__).parents[2] / "layers" / "__init__.py"
    spec = importlib.util.spec_from_file_location("layers", source)
    assert spec is not None
    assert spec.loader is not None
    with pytest.raises(ImportError, match=r"import this package as dslpar\.layers"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
