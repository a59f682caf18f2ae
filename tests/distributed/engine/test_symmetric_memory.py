"""Symmetric memory in the engine, on torch's CPU stand-ins: equal to rings, and refused on unconnected devices."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch

from dslpar.core.errors import DslparError
from dslpar.distributed import symmetric_memory
from dslpar.distributed.collectives import Axis
from dslpar.distributed.groups import Groups
from dslpar.distributed.symmetric_memory import Place
from dslpar.layout.resolve import Job
from dslpar.schema import sections
from dslpar.schema.types import SYMMETRIC_MEMORY
from tests.support.engines import batches, engine_of, job
from tests.support.ranks import on_ranks
from tests.support.sampling import sampled
from tests.support.symmetric_memory import fused_products_on_cpus

CLOSE = 1e-6
"""Relative, in float32: the limit for losses in the proofs of layouts."""
PIPE = {"pipeline": sections.PipelineParallel(size=2)}
LAYOUTS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    # name: (world, parallel, other sections)
    "1d 2 with sequence": (2, {}, {}),
    "pipe 2, recomputed, ZeRO 1": (
        4,
        PIPE,
        {"activation_checkpoint": sections.ActivationCheckpoint(interval=1), "zero": sections.Zero(stage=1)},
    ),
    "pipe 2, zero bubble": (4, PIPE, {"schedule": sections.PipelineSchedule(type="zero_bubble")}),
    "ring 2": (4, {"context": sections.ContextParallel(size=2, impl="ring")}, {}),
}


def _job(name: str, comm_overlap: bool | str) -> Job:
    world, parallel, others = LAYOUTS[name]
    tensor = sections.TensorParallel(size=2, mode="1d", sequence=True, comm_overlap=comm_overlap)
    return job(world, parallel=sections.Parallel(tensor=tensor, **parallel), train=sections.Train(steps=3), **others)


def _losses(made: Job) -> tuple[list[float], list[float], int]:
    """Return losses and norms of three steps, and the number of fused products."""
    with fused_products_on_cpus() as calls:
        engine = engine_of(made)
        losses, norms = [], []
        for step in range(3):
            losses.append(engine.train_batch(batches(made, engine.groups.coord["data"], step)))
            norms.append(engine.grad_norm)
    return losses, norms, calls.total()


@pytest.mark.parametrize("name", sampled(LAYOUTS, {"1d 2 with sequence"}))
def test_a_run_through_symmetric_memory_is_the_run_around_rings(name: str) -> None:
    around, through = (
        on_ranks(LAYOUTS[name][0], _losses, _job(name, overlap), init="deepspeed")
        for overlap in (True, SYMMETRIC_MEMORY)
    )
    for ring, fused in zip(around, through, strict=True):
        assert ring[2] == 0 < fused[2]
        assert fused[0] == pytest.approx(ring[0], rel=CLOSE)
        assert fused[1] == pytest.approx(ring[1], rel=CLOSE)


def _on_cpus(made: Job) -> tuple[list[float], str]:
    with patch.object(symmetric_memory.log, "info") as info:
        engine = engine_of(made)
    said = "\n".join(call.args[0] % call.args[1:] for call in info.call_args_list)
    return [engine.train_batch(batches(made, engine.groups.coord["data"], step)) for step in range(2)], said


def test_on_cpus_pieces_go_around_rings_and_the_log_says_so() -> None:
    around, through = (
        on_ranks(2, _on_cpus, _job("1d 2 with sequence", overlap), init="deepspeed")
        for overlap in (True, SYMMETRIC_MEMORY)
    )
    for (ring, _), (other, said) in zip(around, through, strict=True):
        assert ring == other
        assert "comm_overlap='symmetric_memory': on cpu, chunks are sent around rings" in said


def _refused(made: Job, where: str) -> str:
    """Return the refusal, for devices of a host without shared memory between ranks 2 and 3, or without devices."""
    groups = Groups(made.mesh)
    place = Place("one" if groups.rank != 3 or where != "hosts" else "two", groups.rank, str(groups.rank), (0, 1, 2, 3))

    def why_not_met(axis: Axis) -> str:
        return "refused by torch" if where == "torch" and 2 in axis.peers else ""

    with (
        patch.object(symmetric_memory, "_place", lambda device: place),
        patch.object(symmetric_memory, "_why_not_met", why_not_met),
        pytest.raises(DslparError) as refused,
    ):
        symmetric_memory.require(groups, torch.device("cuda"))
    return refused.value.findings[0].concise()


@pytest.mark.parametrize(
    ("where", "why"), [("torch", "refused by torch"), ("hosts", "ranks 2 and 3 are on several hosts: one, two")]
)
def test_all_ranks_refuse_what_one_of_their_groups_cannot(where: str, why: str) -> None:
    tensor = sections.TensorParallel(size=2, mode="1d", sequence=True, comm_overlap=SYMMETRIC_MEMORY)
    said = on_ranks(4, _refused, job(4, parallel=sections.Parallel(tensor=tensor)), where)
    assert len({*said}) == 1
    assert f"HST234 no-symmetric-memory: comm_overlap='symmetric_memory': {why}" in said[0]


def _asked(made: Job) -> int:
    with patch.object(symmetric_memory, "_place", side_effect=AssertionError):
        symmetric_memory.require(Groups(made.mesh), torch.device("cuda"))
    return made.mesh.tensor.symmetric_memory


def test_where_no_tokens_are_in_pieces_nothing_is_asked() -> None:
    tensor = sections.TensorParallel(size=2, mode="1d", comm_overlap=SYMMETRIC_MEMORY)
    assert on_ranks(2, _asked, job(2, parallel=sections.Parallel(tensor=tensor))) == [True, True]
