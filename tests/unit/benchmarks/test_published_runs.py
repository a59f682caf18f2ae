"""The time forecast's benchmark: rows as workloads, the arithmetic of its scores, and a quick run."""

from __future__ import annotations

import os
from functools import cache
from math import log

import pytest

from benchmarks import forecast
from benchmarks.published_runs import (
    by_set,
    counts_of_row,
    is_scored,
    model_of_row,
    published_run,
    selective_recompute_runs,
)
from dslpar.forecast.calibrate import residuals_of
from dslpar.forecast.constants import DEFAULT
from dslpar.layout.chunks import Chunks

ROW = {
    "source": "0",
    "set": "nanotron-1B/1n",
    "flags": "",
    "device": "H100-SXM-80GB",
    "gpus": "16",
    "gpus_per_node": "8",
    "net": "EFA 3200 Gb/s a node",
    "dp": "2",
    "tp": "4",
    "pp": "2",
    "vp": "1",
    "sp": "1",
    "zero": "1",
    "mbs": "4",
    "gbs": "256",
    "seq": "4096",
    "recompute": "none",
    "attn": "flash",
    "precision": "bf16",
    "step_s": "3.5",
    "L": "16",
    "h": "2048",
    "a": "32",
    "kv": "32",
    "ffn": "8192",
    "vocab": "131072",
    "act": "swiglu",
    "tied": "1",
}
MEGATRON = ROW | {
    "source": "2",
    "device": "A100-SXM-80GB",
    "net": "IB HDR 800 Gb/s a node",
    "sp": "0",
    "recompute": "full",
    "precision": "fp16",
    "act": "gelu",
}

needs_data = pytest.mark.skipif(
    not os.path.exists(os.path.join(forecast.DATA, "published_runs.csv")),
    reason="others' measured runs lie in ../shared/data, which is not here",
)


def test_a_row_is_a_workload() -> None:
    run = published_run(ROW)
    made = run.workload
    assert (made.mesh.pipe, made.mesh.data, made.mesh.tensor.y) == (2, 2, 4)
    assert (made.micro_batches, made.global_size, made.zero) == (32, 256, 1)
    assert (made.mesh.tensor.residual, made.mesh.tensor.keep) == ("sequence", "none")
    assert made.framework.blocking_messages
    assert (run.device.name, run.nodes.nic_gb_per_s, run.step_s) == ("h100-80g", 400, 3.5)
    assert not run.filtered


def test_megatron_s_rows_have_its_habits() -> None:
    made = published_run(MEGATRON).workload
    assert (made.recompute, made.dtype, made.mesh.tensor.residual) == ("full", "fp16", "replicated")
    assert not made.framework.fused_attention
    assert made.framework.splits_messages


@pytest.mark.parametrize(
    ("change", "filtered"), [({"flags": "stalled"}, True), ({"gpus": "512"}, True), ({"gpus": "256"}, False)]
)
def test_what_the_filter_leaves_out(change: dict[str, str], filtered: bool) -> None:
    assert published_run(ROW | change).filtered == filtered


@pytest.mark.parametrize("change", [{"step_s": ""}, {"mbs": ""}, {"precision": "fp8-row"}, {"source": "12"}])
def test_what_is_not_scored(change: dict[str, str]) -> None:
    assert is_scored(ROW)
    assert not is_scored(ROW | change)


def test_nanotron_weighs_the_head_and_megatron_does_not() -> None:
    model = model_of_row(ROW)
    assert counts_of_row("nanotron", model, Chunks(4)) == (5, 5, 5, 1)
    assert counts_of_row("nanotron", model, Chunks(8)) == (3, 2, 3, 2, 3, 2, 1, 0)
    assert counts_of_row("vTrain multi", model, Chunks(4)) == (4, 4, 4, 4)


def test_nanotron_s_stages_end_where_they_reach_their_share() -> None:
    """With 8 billion weights the head costs 2.2 of 34.2 layers: a share of 17.1 takes 18 layers, and one of 2.1 takes
    3.
    """
    model = model_of_row(ROW | {"L": "32", "h": "4096", "ffn": "14336"})
    assert counts_of_row("nanotron", model, Chunks(2)) == (18, 14)
    assert counts_of_row("nanotron", model, Chunks(16))[:3] == (3, 2, 2)
    assert counts_of_row("nanotron", model_of_row(ROW), Chunks(2)) == (10, 6), "a share of just ten layers takes ten"


@pytest.mark.parametrize(("tensor", "samples", "fused"), [("8", "1", False), ("8", "2", True), ("4", "1", True)])
def test_megatron_s_softmax_is_one_kernel_where_samples_and_heads_come_in_fours(
    tensor: str, samples: str, fused: bool
) -> None:
    made = published_run(MEGATRON | {"tp": tensor, "mbs": samples, "a": "16", "kv": "16"}).workload
    assert made.framework.launch_ratio == (1.0 if fused else 21 / 17)


