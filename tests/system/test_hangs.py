"""A rank that hangs before the first step or after the last ends the job, with the stacks of all ranks."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from dslpar.checkpoint import folder, loading
from dslpar.distributed import bootstrap
from tests.support.forked_training import start_job
from tests.support.runs import write_config
from tests.support.sampling import sampled

PLACES = {
    "verifying": (folder, "verify"),
    "loading": (loading, "load_index"),
    "ending": (bootstrap, "teardown_distributed"),
}
"""Phase -> the function in which rank 1 hangs."""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return the command line of a run of two ranks that has saved step 1."""
    path = tmp_path_factory.mktemp("saved")
    argv = ["--config", str(write_config(path)), "--resume", f"train.output_dir={path / 'out'}"]
    with start_job(2, [*argv, "train.steps=1"], path / "said.txt") as job:
        assert job.wait(120) == [0, 0], (path / "said.txt").read_text()
    return argv


@pytest.mark.parametrize("phase", sampled(["verifying", "loading", "ending"], {"ending"}))
def test_a_hang_is_found_in(phase: str, saved: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, name = PLACES[phase]
    function = getattr(module, name)

    def hang_in_rank_1(*args: Any, **kwargs: Any) -> Any:
        if os.environ["RANK"] == "1":
            time.sleep(600)
        return function(*args, **kwargs)

    monkeypatch.setattr(module, name, hang_in_rank_1)
    said = tmp_path / "said.txt"
    # An evaluation writes no checkpoint, so the next case finds the same one.
    with start_job(2, [*saved, "--eval-only", "train.eval_steps=1", "train.step_timeout=0.5"], said) as job:
        assert 0 not in job.wait(60), said.read_text()
    text = said.read_text()
    assert (
        f"{phase}{' after step 1' if phase == 'ending' else ''} takes longer than 3 s); it is in hang_in_rank_1 ("
        in text
    )
    assert "rank 1 of 2 on" in text
