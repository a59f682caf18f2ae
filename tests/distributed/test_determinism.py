"""`train.deterministic`: settings of torch, cuBLAS and NCCL before a rank computes; the user's own win."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

import dslpar
from dslpar.distributed.determinism import VARIABLES
from dslpar.distributed.device_environment import device_environment
from dslpar.layout.resolve import Job, resolve
from dslpar.linter import check
from dslpar.schema import sections
from tests.support.plain_models import PIPE, written
from tests.support.ranks import on_ranks


def job(deterministic: bool) -> Job:
    train = sections.Train(deterministic=deterministic)
    return resolve(sections.Spec(model=sections.OtherModel(target="Sequential"), train=train), 1)


def _started(path: str) -> tuple[bool, dict[str, str | None]]:
    dslpar.start(path)
    return torch.are_deterministic_algorithms_enabled(), {name: os.environ.get(name) for name in VARIABLES}


@pytest.mark.parametrize("deterministic", [True, False])
def test_a_program_s_ranks_are_told(deterministic: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    path = written(tmp_path, PIPE + f"train = dict(steps=1, deterministic={deterministic})\n")
    expected: Any = VARIABLES if deterministic else dict.fromkeys(VARIABLES)
    assert on_ranks(2, _started, path, init="deepspeed") == [(deterministic, expected)] * 2


def _drawn(path: str, seed: int) -> list[float]:
    dslpar.start(path, [f"train.seed={seed}"])
    return torch.nn.Linear(2, 2).weight.flatten().tolist()


def test_a_model_that_a_program_builds_after_start_follows_the_seed(tmp_path: Path) -> None:
    path = written(tmp_path, PIPE + "train = dict(steps=1)\n")
    first, again, other = (on_ranks(2, _drawn, path, seed, init="deepspeed") for seed in (3, 3, 4))
    torch.manual_seed(3)
    expected = torch.nn.Linear(2, 2).weight.flatten().tolist()
    assert first == again == [expected, expected], "on every rank, in every run"
    assert other[0] != expected


def test_what_the_user_says_stands() -> None:
    assert device_environment(job(True), {"NCCL_ALGO": "Tree"} | ALLOCATOR) == {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    assert device_environment(job(False), ALLOCATOR) == {}


ALLOCATOR = {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:128"}


@pytest.mark.parametrize(
    ("parallel", "world", "several"),
    [
        ({}, 1, False),
        ({}, 4, False),  # only gradients are sent
        (dict(tensor=dict(size=2, mode="1d")), 2, False),
        (dict(tensor=dict(size=2, mode="1d")), 4, True),  # gradients, while the layers' backward sends
        (dict(pipeline=2), 2, False),
        (dict(pipeline=2), 4, True),
        (dict(tensor=dict(size=4, mode="2d")), 4, True),
        (dict(tensor=dict(size=8, mode="2.5d", depth=2)), 8, True),
        (dict(tensor=dict(size=8, mode="3d")), 8, True),
    ],
)
def test_what_nccl_and_the_allocator_are_told(parallel: dict[str, Any], world: int, several: bool) -> None:
    """NCCL gets a launch order if several communicators are in flight; the allocator gets expandable segments."""
    text = "model = dict(type='GPT', num_layers=2, hidden_size=64, num_heads=8, vocab_size=256, max_seq_len=32)\n"
    text += f"parallel = {parallel!r}\n"
    told = device_environment(check.resolve(check.load_text(text, "cfg.py"), world), {})
    assert told.pop("NCCL_LAUNCH_ORDER_IMPLICIT", None) == ("1" if several else None)
    assert set(told.values()) == {"expandable_segments:True"}
    (name,) = told
    assert name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