@pytest.mark.parametrize(("source", "tensor", "expected"), [("2", "1", 50257), ("2", "2", 51200), ("0", "1", 51200)])
def test_one_rank_of_vtrain_s_pads_no_vocabulary(source: str, tensor: str, expected: int) -> None:
    assert model_of_row(MEGATRON | {"source": source, "tp": tensor, "vocab": "51200"}).vocab_size == expected


def test_the_steps_of_selective_recompute_are_of_22_billion_weights_to_a_trillion() -> None:
    runs = selective_recompute_runs()
    billions = [
        run.workload.mesh.tensor.size * sum(run.workload.weights(rank) for rank in range(run.workload.mesh.pipe)) / 1e9
        for run in runs[::2]
    ]
    assert billions == pytest.approx([22, 175, 530, 1008], rel=0.02)
    assert [run.workload.recompute for run in runs] == ["full", "selective"] * 4


# Scores -----------------------------------------------------------------------------------------------------------


def test_errors_are_shares_of_what_was_measured() -> None:
    found = forecast.Errors.of([log(1.1), -log(1.25), 0.0])
    assert (found.median, found.mean, found.nine_of_ten) == pytest.approx((0.1, 0.1, 0.18))


def test_ranking_counts_the_fastest_among_the_first_and_what_is_near_it() -> None:
    measured = [4.0, 1.0, 2.0, 3.0, 1.04]
    good, fair, poor = [40.0, 10.0, 20.0, 30.0, 15.0], [1.0, 4.0, 2.0, 3.0, 2.5], [1.0, 5.0, 2.0, 3.0, 4.0]
    found = forecast.ranking([(good, measured), (fair, measured), (poor, measured)])
    assert found.top == {1: pytest.approx(1 / 3), 3: pytest.approx(1 / 3), 5: 1.0}
    assert found.near == pytest.approx(2 / 3)
    assert found.num_sets == 3


def test_rank_correlation() -> None:
    assert forecast.ranks([3.0, 1.0, 3.0]) == [2.5, 1.0, 2.5]
    assert forecast.spearman([1, 2, 3], [10, 20, 90]) == pytest.approx(1)
    assert forecast.spearman([1, 2, 3], [3, 2, 1]) == pytest.approx(-1)
    assert forecast.spearman([1, 1, 1], [3, 2, 1]) == 0


def test_rules_of_thumb_order_layouts() -> None:
    plain, tensor = published_run(ROW | {"tp": "1", "dp": "8"}), published_run(ROW)
    assert forecast.smallest_tensor(plain) < forecast.smallest_tensor(tensor)  # type: ignore[operator]
    assert forecast.bubble_and_share(plain) < forecast.bubble_and_share(tensor)  # type: ignore[operator]


def test_without_data_it_says_so(tmp_path: object, capsys: pytest.CaptureFixture[str]) -> None:
    assert forecast.main(["--data", str(tmp_path)]) == 2
    assert "no published_runs.csv" in capsys.readouterr().err


def test_runs_of_one_layout_are_one_alternative_as_fast_as_the_fastest() -> None:
    slow, fast, other = (
        published_run(ROW | change) for change in ({"step_s": "4"}, {"step_s": "3"}, {"mbs": "8", "step_s": "5"})
    )
    data = forecast.Data([slow, fast, other], [])
    assert forecast._layouts(data, [0, 1, 2]) == [1, 2]


# With data --------------------------------------------------------------------------------------------------------


@cache
def _data() -> forecast.Data:
    """Return all published runs; it takes three seconds to read them."""
    return forecast.load(forecast.DATA)


@needs_data
def test_all_scored_rows_are_workloads_and_folds_keep_sets_together() -> None:
    data = _data()
    assert {run.stack for run in data.runs} == {*forecast.STACKS, forecast.UNFITTED}
    folds = forecast.deal(data, seed=1, folds=5)
    for members in by_set(data.runs).values():
        assert len({folds[i] for i in members}) == 1
    assert folds != forecast.deal(data, seed=2, folds=5)
    for stack in forecast.STACKS:
        assert len({folds[i] for i in data.of_stack(stack)}) > 1


@needs_data
def test_the_defaults_forecast_each_stack() -> None:
    """The defaults were fitted on these runs; the benchmark scores out of fold."""
    data = _data()
    for stack in forecast.STACKS:
        chosen = data.of_stack(stack)
        found = forecast.Errors.of(residuals_of([data.terms[i] for i in chosen], DEFAULT))
        assert found.median <= 0.10, stack
        assert found.nine_of_ten <= 0.25, stack
