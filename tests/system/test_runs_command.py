"""`dslpar runs` beside real runs: running, killed, resumed, stopped by a signal, finished."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from dslpar.reporting.run_list import Run, read_run
from tests.support.forked_training import ForkedJob, start_job
from tests.support.runs import CONFIG, write_config

TWO_STAGES = CONFIG.replace("steps=3", "steps=2000, save_interval=5") + "parallel = dict(pipeline=2)\n"


def wait_for_step(folder: Path, job: ForkedJob, step: int) -> Run:
    """Return the run's status once it has reached a step."""
    while True:
        assert job.runs
        if (folder / "config.yaml").exists() and ((run := read_run(folder)).step or 0) >= step:
            return run
        time.sleep(0.05)
    raise AssertionError(f"no step {step} after a minute")


@pytest.mark.prove
def test_each_state_of_a_run(tmp_path: Path) -> None:
    out, said = tmp_path / "out", tmp_path / "said.txt"
    argv = ["--config", str(write_config(tmp_path, TWO_STAGES)), f"train.output_dir={out}", "--resume"]
    with start_job(2, argv, said) as job:
        run = wait_for_step(out, job, 6)
        assert (run.state, run.steps, run.layout) == ("running", 2000, "pipeline 2 * data 1 * tensor 1, ZeRO 0")
        assert run.problems == ()
        job.kill()
        job.wait(30)
    killed = read_run(out)
    assert killed.state == "failed"
    assert killed.reason == f"it ended after step {killed.step}, and log.txt does not say why"

    with start_job(2, argv, said) as job:
        assert wait_for_step(out, job, (killed.step or 0) + 2).state == "running"
        os.kill(job.pids[1], signal.SIGTERM)
        assert job.wait(60) == [75, 75], said.read_text()
    stopped = read_run(out)
    assert stopped.state == "stopped"
    assert stopped.reason.startswith(f"told to stop: step {stopped.step} is saved in {out}")

    with start_job(2, [*argv, f"train.steps={(stopped.step or 0) + 3}"], said) as job:
        assert job.wait(60) == [0, 0], said.read_text()
    finished = read_run(out)
    assert (finished.state, finished.step, finished.reason) == ("finished", (stopped.step or 0) + 3, "")
    assert finished.problems == ()
