"""Shards: the elements each rank writes, and where DeepSpeed's optimizers keep master weights and step counts."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from dslpar.checkpoint import shards
from dslpar.checkpoint.shards import SPLIT_FROM, Master, set_scalars


@given(st.sampled_from([1, 7, SPLIT_FROM - 1, SPLIT_FROM, SPLIT_FROM + 5]), st.integers(0, 9), st.integers(1, 7))
def test_copies_write_each_element_once(length: int, number: int, copies: int) -> None:
    p = nn.Parameter(torch.empty(length, device="meta"))
    written = [shards._replica_range(p, number, index, copies) for index in range(copies)]
    covered = sorted((each.start, each.stop) for each in written if each)
    assert [covered[0][0], covered[-1][1]] == [0, length]
    assert all(before[1] == after[0] for before, after in pairwise(covered))


def _master(group: dict[str, Any], state: dict[str, Any]) -> Master:
    p = nn.Parameter(torch.zeros(2))
    return Master(p, 0, 0, 2, {p: state}, group, 0)


@pytest.mark.parametrize(
    ("stored", "group", "expected"),
    [
        (torch.tensor(3.0), {"bias_correction": True}, 3),
        (3, {"capturable": False}, torch.tensor(3.0)),
        (torch.tensor(3.0), {"capturable": False}, torch.tensor(3.0)),
        (3, {"bias_correction": True}, 3),
    ],
)
def test_a_step_is_counted_as_the_optimizer_counts(stored: Any, group: dict[str, Any], expected: Any) -> None:
    """DeepSpeedCPUAdam counts by numbers, torch by tensors."""
    state: dict[str, Any] = {}
    set_scalars(_master(group, state), {"step": stored})
    assert type(state["step"]) is type(expected)
    assert state["step"] == expected


def test_a_tensor_that_a_kernel_reads_is_written_into() -> None:
    kept = torch.tensor(1.0)
    set_scalars(_master({"capturable": False}, {"step": kept}), {"step": torch.tensor(5.0)})
    assert kept == 5


def test_fp16_masters_are_pieces_of_a_flat_tensor() -> None:
    """They belong to FP16_Optimizer, which FusedAdam gets."""
    weights = [nn.Parameter(torch.arange(begin, begin + 3.0).half()) for begin in (0, 10, 20)]
    optimizer = FP16_Optimizer(torch.optim.AdamW(weights, weight_decay=0.0), verbose=False)
    masters = dict(shards._fp16_masters(optimizer))
    assert [masters[p].view_of(masters[p].tensor).tolist() for p in weights] == [p.tolist() for p in weights]
