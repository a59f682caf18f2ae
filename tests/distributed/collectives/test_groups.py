"""Process groups: each matches the mesh, and sums over its ranks. Also tests `on_ranks` itself."""

from __future__ import annotations

import pytest
import torch

from dslpar.core.mesh import LEGACY_ORDER, Mesh, TensorMesh
from dslpar.distributed import collectives
from dslpar.distributed.collectives import Axis
from dslpar.distributed.groups import Groups, Mpu
from tests.support.ranks import on_ranks
from tests.support.sampling import sampled

NAMES = (
    ("d",),
    ("q",),
    ("y",),
    ("z",),
    ("x",),
    ("tensor",),
    ("data",),
    ("pipe",),
    ("model",),
    ("q", "y"),
    ("y", "q"),
    ("data", "d"),
    ("pipe", "data", "tensor"),
)
MESHES = (
    Mesh(pipe=2, data=2, tensor=TensorMesh(y=2)),
    Mesh(pipe=2, data=2, tensor=TensorMesh(y=2), order=LEGACY_ORDER),
    Mesh(data=2, tensor=TensorMesh(q=2, y=2)),
    Mesh(tensor=TensorMesh(d=2, q=2, y=2)),
    Mesh(data=3),
)


def sums(mesh: Mesh) -> list[tuple[collectives.Axis, float]]:
    """Return each axis without its group, and the sum over it of 2^rank, which identifies the participating ranks."""
    groups = Groups(mesh)
    found = []
    for names in NAMES:
        axis = groups.axis(*names)
        total = collectives.all_reduce(torch.tensor([2.0**groups.rank]), axis).item()
        assert torch.distributed.get_world_size(axis.group) == axis.size
        found.append((collectives.Axis(axis.size, axis.index, axis.peers), total))
    return found


def axes(mesh: Mesh) -> list[collectives.Axis]:
    """Return each axis without its group."""
    groups = Groups(mesh)
    return [collectives.Axis(*_of(groups.axis(*names))) for names in NAMES]


def _of(axis: collectives.Axis) -> tuple[int, int, tuple[int, ...]]:
    return axis.size, axis.index, axis.peers


@pytest.mark.parametrize("mesh", sampled(MESHES[1:3], MESHES[2:3], named=str))
def test_a_picture_is_the_groups_without_processes(mesh: Mesh) -> None:
    for rank, real in enumerate(on_ranks(mesh.world_size, axes, mesh)):
        picture = Groups.without_processes(mesh, rank)
        assert [picture.axis(*names) for names in NAMES] == real
        assert (picture.mesh, picture.rank, picture.coord) == (mesh, rank, mesh.coord(rank))


def test_through_a_picture_nobody_talks() -> None:
    with pytest.raises(ValueError, match="process group"):
        collectives.all_reduce(torch.ones(1), Groups.without_processes(MESHES[0]).axis("data"))


@pytest.mark.parametrize("mesh", sampled(MESHES, MESHES[1:3], named=str))
def test_groups_are_the_meshs(mesh: Mesh) -> None:
    for rank, found in enumerate(on_ranks(mesh.world_size, sums, mesh)):
        for names, (axis, total) in zip(NAMES, found, strict=True):
            letters = ("pipe", "tensor") if names == ("model",) else names
            peers = mesh.peers(rank, *letters)
            assert axis == collectives.Axis(len(peers), peers.index(rank), peers)
            assert total == sum(2.0**peer for peer in peers)


def mpu_answers(mesh: Mesh) -> dict[str, object]:
    mpu = Mpu(Groups(mesh))
    getters = [name for name in dir(mpu) if name.startswith("get_")]
    answers = {name: getattr(mpu, name)() for name in getters}
    return {
        name: torch.distributed.get_process_group_ranks(answer) if name.endswith("_group") else answer
        for name, answer in answers.items()
    }


def test_mpu() -> None:
    answers = on_ranks(4, mpu_answers, Mesh(data=2, tensor=TensorMesh(y=2)))[3]
    assert answers == {
        "get_sequence_parallel_group": [3],
        "get_sequence_parallel_rank": 0,
        "get_sequence_parallel_world_size": 1,
        "get_sequence_data_parallel_group": [1, 3],
        "get_sequence_data_parallel_rank": 1,
        "get_sequence_data_parallel_world_size": 2,
        "get_model_parallel_group": [2, 3],
        "get_model_parallel_rank": 1,
        "get_model_parallel_world_size": 2,
        "get_tensor_model_parallel_group": [2, 3],
        "get_tensor_model_parallel_rank": 1,
        "get_tensor_model_parallel_world_size": 2,
        "get_data_parallel_group": [1, 3],
        "get_data_parallel_group_ranks": [1, 3],
        "get_data_parallel_rank": 1,
        "get_data_parallel_world_size": 2,
    }


def test_mpu_where_zero_shards_over_d() -> None:
    """DeepSpeed's sequence parallel ranks are those of d, which do not step copies of the weights together."""
    answers = on_ranks(8, mpu_answers, Mesh(data=2, tensor=TensorMesh(d=2, y=2, zero_over_d=True)))[6]
    assert answers == {
        "get_sequence_parallel_group": [4, 6],
        "get_sequence_parallel_rank": 1,
        "get_sequence_parallel_world_size": 2,
        "get_sequence_data_parallel_group": [0, 2, 4, 6],
        "get_sequence_data_parallel_rank": 3,
        "get_sequence_data_parallel_world_size": 4,
        "get_model_parallel_group": [6, 7],
        "get_model_parallel_rank": 0,
        "get_model_parallel_world_size": 2,
        "get_tensor_model_parallel_group": [6, 7],
        "get_tensor_model_parallel_rank": 0,
        "get_tensor_model_parallel_world_size": 2,
        "get_data_parallel_group": [2, 6],
        "get_data_parallel_group_ranks": [2, 6],
        "get_data_parallel_rank": 1,
        "get_data_parallel_world_size": 2,
    }


def test_one_process_needs_no_process_group() -> None:
    groups = Groups(Mesh())
    assert groups.rank == 0
    assert {groups.axis(*names) for names in NAMES} == {collectives.Axis()}


def test_a_mesh_of_another_size_is_refused() -> None:
    with pytest.raises(AssertionError, match="a mesh of 2 ranks in a world of 1"):
        Groups(Mesh(data=2))


def _apart() -> list[float]:
    """Ranks 0 and 2 are in one more group than rank 1, like ranks with a tied weight."""
    first = Groups(Mesh(pipe=3))
    first.subgroup("pipe", [0, 2])
    every = [first.second("pipe", "again"), first.second("pipe", "and again"), Groups(Mesh(pipe=3)).axis("pipe")]
    pair = first.subgroup("pipe", [0, 1])
    sums = [float(collectives.all_reduce(torch.ones(()), axis)) for axis in every]
    if pair is not None:
        sums.append(float(collectives.all_reduce(torch.ones(()), Axis(2, first.rank, (0, 1), pair))))
    return sums


def test_ranks_find_each_other_though_they_are_in_different_numbers_of_groups() -> None:
    """torch 2.13 names a group by the process's number of groups: such ranks would wait forever."""
    assert on_ranks(3, _apart) == [[3.0, 3.0, 3.0, 2.0], [3.0, 3.0, 3.0, 2.0], [3.0, 3.0, 3.0]]
