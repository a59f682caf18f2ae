"""Calibration: recovers the constants behind the times, and keeps those that no run determines."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from math import exp, log

import pytest

from dslpar.core.mesh import Mesh, TensorMesh
from dslpar.forecast.calibrate import Run, calibrate, error_of, held_out_error, quantile, residuals_of, solve
from dslpar.forecast.constants import BOUNDS, CALIBRATED, DEFAULT, ERROR, Constants
from dslpar.forecast.device import device_named
from dslpar.forecast.links import Nodes
from dslpar.forecast.step_time import Terms, terms_of, time_of
from dslpar.forecast.workload import Workload
from dslpar.layout.chunks import Chunks
from dslpar.layout.schedule import Schedule
from dslpar.models.gpt.section import GPT

A100 = device_named("a100-80g")
OTHER = replace(
    DEFAULT,
    product_efficiency=0.6,
    fused_attention=0.25,
    layer_launch_s=1e-3,
    nic_efficiency=0.4,
    link_efficiency=0.5,
    step_s=0.02,
)
"""Constants of a slower cluster."""


def layouts() -> Iterator[Workload]:
    for hidden in (1024, 4096):
        model = GPT(num_layers=16, hidden_size=hidden, num_heads=16, vocab_size=51200, max_seq_len=2048)
        for pipe, data, size in ((1, 8, 1), (1, 32, 1), (1, 4, 4), (1, 8, 8), (2, 8, 2), (4, 4, 4)):
            for micro_size in (1, 4):
                yield Workload(
                    model=model,
                    mesh=Mesh(pipe=pipe, data=data, tensor=TensorMesh(y=size, mode="1d" if size > 1 else None)),
                    counts=(16 // pipe,) * pipe,
                    schedule=Schedule(Chunks(pipe), 16),
                    micro_size=micro_size,
                    seq_len=2048,
                    zero=1,
                )


@pytest.fixture(scope="module")
def terms() -> list[Terms]:
    return [terms_of(each, A100, Nodes.usual(A100)) for each in layouts()]


def measured(terms: list[Terms], constants: Constants, noise: float = 0.0) -> list[Run]:
    rng = random.Random(0)
    return [Run(each, time_of(each, constants).step_s * exp(rng.gauss(0, noise))) for each in terms]


def test_constants_that_made_the_times_are_found(terms: list[Terms]) -> None:
    runs = measured(terms, OTHER)
    found = calibrate(runs)
    before, after = error_of(residuals_of(runs, DEFAULT)), found.error
    assert before.half > 0.15
    assert after.nine_of_ten < 0.03  # the prior keeps a little of the defaults
    for name in ("product_efficiency", "nic_efficiency"):
        assert getattr(found.constants, name) == pytest.approx(getattr(OTHER, name), rel=0.25), name


def test_one_unknown_constant_is_found_exactly(terms: list[Terms]) -> None:
    runs = measured(terms, replace(DEFAULT, product_efficiency=0.5))
    found = calibrate(runs, names=["product_efficiency"], prior_runs=0.0)
    assert found.constants.product_efficiency == pytest.approx(0.5, rel=1e-3)
    assert replace(found.constants, product_efficiency=DEFAULT.product_efficiency) == DEFAULT


def test_a_run_that_stalled_does_not_rule(terms: list[Terms]) -> None:
    runs = measured(terms, OTHER, noise=0.02)
    stalled = [runs[0]._replace(step_s=5 * runs[0].step_s), *runs[1:]]
    found = calibrate(stalled)
    assert error_of(found.residuals[1:]).half < 0.05
    assert found.residuals[0] == pytest.approx(-log(5), abs=0.4)


def test_what_no_run_speaks_of_stays(terms: list[Terms]) -> None:
    found = calibrate(measured(terms, OTHER)[:3])
    for name in ("misaligned_products", "unfused_optimizer", "plain_attention"):
        assert getattr(found.constants, name) == pytest.approx(getattr(DEFAULT, name)), name


def test_constants_stay_within_their_bounds(terms: list[Terms]) -> None:
    runs = [run._replace(step_s=run.step_s / 50) for run in measured(terms, DEFAULT)]
    found = calibrate(runs).constants
    for name, (least, most) in BOUNDS.items():
        assert least * 0.999999 <= getattr(found, name) <= most * 1.000001, name


def test_a_fit_of_runs_as_forecast_changes_nothing(terms: list[Terms]) -> None:
    found = calibrate(measured(terms, DEFAULT))
    assert found.loss == pytest.approx(0, abs=1e-12)
    assert found.error.nine_of_ten < 1e-6


def test_a_system_of_equations() -> None:
    matrix = [[4.0, 1.0, 0.5], [1.0, 3.0, 0.2], [0.5, 0.2, 2.0]]
    found = solve(matrix, [1.0, 2.0, 3.0])
    back = [sum(a * b for a, b in zip(row, found, strict=True)) for row in matrix]
    assert back == pytest.approx([1.0, 2.0, 3.0])


def test_quantiles_are_between_values_in_proportion() -> None:
    assert [quantile([1.0, 2.0, 4.0], at) for at in (0, 0.25, 0.5, 0.75, 1)] == [1.0, 1.5, 2.0, 3.0, 4.0]
    assert quantile([3.0], 0.9) == 3.0
    assert error_of([0.0, log(1.1), -log(1.25)]) == pytest.approx((0.1, 0.16, 0.18))


def test_few_runs_claim_no_small_error(terms: list[Terms]) -> None:
    """Fewer than three leave the error of the defaults; up to nine layouts that of other stacks so calibrated."""
    runs = measured(terms, DEFAULT)
    assert held_out_error([]) == held_out_error(runs[:2]) == ERROR
    assert held_out_error(runs[:3]) == held_out_error([runs[0]] * 12) == CALIBRATED
    assert held_out_error(runs).nine_of_ten < 1e-6
    disturbed = [runs[0]._replace(step_s=2 * runs[0].step_s), *runs[1:3]]
    assert held_out_error(disturbed).nine_of_ten > CALIBRATED.nine_of_ten
