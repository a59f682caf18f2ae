"""Leaving out whole stacks and effects: the arithmetic of the errors that `dslpar plan` prints."""

from __future__ import annotations

from math import log

import pytest

from benchmarks import leave_out
from benchmarks.forecast_fits import DATA, STACKS, UNFITTED, Data, data_of, load_unfitted
from benchmarks.published_mixtures import mixture_runs
from benchmarks.published_runs import published_run
from dslpar.forecast.calibrate import residuals_of
from dslpar.forecast.constants import DEFAULT, ERROR, Constants, Error
from tests.unit.benchmarks.test_published_runs import MEGATRON, ROW, needs_data

NEMO = ROW | {"source": "20", "net": "IB NDR 3200 Gb/s a node", "set": "nemo"}


def test_each_group_weighs_alike() -> None:
    many, few = [0.0] * 98 + [log(1.1)] * 2, [log(1.5), -log(2)]
    assert leave_out.pooled({"many": many}) == Error(0.0, 0.0, 0.0)
    found = leave_out.pooled({"many": many, "few": few})
    assert found == pytest.approx((0.1, 0.5, 0.5)) or found == pytest.approx((0.0, 0.5, 0.5))


def test_a_bound_covers_most_drawings_of_the_groups() -> None:
    """One of five groups is far off: drawings have it once on average, and often twice."""
    groups = {str(number): [log(1.1)] * 10 for number in range(4)} | {"far": [log(2)] * 10}
    assert leave_out.pooled(groups) == pytest.approx((0.1, 0.1, 1.0))
    assert leave_out.bounded(groups) == pytest.approx((0.1, 1.0, 1.0))


def test_ratios_compare_the_layouts_of_a_set() -> None:
    found = leave_out._ratios(["a", "a", "b", "a"], [0.1, 0.3, 9.0, 0.2])
    assert found == pytest.approx([-0.2, -0.1, 0.1])


def test_a_stack_is_forecast_with_constants_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The runs of each fit are recorded: no stack is in its own, and the new ones are in none."""
    sizes = ("1", "2", "4", "8", "16", "32")
    rows = [row | {"mbs": size} for row in (ROW, MEGATRON) for size in sizes]
    fitted, unfitted = data_of([published_run(row) for row in rows]), data_of([published_run(NEMO)])
    fits: list[set[str]] = []

    def fit(data: Data, chosen: list[int]) -> Constants:
        fits.append({data.runs[i].stack for i in chosen})
        return Constants()

    monkeypatch.setattr(leave_out, "fit", fit)
    monkeypatch.setattr(leave_out, "EFFECTS", {"fused attention": leave_out.EFFECTS["fused attention"]})
    found = leave_out.leave_out(fitted, unfitted, data_of(mixture_runs()[:3]))
    assert fits == [{"nanotron", "vTrain single"}, {"vTrain single"}, {"nanotron"}, {"vTrain single"}]
    assert {name: len(residuals) for name, residuals in found.stacks.items()} == {
        "nanotron": 6,
        "vTrain single": 6,
        "NeMo": 1,
    }
    assert len(found.effects["fused attention"]) == 6
    assert set(found.ratios) == set(found.calibrated) == {"nanotron", "vTrain single"}, "one run of NeMo is too few"
    assert found.unseen_effect == leave_out.pooled(found.effects)
    assert UNFITTED not in STACKS
    text = "\n".join(leave_out.report(found))
    assert "stacks left out" in text
    assert "ERROR = Error(half=" in text
    assert set(found.mixtures) == {"Mixtral 8x7B", "Grok-1", "DeepSeek-V3"}
    assert "MIXTURES = Error(half=" in text


@needs_data
def test_the_printed_error_covers_the_stacks_that_are_never_fitted() -> None:
    """`dslpar plan` prints `ERROR`; its constants have seen none of these runs."""
    data = load_unfitted(DATA)
    groups = {
        stack: residuals_of([data.terms[i] for i in data.of_stack(stack)], DEFAULT)
        for stack in dict.fromkeys(run.stack for run in data.runs)
    }
    assert len(groups) == 5
    found = leave_out.pooled(groups)
    assert all(seen <= printed for seen, printed in zip(found, ERROR, strict=True)), found
