"""`dslpar prove CFG` on every shipped config and every plan of docs/plans.md."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dslpar.layout.resolve import Job
from dslpar.linter import check
from dslpar.parity.prove import prove
from tests.support.paths import ROOT
from tests.support.versions import HAS_TRANSFORMERS, NO_TRANSFORMERS

FOLDERS = ("configs", "configs/libai", "examples/plans")
CONFIGS = sorted(str(path.relative_to(ROOT)) for folder in FOLDERS for path in (ROOT / folder).glob("*.py"))


def job_of(path: str) -> Job:
    """Return the job in the world of its own comments, or in the smallest world that passes lint."""
    config = check.load(path)
    named = [int(size) for size in re.findall(r"(?:--world-size|--num_gpus) (\d+)", Path(ROOT, path).read_text())]
    for world_size in (*named, 8, 16, 64, 256, 1024):
        checked = check.check(config, world_size, forecasts=False)
        if not checked.has_errors:
            return checked.job
    raise AssertionError(f"{path} is legal in no world: {checked.findings}")


@pytest.mark.prove  # `make test` trains two of them: tests/system/test_example_configs.py
@pytest.mark.parametrize("path", CONFIGS)
def test_a_shipped_config_is_proved(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    job = job_of(path)
    if getattr(job.spec.model, "is_of_transformers", False) and not HAS_TRANSFORMERS:
        pytest.skip(NO_TRANSFORMERS)
    proof = prove(job)
    assert proof.verdict == "proved", (proof.first_difference, proof.findings, proof.checks)
