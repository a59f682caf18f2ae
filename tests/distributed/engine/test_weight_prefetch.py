"""Weight prefetch through DeepSpeed: steps are bitwise equal to those without it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import pytest
import torch

from dslpar.engine import build
from dslpar.layout.resolve import Job
from dslpar.models.gpt import section
from dslpar.schema import sections
from tests.distributed.engine.test_gather import BUCKET, late
from tests.support.engines import LENGTH, VOCAB, batches, engine_of, job
from tests.support.prefetched_panels import count_ahead
from tests.support.ranks import on_ranks
from tests.support.sampling import sampled

STEPS = 3
FLAT = sections.TensorParallel(size=2, mode="cuboid", shape=(2, 1, 1), comm_overlap=True)
"""Weights sharded over q with few ranks; the layers' own tests cover the modes."""
TWO_D = sections.TensorParallel(size=4, mode="2d", comm_overlap=True)
PIPE = sections.PipelineParallel(size=2)
RECOMPUTED = sections.ActivationCheckpoint(interval=1, mlp_chunks=2)


class Case(NamedTuple):
    """A run, by the sections of its config."""

    stage: int
    tensor: sections.TensorParallel = FLAT
    pipeline: sections.PipelineParallel | None = None
    more: Mapping[str, Any] = {}


CASES = {
    **{f"ZeRO {stage}, data 2": Case(stage) for stage in range(4)},
    "ZeRO 1, bf16": Case(1, more={"precision": sections.Precision(dtype="bf16")}),
    "ZeRO 2, 2d": Case(2, TWO_D),
    "ZeRO 1, gathers overlap": Case(
        1, more={"zero": sections.Zero(stage=1, overlap_param_gather=True, extra={"allgather_bucket_size": BUCKET})}
    ),
    "ZeRO 2, recomputed": Case(2, more={"activation_checkpoint": RECOMPUTED}),
    "ZeRO 1, loss by chunks": Case(1, more={"train": sections.Train(loss_chunks=2)}),
    "pipeline": Case(1, pipeline=PIPE),
    "interleaved": Case(0, pipeline=PIPE, more={"schedule": sections.PipelineSchedule(type="interleaved")}),
    "zero bubble": Case(1, pipeline=PIPE, more={"schedule": sections.PipelineSchedule(type="zero_bubble")}),
}


def job_of(case: str) -> Job:
    stage, tensor, pipeline, more = CASES[case]
    gpt = section.GPT(num_layers=4, hidden_size=16, num_heads=4, vocab_size=VOCAB, max_seq_len=LENGTH)
    parallel = {"tensor": tensor} | ({} if pipeline is None else {"pipeline": pipeline})
    of_all = {
        "model": gpt,
        "parallel": sections.Parallel(**parallel),  # type: ignore[arg-type]
        "zero": sections.Zero(stage=stage),
        "batch": sections.Batch(global_size=16, accumulation=2 if pipeline is None else 4),
        "optimizer": sections.SGD(lr=0.1, momentum=0.9),
    }
    return job(4, **of_all | dict(more))


def steps(case: str, within_layers: bool = True) -> tuple[bool, int, bool]:
    """Return whether losses, norms and weights are equal, the number of prefetched panels, and whether the module
    prefetches.
    """
    used, found, original = count_ahead(), [], build.prefetch_weights
    if "gathers" in case:
        late()
    for enabled in (False, True):
        build.prefetch_weights = original if enabled else lambda *_: None
        if enabled and not within_layers:
            build.prefetch_weights = lambda module, prefetches, _: original(module, prefetches)
        run = job_of(case)
        engine = engine_of(run)
        numbers = []
        for step in range(STEPS):
            loss = engine.train_batch(batches(run, engine.groups.coord["data"], step))
            numbers += [loss, float(engine.grad_norm), engine.eval_batch(batches(run, engine.groups.coord["data"], 9))]
        weights = [p.detach().clone() for _, p in engine.named_parameters()]
        ahead = len(used)
        prefetches = getattr(engine.module, "weight_prefetch", None) is not None
        found.append((numbers, weights, ahead, prefetches))
        used.clear()
    (right, right_weights, none, off), (ours, our_weights, ahead, on) = found
    assert not none
    assert not off
    equal = right == ours and all(map(torch.equal, right_weights, our_weights))
    return equal, ahead, on


DAILY = {"ZeRO 1, gathers overlap", "zero bubble"}


@pytest.mark.parametrize("case", sampled(CASES, DAILY))
def test_steps_are_the_same(case: str) -> None:
    for equal, ahead, on in on_ranks(4, steps, case, init="deepspeed"):
        assert equal
        assert on == (CASES[case].stage < 3)
        assert bool(ahead) == on


@pytest.mark.prove  # `make test` has test_steps_are_the_same
def test_a_weight_that_is_gathered_before_it_is_there_is_detected() -> None:
    """The prefetch is across layers, and each waits for its own weights when it begins."""
    found = on_ranks(4, steps, "ZeRO 1, gathers overlap", False, init="deepspeed")
    assert not any(equal for equal, _, _ in found)
