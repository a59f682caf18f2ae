"""ColossalAI's names for a rank's place in the pipeline, and what each stage holds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import dslpar
from dslpar.core.mesh import LEGACY_ORDER, Mesh, TensorMesh
from dslpar.distributed import collectives
from dslpar.distributed.collectives import Axis
from dslpar.distributed.groups import Groups
from dslpar.distributed.stage_manager import PipelineStageManager
from dslpar.engine.stage_layers import held_layers, shared_params
from dslpar.layout.chunks import Chunks
from dslpar.layout.stages import distribute_layers
from dslpar.models import GPT
from dslpar.models.sequential import Sequential
from tests.support.plain_models import PIPE, mlp, sgd, written
from tests.support.ranks import on_ranks

# ---- the view of the mesh ----

MESHES = [
    Mesh(pipe=4, data=2, tensor=TensorMesh(y=2, mode="1d")),
    Mesh(pipe=3, data=2, order=LEGACY_ORDER),
    Mesh(data=2),
]


@pytest.mark.parametrize("mesh", MESHES, ids=["4 stages", "legacy order", "no pipeline"])
def test_ranks_of_a_pipeline_are_a_ring(mesh: Mesh) -> None:
    for rank in range(mesh.world_size):
        manager = PipelineStageManager(Groups.without_processes(mesh, rank))
        assert (manager.get_rank(), manager.num_stages) == (rank, mesh.pipe)
        assert manager.stage == mesh.coord(rank)["pipe"]
        assert manager.is_first_stage() == (manager.stage == 0)
        assert manager.is_last_stage() == (manager.stage == mesh.pipe - 1)
        for neighbour, step in ((manager.get_next_rank(), 1), (manager.get_prev_rank(), -1)):
            moved = mesh.coord(rank) | {"pipe": (manager.stage + step) % mesh.pipe}
            assert mesh.coord(neighbour) == moved, "on the same replica, and the same piece of it"


def _group_of_ends() -> Any:
    manager = PipelineStageManager(Groups(Mesh(pipe=3, data=2)))
    group = manager.init_process_group_by_stages([0, 2])
    everyone = manager.init_process_group_by_stages([0, 1, 2])
    assert everyone is manager.get_p2p_process_group()
    for wrong in ([0, 0], [3], []):
        with pytest.raises(ValueError, match="of axis 'pipe', which counts from 0 to 2"):
            manager.init_process_group_by_stages(wrong)
    if group is None:
        return manager.stage
    other = manager.get_prev_rank() if manager.is_first_stage() else manager.get_next_rank()
    peers = tuple(sorted((manager.get_rank(), other)))
    axis = Axis(2, peers.index(manager.get_rank()), peers, group)
    return collectives.all_reduce(torch.tensor([float(manager.get_rank())]), axis).item()


def test_a_group_of_some_stages() -> None:
    """Ranks 0 and 4, and 1 and 5, sum their numbers; the middle stage is in no group."""
    assert on_ranks(6, _group_of_ends) == [4.0, 6.0, 1, 1, 4.0, 6.0]


# ---- distribute_layers ----


@given(st.integers(0, 99), st.integers(1, 20))
def test_layers_are_distributed_evenly_and_the_middle_takes_more(num_layers: int, num_stages: int) -> None:
    counts = distribute_layers(num_layers, num_stages)
    assert (len(counts), sum(counts)) == (num_stages, num_layers)
    more = [stage for stage, count in enumerate(counts) if count > min(counts)]
    assert max(counts) - min(counts) <= 1
    assert more == list(range(more[0], more[-1] + 1)) if more else True
    if more:
        before, after = more[0], num_stages - 1 - more[-1]
        assert abs(before - after) <= 1, "as many stages before as after"


def test_the_arithmetic_of_a_policy() -> None:
    assert distribute_layers(7, 2) == [3, 4]
    assert distribute_layers(10, 4) == [2, 3, 3, 2]
    assert distribute_layers(2, 4) == [0, 1, 1, 0], "as there; parallel.pipeline.counts refuses an empty stage"
    manager = PipelineStageManager(Groups.without_processes(Mesh(pipe=4), rank=2))
    counts = manager.distribute_layers(10)
    assert (manager.get_stage_index(counts), manager.get_stage_index(counts, 3)) == ((5, 8), (8, 10))
    assert dslpar.distribute_layers(9, 4) == [2, 2, 3, 2]
    with pytest.raises(ValueError, match="3 layers over 0 stages"):
        distribute_layers(3, 0)


# ---- contents of a stage ----


def test_layers_and_tied_weights_of_each_stage() -> None:
    groups = Groups.without_processes(Mesh(pipe=2))
    gpt = GPT(num_layers=3, hidden_size=8, num_heads=2, vocab_size=16, max_seq_len=8, tie_embeddings=True)
    specs = gpt.layers(groups)
    held = [held_layers(specs, (1, 2), Chunks(2), stage) for stage in (0, 1)]
    assert held[0] + held[1] == [spec.name for spec in specs]
    assert "blocks.0" in held[0]
    assert {"blocks.1", "blocks.2"} <= {*held[1]}
    table = next(spec.owner for spec in specs if spec.tied)
    head = next(spec.name for spec in specs if spec.tied)
    assert shared_params(specs, (1, 2), Chunks(2)) == [{0: f"{table}.weight", 1: f"{head}.weight"}]
    assert shared_params(specs, (), Chunks(1)) == [], "on one stage nothing is shared between stages"
    assert held_layers(specs, (), Chunks(1), 0) == held[0] + held[1]
    with pytest.raises(ValueError, match="there is no rank 2: the pipeline has 2"):
        held_layers(specs, (1, 2), Chunks(2), 2)


def test_a_rank_holds_the_layers_of_all_its_chunks() -> None:
    """Four stages on two ranks: a weight of stages 0 and 2 is on one rank, and shared with no other."""
    groups, chunks = Groups.without_processes(Mesh(pipe=2)), Chunks(2, 2)
    specs = Sequential.of(mlp()).layers(groups)
    assert [held_layers(specs, (1, 2, 1, 1), chunks, rank) for rank in (0, 1)] == [["0", "3"], ["1", "2", "4"]]
    specs[3] = replace(specs[3], tied="0")
    assert shared_params(specs, (1, 2, 1, 1), chunks) == []
    assert shared_params(specs, (1, 1, 1, 2), chunks) == [{0: "0.weight", 1: "3.weight"}]


def test_layers_of_a_sequential() -> None:
    groups = Groups.without_processes(Mesh(pipe=2))
    specs = Sequential.of(mlp()).layers(groups)
    assert held_layers(specs, (2, 3), Chunks(2), 1) == ["2", "3", "4"]
    assert shared_params(specs, (2, 3), Chunks(2)) == []


def _of_an_engine(path: str) -> Any:
    run = dslpar.start(path)
    engine = dslpar.initialize(run, model=mlp(), optimizer=sgd).engine
    assert engine.stage_manager.stage == run.stage_manager.stage == run.stage
    return engine.get_held_layers(), engine.get_held_layers(0), engine.get_shared_params()


def test_an_engine_knows_what_the_chunks_of_each_rank_hold(tmp_path: Path) -> None:
    text = PIPE.replace("2", "dict(size=2, counts=[1, 2, 1, 1])") + "batch = dict(global_size=16, accumulation=2)\n"
    path = written(tmp_path, text + "schedule = 'interleaved'\n")
    assert on_ranks(2, _of_an_engine, path, init="deepspeed") == [
        (["0", "3"], ["0", "3"], []),
        (["1", "2", "4"], ["0", "3"], []),
    ]


def _of_a_run(path: str) -> Any:
    run = dslpar.start(path)
    place = run.groups.stage_name
    engine = dslpar.initialize(run, model=mlp(), optimizer=sgd).engine
    assert f", {place}, step 0" in engine.rank_description
    return list(run.stages), run.stage, run.num_stages, [run.get_layer_stage_id(index) for index in range(5)], place


def test_a_run_knows_stages_and_ranks_apart(tmp_path: Path) -> None:
    text = PIPE.replace("2", "dict(size=2, counts=[1, 2, 1, 1])") + "batch = dict(global_size=16, accumulation=2)\n"
    path = written(tmp_path, text + "schedule = 'interleaved'\n")
    assert on_ranks(2, _of_a_run, path, init="deepspeed") == [
        ([0, 2], 0, 2, [0, 1, 1, 0, 1], "stages 0 and 2 (pipe 0, data 0, tensor 0)"),
        ([1, 3], 1, 2, [0, 1, 1, 0, 1], "stages 1 and 3 (pipe 1, data 0, tensor 0)"),
    ]


def test_an_engine_knows_what_each_stage_holds(tmp_path: Path) -> None:
    path = written(tmp_path, PIPE.replace("2", "dict(size=2, counts=[2, 3])") + "batch = dict(global_size=16)\n")
    assert on_ranks(2, _of_an_engine, path, init="deepspeed") == [
        (["0", "1"], ["0", "1"], []),
        (["2", "3", "4"], ["0", "1"], []),
    ]
