"""train.compile: compiled layers change no loss, in pipelines, tensor groups, ZeRO and recomputation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from dslpar.core.errors import DslparError
from dslpar.engine.compiled_layers import loses_gradients
from dslpar.layout.resolve import Job
from dslpar.schema import sections
from tests.support.compiled import TORCH_S_OWN_WARNINGS
from tests.support.engines import batches, engine_of, job
from tests.support.ranks import on_ranks
from tests.support.sampling import sampled

pytestmark = TORCH_S_OWN_WARNINGS

CLOSE = 1e-6
"""Relative, in float32: the limit for losses in the proofs of layouts."""
PIPE = {"pipeline": sections.PipelineParallel(size=2)}
ONE_D = {"tensor": sections.TensorParallel(size=2, mode="1d", sequence=True)}
LAYOUTS: dict[str, tuple[int, int, dict[str, Any], bool, int]] = {
    # name: (world, ZeRO stage, parallel, recompute, chunks of the loss)
    "one process": (1, 0, {}, False, 1),
    "data 2, ZeRO 2": (2, 2, {}, False, 1),
    "1d 2 with sequence, recomputed": (2, 1, ONE_D, True, 1),
    "pipe 2": (2, 1, PIPE, False, 1),
    "pipe 2, 1d 2 with sequence, recomputed": (4, 1, PIPE | ONE_D, True, 1),
    "1d 2 with sequence, the loss by chunks": (2, 1, ONE_D, False, 2),
    "pipe 2, the loss by chunks": (2, 1, PIPE, False, 2),
}


WITH_A_COMPILED_LOSS: dict[str, dict[str, Any]] = {
    "pipe 2, zero bubble": {
        "parallel": sections.Parallel(pipeline=PIPE["pipeline"]),
        "schedule": sections.PipelineSchedule(type="zero_bubble"),
    },
    "data 2, ZeRO 3": {"zero": sections.Zero(stage=3)},
    "1d 2 with sequence, overlapped": {
        "parallel": sections.Parallel(tensor=replace(ONE_D["tensor"], comm_overlap=True)),
    },
}
"""Settings on 2 ranks that exclude compiled layers, or make them ineffective."""


def _losses(made: Job) -> tuple[list[float], list[float], int]:
    """Return losses and norms of three steps, and the number of torch's graphs without those of a last stage's loss."""
    engine = engine_of(made)
    torch._dynamo.utils.counters.clear()  # torch was tried by compiling a function
    losses, norms = [], []
    for step in range(3):
        losses.append(engine.train_batch(batches(made, engine.groups.coord["data"], step)))
        norms.append(engine.grad_norm)
    of_the_loss = int(made.spec.train.compiles_loss and engine.is_last_stage)
    return losses, norms, torch._dynamo.utils.counters["stats"]["unique_graphs"] - of_the_loss


@pytest.mark.prove  # `make test` has tests/properties/invariance/compiled
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_run_with_compiled_layers_is_the_run_without(name: str) -> None:
    world, stage, parallel, recompute, chunks = LAYOUTS[name]

    def run(compiled: bool) -> list[tuple[list[float], list[float], int]]:
        made = job(
            world,
            parallel=sections.Parallel(**parallel),
            zero=sections.Zero(stage=stage),
            activation_checkpoint=sections.ActivationCheckpoint(interval=1) if recompute else None,
            train=sections.Train(steps=3, compile=compiled, compile_backend="aot_eager", loss_chunks=chunks),
        )
        return on_ranks(world, _losses, made, init="deepspeed")

    for plain, compiled in zip(run(False), run(True), strict=True):
        assert plain[2] == 0
        assert compiled[2] == 1, "all blocks of a rank share one graph"
        assert compiled[0] == pytest.approx(plain[0], rel=CLOSE)
        assert compiled[1] == pytest.approx(plain[1], rel=CLOSE)


@pytest.mark.parametrize("name", sampled(WITH_A_COMPILED_LOSS, {"1d 2 with sequence, overlapped"}))
def test_a_run_with_a_compiled_loss_alone_is_the_run_without(name: str) -> None:
    def run(compiled: bool) -> list[tuple[list[float], list[float], int]]:
        train = sections.Train(steps=3, compile=compiled, compile_backend="aot_eager", compile_components=("loss",))
        return on_ranks(2, _losses, job(2, train=train, **WITH_A_COMPILED_LOSS[name]), init="deepspeed")

    for plain, compiled in zip(run(False), run(True), strict=True):
        assert plain[2] == compiled[2] == 0, "no graph of a layer"
        assert compiled[0] == pytest.approx(plain[0], rel=CLOSE)
        assert compiled[1] == pytest.approx(plain[1], rel=CLOSE)


def test_this_torch_keeps_gradients_in_compiled_layers() -> None:
    assert on_ranks(1, loses_gradients) == [False]


def _refused(made: Job) -> str:
    # as torch 2.11 compiles a function that writes into its result
    torch.compile = lambda fn, **_: lambda x: fn(x.detach()) + 0 * x
    with pytest.raises(DslparError) as refused:
        engine_of(made)
    return refused.value.findings[0].concise()


@pytest.mark.parametrize("component", ["layers", "loss"])
def test_a_torch_that_loses_gradients_is_refused(component: str) -> None:
    made = job(1, train=sections.Train(compile=True, compile_components=(component,)))
    (said,) = on_ranks(1, _refused, made, init="deepspeed")
    assert "HST233 compiler-loses-gradients: torch" in said
