"""The mesh against a brute-force reshape, and its two orders."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dslpar.core.mesh import LEGACY_ORDER, ORDERS, STANDARD_ORDER, TENSOR_AXES, Mesh, TensorMesh, expand

SIZES = st.integers(1, 3)
MESHES = st.builds(
    lambda pipe, data, d, q, y, z, order: Mesh(
        pipe=pipe, data=data, tensor=TensorMesh(d=d, q=q, y=y, z=z), order=order
    ),
    *[SIZES] * 6,
    st.sampled_from(ORDERS),
)
AXES = ("pipe", "data", "tensor", "x", "d", "q", "y", "z")
NAMES = st.lists(st.sampled_from(AXES), min_size=1, max_size=3, unique=True)


def table(mesh: Mesh) -> dict[int, dict[str, int]]:
    """Rank -> coordinates, by counting through the axes from slow to fast."""
    axes = [*mesh.order[:2], *TENSOR_AXES]
    sizes = [getattr(mesh, axis) if axis in ("pipe", "data") else getattr(mesh.tensor, axis) for axis in axes]
    return {
        rank: dict(zip(axes, coord, strict=True))
        for rank, coord in enumerate(product(*(range(size) for size in sizes)))
    }


@given(MESHES)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_coordinates(mesh: Mesh) -> None:
    expected = table(mesh)
    assert len(expected) == mesh.world_size
    for rank, coord in expected.items():
        assert mesh.coord(rank) == coord
        assert mesh.rank(coord) == rank


@given(MESHES, NAMES)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_groups_partition_the_world(mesh: Mesh, names: list[str]) -> None:
    coords = table(mesh)
    axes = set(expand(tuple(names)))
    groups = list(mesh.groups(*names))
    assert sorted(rank for group in groups for rank in group) == list(range(mesh.world_size))
    assert [group[0] for group in groups] == sorted(group[0] for group in groups)
    for group in groups:
        assert list(group) == sorted(group)
        assert len(group) == mesh.size(*names)
        fixed = [{axis: index for axis, index in coords[rank].items() if axis not in axes} for rank in group]
        assert all(one == fixed[0] for one in fixed)
        for position, rank in enumerate(group):
            assert mesh.peers(rank, *names) == group
            assert mesh.index(rank, *names) == position


def test_the_formula_of_the_design() -> None:
    mesh = Mesh(pipe=2, data=3, tensor=TensorMesh(y=4))
    for pipe, data, tensor in product(range(2), range(3), range(4)):
        assert mesh.rank({"pipe": pipe, "data": data, "y": tensor}) == (pipe * 3 + data) * 4 + tensor


def test_the_legacy_order() -> None:
    sizes = dict(pipe=2, data=2, tensor=TensorMesh(y=2))
    assert Mesh(**sizes, order=STANDARD_ORDER).peers(0, "pipe") == (0, 4)
    assert Mesh(**sizes, order=LEGACY_ORDER).peers(0, "pipe") == (0, 2)


def test_a_large_mesh_costs_nothing() -> None:
    mesh = Mesh(pipe=64, data=1024, tensor=TensorMesh(y=16))
    assert mesh.world_size == 2**20
    assert next(mesh.groups("tensor")) == tuple(range(16))
    assert mesh.peers(2**20 - 1, "pipe")[0] == 1024 * 16 - 1


def test_a_mesh_refuses_what_is_none() -> None:
    with pytest.raises(AssertionError):
        Mesh(pipe=0)
    with pytest.raises(AssertionError):
        Mesh(order=("tensor", "data", "pipe"))


def test_the_old_name_of_the_tensor_mesh_still_works() -> None:
    with pytest.warns(DeprecationWarning, match="Tensor is now called TensorMesh"):
        from dslpar.core.mesh import Tensor  # type: ignore[attr-defined]
    assert Tensor is TensorMesh
    with pytest.raises(ImportError, match="Tensors"):
        from dslpar.core.mesh import Tensors  # type: ignore[attr-defined]  # noqa: F401
