"""Published steps of mixtures: their layouts as workloads, and the error that is printed for mixtures."""

from __future__ import annotations

from math import exp

import pytest

from benchmarks.forecast_fits import data_of
from benchmarks.leave_out import pooled, residuals_by_model
from benchmarks.published_mixtures import mixture_runs
from benchmarks.published_runs import PublishedRun
from dslpar.costs.any_model import flops_per_token
from dslpar.forecast.calibrate import residuals_of
from dslpar.forecast.constants import DEFAULT, MIXTURES, UNCOVERED, Error
from dslpar.forecast.coverage import SENT, effects_of

RUNS = {run.set: run for run in mixture_runs()}


def error_of(run: PublishedRun) -> float:
    """Return the forecast with the default constants over what was measured, less 1."""
    (residual,) = residuals_of(data_of([run]).terms, DEFAULT)
    return exp(residual) - 1


def test_the_step_of_mixtral_follows_from_its_published_rate() -> None:
    run = RUNS["Mixtral 8x7B on 64 h100-80g"]
    mesh = run.workload.mesh
    assert (mesh.world_size, mesh.pipe, mesh.size("expert"), mesh.size("expert_data")) == (64, 4, 8, 2)
    # 6 N of 12.8 B active weights, and 12 L h s of attention's scores without a mask.
    per_token = 6 * (12.75e9) + 12 * 32 * 4096 * 4096
    assert run.step_s == pytest.approx(256 * 4096 * per_token / (64 * 468e12), rel=0.01)


@pytest.mark.parametrize(
    ("name", "pipe", "tensor", "expert", "micro_batches", "layers", "active"),
    [
        ("Grok-1 on 512 h100-80g", 8, 8, 8, 128, 64, 83e9),
        ("DeepSeek-V3 on 1024 h100-80g", 16, 2, 64, 256, 61, 37e9),
        ("Qwen3-235B-A22B on 256 h100-80g", 8, 2, 32, 128, 94, 22e9),
        ("GPT-OSS 120B on 64 gb200-186g", 1, 1, 64, 20, 36, 5e9),
    ],
)
def test_a_published_layout_is_a_workload(
    name: str, pipe: int, tensor: int, expert: int, micro_batches: int, layers: int, active: float
) -> None:
    run = RUNS[name]
    workload, mesh = run.workload, run.workload.mesh
    assert (mesh.pipe, mesh.tensor.size, mesh.size("expert")) == (pipe, tensor, expert)
    assert (workload.schedule.num_micro_batches, sum(workload.counts)) == (micro_batches, layers)
    assert mesh.world_size == int(name.split()[-2])
    flops = flops_per_token(workload.model, workload.seq_len)
    assert flops is not None
    assert flops.mfu_6n / 6 == pytest.approx(active, rel=0.06), "the active parameters, as published"


def test_the_printed_error_is_that_of_all_mixtures() -> None:
    found = pooled(residuals_by_model(data_of(list(RUNS.values())), DEFAULT))
    assert all(seen <= printed for seen, printed in zip(found, MIXTURES, strict=True)), found
    for run in RUNS.values():
        assert effects_of(run.workload, run.device)[SENT] == MIXTURES
    assert isinstance(MIXTURES, Error)
    assert MIXTURES != UNCOVERED


def test_a_step_over_nodes_is_no_longer_forecast_twice_as_slow() -> None:
    """All messages of an all-to-all are under way at once: with a hop per rank the error was 73 and 33 %."""
    assert abs(error_of(RUNS["Qwen3-235B-A22B on 256 h100-80g"])) < 0.40
    assert abs(error_of(RUNS["DeepSeek-V3 on 1024 h100-80g"])) < 0.15
