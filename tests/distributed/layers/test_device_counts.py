"""Device work of a block, the loss and a step: within the targets, and within each row's limits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import device_targets
from benchmarks.device_blocks import FORMS, HEADS, HIDDEN, KV_HEADS, loss_bytes
from benchmarks.device_counter import count_kernels
from benchmarks.device_counts import TABLES, counts_of
from benchmarks.device_targets import LIMITED, misses, wrong
from benchmarks.plain_torch import LlamaBlock
from dslpar.core.mesh import Mesh
from dslpar.distributed.collectives import start_all_reduce_
from dslpar.distributed.groups import Groups
from dslpar.layers import Block, initialize
from tests.support.fake_world import fake_world, in_forks
from tests.support.layouts import LAYOUTS
from tests.support.sampling import sampled

ROWS = [(table, row) for table, rows in TABLES.items() for row in rows]
EACH_TIME = {
    ("block", "Llama, 1d, sequence, overlap"),
    ("step", "Llama, 1d, sequence, data 2, ZeRO 1"),
    ("step", "GPT, pipeline 2, data 2, ZeRO 1, last stage"),
    ("bytes", "the loss"),
    ("bytes", "a gradient's sum"),
}


def _counts(row: tuple[str, str]) -> Any:
    return counts_of(TABLES[row[0]][row[1]]())


@pytest.mark.parametrize(("table", "row"), sampled(ROWS, EACH_TIME))
def test_a_row_is_within_what_was_asked_and_its_limits(table: str, row: str) -> None:
    (counts,) = in_forks(_counts, [(table, row)])
    assert isinstance(counts, dict), counts
    assert wrong({(table, row): counts}) == []


def test_torchs_own_loss_moves_twice_as_much() -> None:
    """Both first copy bfloat16 to float32, which is 8 of the 22 bytes that dslpar's loss moves per logit."""
    ((torchs, ours),) = in_forks(lambda _: loss_bytes(), [0])
    assert torchs > 1.95 * ours


def test_every_row_has_its_limits() -> None:
    limits = json.loads(device_targets.LIMITS.read_text())
    assert {table: set(limits[table]) for table in ("block", "step")} == {
        table: set(TABLES[table]) for table in ("block", "step")
    }


# ---- messages of a miss ----


def test_a_miss_is_told() -> None:
    found = {
        ("block", "GPT, 1d"): {"exposed": 6, "graph breaks": 13},
        ("block", "Llama, 1d, sequence, overlap"): {"exposed": 3, "exposed share": 0.2},
        ("block", "Llama, 2d, overlap"): {"exposed": 8, "exposed share": 0.26},
    }
    assert wrong(found) == [
        "MISSED exposed, 1d with sequence and overlap: Llama, 1d, sequence, overlap: 3, asked at most 2",
        "MISSED exposed share, a layer with overlap: Llama, 2d, overlap: 0.26, asked at most 0.25",
        "MISSED graph breaks, a block: GPT, 1d: 13, asked at most 0",
    ]


def test_a_known_miss_is_told_with_its_reason_and_is_not_wrong() -> None:
    found = {("bytes", "the loss"): {"bytes a logit": 22}}
    (miss,) = misses(found)
    assert str(miss).endswith(
        "22, asked at most 16 (known: torch's softmax makes a copy of bfloat16 in float32 first; compiled"
        " (train.compile_components) it does not)"
    )
    assert wrong(found) == []


def test_a_known_miss_that_is_none_any_more_is_told() -> None:
    found = {("bytes", "the loss"): {"bytes a logit": 16}}
    assert wrong(found) == ["the loss meets 'bytes a logit, the loss' again: take it out of KNOWN"]


def test_nothing_is_asked_of_plain_torch() -> None:
    assert misses({("step", "GPT, plain torch"): {"reads": 9, "synchronize": 9}}) == []


def test_a_count_above_its_limit_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_targets, "LIMITS", tmp_path / "limits.json")
    counts = dict.fromkeys(LIMITED, 7)
    device_targets.write_limits({("block", "GPT, 1d"): counts, ("bytes", "the loss"): {"bytes a logit": 12}})
    device_targets.write_limits({("step", "1d"): counts}, keep_others=True)
    assert wrong({("block", "GPT, 1d"): counts}) == []
    assert wrong({("block", "GPT, 1d"): counts | {"copies": 8}}) == ["block, GPT, 1d: copies 8, limit 7"]
    (problem,) = wrong({("block", "GPT, 4d"): counts})
    assert problem.startswith("block, GPT, 4d: no limits")
    monkeypatch.setattr(device_targets, "torch_version", lambda: "1.0")
    assert wrong({("block", "GPT, 1d"): counts | {"copies": 8}}) == [], "another torch has other operations"


# ---- counts, and references ----


def test_a_fused_optimizer_reads_and_writes_what_it_is_given() -> None:
    weight = torch.nn.Parameter(torch.zeros(256))
    optimizer = torch.optim.AdamW([weight], fused=True)
    weight.grad = torch.ones(256)
    optimizer.step()
    with count_kernels() as counts:
        optimizer.step()
    read, written = 4, 3  # weight, gradient, two moments; all but the gradient
    assert counts.by_name["_fused_adamw_"] == 1
    assert counts.num_bytes >= 4 * 256 * (read + written)


def test_what_touches_no_tensor_is_no_kernel() -> None:
    """DeepSpeed asks the processor whether it computes fp16, and optimizers mark their steps for a profiler."""
    with count_kernels() as counts:
        torch.ops.mkldnn._is_mkldnn_fp16_supported()
        with torch.profiler.record_function("step"):
            torch.zeros(2)
    assert counts.by_name == {"zeros": 1}
    assert counts.kernels == 1


def waited_for(way: str) -> int:
    """Return exposed collectives: one starts, a product runs, another starts, and both are waited for."""
    with fake_world(0, 2), count_kernels() as counts:
        axis = Groups(Mesh(tensor=LAYOUTS["1d-2"])).axis("y")
        first = start_all_reduce_(torch.ones(4), axis)
        torch.ones(2, 2) @ torch.ones(2, 2)
        second = start_all_reduce_(torch.ones(4), axis)
        for pending in (first, second) if way == "oldest first" else (second, first):
            pending.wait()
        first.wait()  # a second time
    return counts.exposed


def test_a_wait_is_for_its_own_collective() -> None:
    """The order does not matter: a linear may wait for a collective that another one started."""
    assert in_forks(waited_for, ["oldest first", "newest first"]) == [1, 1]


def test_counts_add_up_and_what_was_before_is_taken_off() -> None:
    with count_kernels() as first:
        torch.ones(4).clone()
    with count_kernels() as other:
        torch.ones(8) + 1
    assert first + other - first == other


def test_the_plain_llama_block_computes_what_ours_does() -> None:
    groups = Groups(Mesh())
    ours = Block(groups, HIDDEN, HEADS, form=FORMS["Llama"]).double()
    initialize(ours, groups, seed=1)
    plain = LlamaBlock(HIDDEN, HEADS, KV_HEADS).double()
    plain.load_state_dict(ours.state_dict())
    x = torch.randn(2, 8, HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    # 1e-12 for sums of 256 products of numbers near 1, in float64
    torch.testing.assert_close(plain(x), ours(x), rtol=1e-12, atol=1e-12)
