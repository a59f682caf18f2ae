"""Host reads: a step makes the host wait for an accelerator once, if DeepSpeed allows it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from benchmarks.device_counter import Waits
from benchmarks.device_steps import LAYOUTS_OF_STEPS, step_counts
from dslpar.distributed import deepspeed_patches
from dslpar.engine.host_reads import HostReads
from dslpar.layout.resolve import Job
from dslpar.schema import sections
from tests.support.engines import batches, engine_of, job
from tests.support.fake_world import in_forks
from tests.support.ranks import on_ranks
from tests.support.sampling import sampled


def step_waits(layout: str) -> Waits:
    return step_counts(layout).waits


@pytest.mark.parametrize("layout", sampled(LAYOUTS_OF_STEPS, {"GPT, 1d, data 2, ZeRO 1", "GPT, data 2, fp32, ZeRO 0"}))
def test_a_step_waits_for_the_device_once(layout: str) -> None:
    (waits,) = in_forks(step_waits, [layout])
    assert isinstance(waits, Waits), waits
    assert len(waits.reads) == 1, waits.reads
    assert "host_reads.py" in waits.reads[0]
    assert (waits.copies, waits.synchronizations) == ([], [])


def _without(patch: str) -> Waits:
    """Return the waits of a step without that patch."""
    setattr(deepspeed_patches, patch, lambda *_: None)
    return step_waits("GPT, 1d, data 2, ZeRO 1")


def test_m12_deepspeed_still_reads_its_norms_one_by_one() -> None:
    (waits,) = in_forks(_without, ["read_norms_once"])
    assert len(waits.reads) > 1
    assert len(waits.copies) >= 1, "of a constant, for each norm"


# ---- values ----


def _read(rank_of_flag: int) -> tuple[list[torch.Tensor], float, list[bool]]:
    made = job(2)
    engine = engine_of(made)
    reads = HostReads(engine.groups, torch.device("cpu"))
    reads.local_flags = lambda: (engine.groups.rank == rank_of_flag, False)
    reads.defer(torch.tensor(1 / 3, dtype=torch.float64))
    norms = reads.read([torch.tensor(math.inf), torch.tensor([0.1])[0]])
    reads.finish()
    return norms, reads.loss, reads.any_rank


@pytest.mark.parametrize("rank", [0, 1])
def test_all_ranks_know_what_one_has_told_and_each_scalar_keeps_its_bits(rank: int) -> None:
    for norms, loss, flags in on_ranks(2, _read, rank, init="deepspeed"):
        assert [norm.item() for norm in norms] == [math.inf, torch.tensor(0.1).item()]
        assert {norm.dtype for norm in norms} == {torch.float32}
        assert loss == 1 / 3
        assert flags == [True, False]


def _flags_by_step(made: Job) -> list[list[bool]]:
    """Return the flags of three steps; rank 1 sets its flag after the first."""
    engine: Any = engine_of(made)
    told = False
    engine.host_reads.local_flags = lambda: (told,)
    found = []
    for step in range(3):
        engine.train_batch(batches(made, engine.groups.coord["data"], step))
        found.append(engine.host_reads.any_rank)
        told = engine.groups.rank == 1
    return found


PIPE = sections.Parallel(pipeline=sections.PipelineParallel(size=2))


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("parallel", [sections.Parallel(), PIPE], ids=["data 2", "pipe 2"])
def test_the_next_step_tells_what_was_set_after_one(parallel: sections.Parallel, stage: int) -> None:
    made = job(2, parallel=parallel, zero=sections.Zero(stage=stage))
    assert on_ranks(2, _flags_by_step, made, init="deepspeed") == [[[False], [True], [True]]] * 2
