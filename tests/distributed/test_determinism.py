"""`train.deterministic`: what torch, cuBLAS and NCCL are told before a rank computes; the user's own word stands."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

import dslpar
from dslpar.distributed.determinism import VARIABLES, deterministic_environment
from dslpar.layout.resolve import Job, resolve
from dslpar.schema import sections
from tests.distributed.models.test_sequential import PIPE, written
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


def test_what_the_user_says_stands() -> None:
    assert deterministic_environment(job(True), {"NCCL_ALGO": "Tree"}) == {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    assert deterministic_environment(job(False), {}) == {}
