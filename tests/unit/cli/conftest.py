"""A lint-clean config for eight ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.lint import MODEL


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "cfg.py"
    parallel = "parallel = dict(pipeline=2, tensor=dict(size=2, mode='1d'))\n"
    path.write_text(MODEL + parallel + "batch = dict(accumulation=8)\n")
    return path
