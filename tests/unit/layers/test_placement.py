"""Placements: partition and merge are inverse, copies count once, padding is stripped; no ranks needed."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Callable

import pytest
import torch

from dslpar.core.mesh import Mesh, TensorMesh
from dslpar.layers import placement
from dslpar.layers.placement import Placement
from dslpar.layout import divisors
from tests.support.layouts import LAYOUTS
from tests.support.paths import ROOT

TABLES: dict[str, Callable[[TensorMesh], Placement]] = {
    "inward": lambda tensor: placement.inward_weight(tensor, 48, 24),
    "qkv": lambda tensor: placement.inward_weight(tensor, (24, 24, 24), 24),
    "grouped qkv": lambda tensor: placement.inward_weight(tensor, (48, 24, 24), 24),
    "outward": lambda tensor: placement.outward_weight(tensor, 24, 48),
    "table": lambda tensor: placement.table(tensor, 17, 24),
    "inner vector": lambda tensor: placement.inner_vector(tensor, (24, 24, 24)),
    "grouped inner vector": lambda tensor: placement.inner_vector(tensor, (48, 24, 24)),
    "residual vector": lambda tensor: placement.residual_vector(tensor, 24),
    "positions": lambda tensor: placement.position_table(tensor, 5, 24),
    "residual": lambda tensor: placement.residual(tensor, 12, 12, 24),
    "inner": lambda tensor: placement.inner(tensor, 12, 12, 24),
    "residual of [tokens, hidden]": lambda tensor: placement.residual(tensor, 144, 24),
    "inner of [tokens, features]": lambda tensor: placement.inner(tensor, 144, 24),
}
CASES = list(itertools.product(LAYOUTS, TABLES))


def coords(tensor: TensorMesh) -> list[dict[str, int]]:
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
    at = placement.inward_weight(TensorMesh(y=2), (4, 4, 4), 1)
    second = at.cut(torch.arange(12).view(12, 1), {"d": 0, "q": 0, "y": 1, "z": 0})
    assert second.flatten().tolist() == [2, 3, 6, 7, 10, 11]


def test_blocks_of_unequal_length_are_each_cut_by_themselves() -> None:
    at = placement.inward_weight(TensorMesh(q=2, y=2, mode="2d"), (8, 4), 1)
    third = at.cut(torch.arange(12).view(12, 1), {"d": 0, "q": 0, "y": 1, "z": 0})
    assert third.flatten().tolist() == [4, 5, 10], "a quarter of each: y's second half, q's first half of it"


def test_equal_blocks_are_cut_as_the_middle_dim_of_three() -> None:
    """As in older checkpoints, (3 * F, H) is sharded as (3, F, H) on dim 1."""
    tensor = LAYOUTS["cuboid-2-3-2"]
    blocks, plain = (placement.inward_weight(tensor, out_features, 24) for out_features in ((24, 24, 24), 24))
    full = torch.randn(3, 24, 24)
    for coord in coords(tensor):
        pieces = [plain.cut(block, coord) for block in full]
        assert torch.equal(blocks.cut(full.flatten(0, 1), coord), torch.cat(pieces))


def test_a_block_that_does_not_divide_is_refused() -> None:
    with pytest.raises(AssertionError, match="does not divide"):
        _ = placement.inward_weight(TensorMesh(y=4), (6, 2), 1).local_shape


def test_two_cuts_of_one_dim_go_slowest_first() -> None:
    tensor = TensorMesh(y=2, z=2, residual="hidden")
    at = placement.residual_vector(tensor, 4)
    held = [at.cut(torch.arange(4), coord).item() for coord in coords(tensor)]  # ranks by (y, z)
    assert held == [0, 2, 1, 3], "z cuts before y"


def test_one_dim_of_tokens_takes_all_their_cuts() -> None:
    tensor = TensorMesh(d=2, y=2, mode="1d", residual="sequence")  # d shards the batch, y the sequence
    assert placement.residual(tensor, 8, 4, 2).cuts == (("d", "q"), ("y",), ("z",))
    assert placement.residual(tensor, 32, 2).cuts == (("d", "q", "y"), ("z",))


@pytest.mark.parametrize(
    ("tensor", "padded"),
    [
        (TensorMesh(), 17),
        (TensorMesh(y=2), 18),
        (TensorMesh(q=2, y=3, z=2), 18),
        (TensorMesh(q=2, y=2, z=3, inner="heads"), 24),
        (TensorMesh(q=2, y=2, z=3, inner="batch"), 20),
    ],
)
def test_vocabulary_is_padded_to_what_cuts_it(tensor: TensorMesh, padded: int) -> None:
    assert divisors.vocabulary(17, tensor).value == padded


def test_padding_is_zero_rows_that_never_come_back() -> None:
    at = placement.table(TensorMesh(y=2), 3, 2)
    last = at.cut(torch.ones(3, 2), {"d": 0, "q": 0, "y": 1, "z": 0})
    assert last.tolist() == [[1, 1], [0, 0]]


def test_layers_is_imported_under_one_name() -> None:
    source = ROOT / "layers" / "__init__.py"
    spec = importlib.util.spec_from_file_location("layers", source)
    assert spec is not None
    assert spec.loader is not None
    with pytest.raises(ImportError, match=r"import this package as dslpar\.layers"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
