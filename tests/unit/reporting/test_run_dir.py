"""The run folder: its lock, config.yaml, and what is written to and removed from metrics.jsonl."""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from dslpar.linter import check
from dslpar.reporting import run_dir
from tests.support.runs import CONFIG, write_config


def test_a_file_system_without_locks_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def none(file: int, how: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "lockf", none)
    config = check.load(str(write_config(tmp_path)), [f"train.output_dir={tmp_path / 'out'}"])
    run_dir.lock_run_folder(check.resolve(config, 1), config)
    assert "no locks on this file system (No locks available): run one at a time there" in capsys.readouterr().out


def test_libai_s_form_gets_its_id_lists(tmp_path: Path) -> None:
    text = CONFIG + "train.update(dist=dict(pipeline_parallel_size=2, custom_pipeline_stage_id=[0, 1]))\n"
    config = check.load(str(write_config(tmp_path, text)))
    (tmp_path / "config.yaml").write_text(run_dir.config_yaml(check.resolve(config, 2), config))
    again = check.load(str(tmp_path / "config.yaml"))
    plain: Any = again.root.plain()
    assert plain["train"]["dist"]["actual_pipeline_stage_id"] == [0, 1]
    assert plain["train"]["dist"]["auto_pipeline_stage_id"] == [0, 1]
    assert not [finding for finding in check.lint(again, 2) if not finding.code.startswith("PERF")]
    assert check.resolve(again, 4).mesh.data == 2, "not bound to the world that it ran in"


def test_numbers_that_are_not_finite_become_null() -> None:
    file = StringIO()
    run_dir.write_record(file, {"step": 3, "loss": math.nan, "grad_norm": math.inf, "lr": 0.1})
    assert json.loads(file.getvalue()) == {"step": 3, "loss": None, "grad_norm": None, "lr": 0.1, "skipped": True}


def test_metrics_are_cut_behind_the_checkpoint_whatever_else_stands_there(tmp_path: Path) -> None:
    whole = [json.dumps({"step": step, "loss": 1.0}) + "\n" for step in range(1, 8)]
    broken = ['{"step": 5, "lo\n', "\x00\x00\n", "[3]\n", '{"loss": 1.0}\n']
    (tmp_path / run_dir.METRICS).write_text("".join(whole[:3] + broken + whole[3:]) + '{"step": 2')
    run_dir.truncate_metrics(tmp_path, 5)
    assert (tmp_path / run_dir.METRICS).read_text() == "".join(whole[:5])


def test_an_error_is_added_to_the_log_of_a_run_that_has_just_written_there_alone(tmp_path: Path) -> None:
    log = tmp_path / run_dir.LOG
    run_dir.append_to_log(tmp_path, "ERROR", "no log", 0)
    assert not log.exists()
    log.write_text("before\n")
    os.utime(log, (1000, 1000))
    run_dir.append_to_log(tmp_path, "ERROR", "of a job that never wrote here", 2000)
    assert log.read_text() == "before\n"
    run_dir.append_to_log(tmp_path, "ERROR", "rank 1 failed first:\n  ValueError\x1b\n", 500)
    before, line, more = log.read_text().splitlines()
    assert (before, more) == ("before", "    ValueError\\x1b")
    assert line.endswith(" dslpar ERROR rank 1 failed first:")
