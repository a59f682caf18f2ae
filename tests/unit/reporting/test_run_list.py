"""The list of runs: the status of each from its folder; no folder's contents end the list."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dslpar.cli.main import main
from dslpar.linter import check
from dslpar.reporting import run_dir, run_list
from dslpar.reporting.run_list import Run, find_runs, read_run
from tests.support.runs import CONFIG, write_config

LOG = "2026-01-02 03:04:05,678 dslpar INFO "
ERROR = "2026-01-02 03:04:05,678 dslpar ERROR "
BEGUN = LOG + "cfg.py: world of 4 = pipeline 2 * data 1 * tensor 2 (1d), on cpu; written to out\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return the folder of a run of 3 steps on 4 ranks that has taken two steps."""
    config = check.load(
        str(write_config(tmp_path, CONFIG + "parallel = dict(pipeline=2, tensor=dict(size=2, mode='1d'))\n"))
    )
    out = tmp_path / "runs" / "out"
    out.mkdir(parents=True)
    (out / "config.yaml").write_text(run_dir.config_yaml(check.resolve(config, 4), config))
    (out / "log.txt").write_text(BEGUN)
    records(out, 1, 2)
    return out


def records(folder: Path, *steps: int, **values: float) -> None:
    with open(folder / "metrics.jsonl", "a", encoding="utf-8") as file:
        for step in steps:
            record = {"step": step, "loss": 4.0 / step, "tokens_per_s": 100.0 * step, "tokens": 64.0 * step, **values}
            run_dir.write_record(file, record)


def log(folder: Path, text: str) -> None:
    (folder / "log.txt").write_text(BEGUN + text)


def only(root: Path) -> Run:
    (run,) = find_runs(root)
    return run


def test_a_run_is_described_by_its_folder(folder: Path) -> None:
    records(folder, 3, eval_loss=1.5)
    run = only(folder.parent)
    assert (run.name, run.state, run.step, run.steps) == ("out", "finished", 3, 3)
    assert (run.loss, run.eval_loss, run.eval_step, run.per_s, run.unit) == (4 / 3, 1.5, 3, 200.0, "tokens")
    assert (run.layout, run.world_size) == ("pipeline 2 * data 1 * tensor 2 (1d), ZeRO 0", 4)
    assert time.time() - 60 < (run.updated_s or 0) <= time.time() + 1
    assert run.problems == ()
    assert run.reason == ""


def test_the_stages_of_each_rank_are_listed_and_a_run_of_before_has_one(folder: Path) -> None:
    config = check.load(
        str(write_config(folder.parent.parent, CONFIG + "parallel = dict(pipeline=2)\n")),
        ["model.num_layers=4", "batch.accumulation=2", "schedule=interleaved"],
    )
    (folder / "config.yaml").write_text(run_dir.config_yaml(check.resolve(config, 2), config))
    assert only(folder).layout == "pipeline 2 (2 stages each) * data 1 * tensor 1, ZeRO 0"
    plain = yaml.safe_load((folder / "config.yaml").read_text())
    assert plain["resolved"]["actual_pipeline_stage_id"] == [0, 1, 0, 1]
    assert plain["resolved"]["schedule"]["type"] == "interleaved"
    del plain["resolved"]["schedule"]
    (folder / "config.yaml").write_text(json.dumps(plain))
    assert only(folder).layout == "pipeline 2 * data 1 * tensor 1, ZeRO 0"


def test_steps_that_nobody_wrote_are_the_default(folder: Path) -> None:
    text = (folder / "config.yaml").read_text()
    (folder / "config.yaml").write_text(text.replace("  steps: 3\n", ""))
    assert only(folder).steps == 100


def test_images_are_counted_as_images(folder: Path) -> None:
    (folder / "metrics.jsonl").write_text('{"step": 1, "loss": null, "images_per_s": 7.0, "skipped": true}\n')
    run = only(folder)
    assert (run.unit, run.per_s, run.loss, run.step) == ("images", 7.0, None, 1)


@pytest.mark.parametrize(
    ("text", "state", "reason"),
    [
        ("", "failed", "it ended after step 2, and log.txt does not say why"),
        (LOG + "step 2/3  loss 2.0\n", "failed", "it ended after step 2, and log.txt does not say why"),
        (LOG + "told to stop: step 2 is saved in out/checkpoints/step_000002\n", "stopped", "told to stop: step 2 is"),
        (
            LOG + "interrupted; --resume goes on from step 1\n",
            "interrupted",
            "interrupted; --resume goes on from step 1",
        ),
        (
            LOG + "dslpar launch: stopped by SIGINT, after step 2; no process is left\n",
            "interrupted",
            "dslpar launch: stopped by SIGINT, after step 2",
        ),
        (ERROR + "cfg.py:1:1: PRE230 not-finite: ...\n  help: a smaller lr\n", "failed", "cfg.py:1:1: PRE230 not-fi"),
        (
            ERROR + "dslpar launch: rank 1 of 4 on h, step 2, failed first:\n    Traceback\n    ValueError: bad\n",
            "failed",
            "dslpar launch: rank 1 of 4 on h, step 2, failed first: ValueError: bad",
        ),
        (
            ERROR + "no\n" + BEGUN,
            "failed",
            "it ended after step 2, and log.txt does not say why",
        ),  # an error of an earlier leg
    ],
    ids=["silent", "mid-step", "stopped", "Ctrl-C", "Ctrl-C of dslpar launch", "finding", "traceback", "earlier-leg"],
)
def test_how_a_run_ended_is_read_from_its_log(folder: Path, text: str, state: str, reason: str) -> None:
    log(folder, text)
    run = only(folder)
    assert run.state == state
    assert run.reason.startswith(reason)


def test_a_run_that_failed_before_its_first_step(folder: Path) -> None:
    (folder / "metrics.jsonl").unlink()
    (folder / ".lock").touch()
    assert (only(folder).state, only(folder).reason) == ("unknown", "no metrics")
    log(folder, ERROR + "cfg.py:1:1: CKP204 ...\n")
    assert only(folder).state == "failed"


# ---- the lock ----


def hold_lock(folder: Path, ready: int) -> NoReturn:
    """Take the lock as a run does, and keep it."""
    try:
        config = check.load(str(folder.parents[1] / "cfg.py"), [f"train.output_dir={folder}"])
        run_dir.lock_run_folder(check.resolve(config, 4), config)
        os.write(ready, b"+")
        signal.pause()
    finally:
        os._exit(1)


@pytest.fixture
def holder(folder: Path) -> Iterator[int]:
    """Yield the pid of a process that holds the lock."""
    reads, writes = os.pipe()
    pid = os.fork()
    if pid == 0:
        hold_lock(folder, writes)
    os.close(writes)
    assert os.read(reads, 1) == b"+"
    yield pid
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    os.close(reads)


def test_a_run_whose_process_holds_the_lock_is_running(folder: Path, holder: int) -> None:
    assert only(folder).state == "running"
    records(folder, 3)
    assert only(folder).state == "running", "its last checkpoint is still to come"


def test_a_process_that_was_killed_holds_no_lock(folder: Path, holder: int) -> None:
    os.kill(holder, signal.SIGKILL)
    os.waitid(os.P_PID, holder, os.WEXITED | os.WNOWAIT)
    assert (folder / ".lock").exists()
    assert only(folder).state == "failed"


def test_to_ask_for_the_lock_takes_none(folder: Path) -> None:
    """A run that starts while the list is made must not take the list for another run."""
    (folder / ".lock").touch()
    (folder / ".lock").chmod(0o400)
    assert run_dir.is_locked(folder) is False
    with open(folder / ".lock", "rb") as file:
        before = os.fstat(file.fileno())
        assert only(folder).state == "failed"
        assert os.fstat(file.fileno()).st_mtime == before.st_mtime


def test_without_locks_a_run_that_has_just_written_counts_as_running(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(file: int, what: int, argument: bytes) -> bytes:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    (folder / ".lock").touch()
    monkeypatch.setattr(fcntl, "fcntl", none)
    run = only(folder)
    assert run.state == "running"
    assert "no locks" in run.problems[0]
    os.utime(folder / "metrics.jsonl", (1, 1))
    assert only(folder).state == "failed"


# ---- run folders, and damaged ones ----


def test_nested_runs_are_found_and_what_runs_write_is_not_searched(folder: Path) -> None:
    for inside in ("earlier/1", "checkpoints/step_000002", "sources", ".hidden", "tensorboard", "deep/er"):
        (folder / inside).mkdir(parents=True)
        records(folder / inside, 1)
    (folder.parent / "config_of_another_program").mkdir()
    (folder.parent / "config_of_another_program" / "config.yaml").write_text("a: 1\n")
    (folder / "deep" / "round").symlink_to(folder)
    assert [run.name for run in find_runs(folder.parent)] == ["out", "out/deep/er", "out/earlier/1"]
    with pytest.raises(FileNotFoundError):
        list(find_runs(folder / "nowhere"))


def test_numbers_in_names_count(tmp_path: Path) -> None:
    for name in ("run10", "run9", "run", "10", "9", "a2b10", "a2b9", "²"):
        (tmp_path / name).mkdir()
        records(tmp_path / name, 1)
    assert [run.name for run in find_runs(tmp_path)] == ["9", "10", "a2b9", "a2b10", "run", "run9", "run10", "²"]


def put_folder_in_place_of(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGE: dict[str, Callable[[Path], object]] = {
    "config.yaml: missing": lambda out: (out / "config.yaml").unlink(),
    "config.yaml: not YAML": lambda out: (out / "config.yaml").write_text("a: [1\n"),
    "config.yaml: not a config": lambda out: (out / "config.yaml").write_text("- 1\n"),
    "config.yaml: has no layout": lambda out: (out / "config.yaml").write_text("train: {steps: 3}\n"),
    "config.yaml: more than": lambda out: os.truncate(out / "config.yaml", 1 << 30),
    "metrics.jsonl: 1 line is not a record": lambda out: (out / "metrics.jsonl").write_text("\x00\xff\n"),
    "metrics.jsonl: the last line is cut off": lambda out: os.truncate(out / "metrics.jsonl", 200),
    "metrics.jsonl: no file": lambda out: put_folder_in_place_of(out / "metrics.jsonl"),
}


@pytest.mark.parametrize("problem", DAMAGE)
def test_damage_is_told_and_the_other_runs_are_listed(folder: Path, problem: str) -> None:
    whole = folder.parent / "whole"
    whole.mkdir()
    for name in ("config.yaml", "log.txt", "metrics.jsonl"):
        (whole / name).write_bytes((folder / name).read_bytes())
    DAMAGE[problem](folder)
    damaged, intact = find_runs(folder.parent)
    assert [found for found in damaged.problems if found.startswith(problem)], damaged
    assert (intact.name, intact.problems, intact.step) == ("whole", (), 2)


@pytest.mark.parametrize(
    "text", [b"", b"\xff\xfe\x00", b"&a [*a]", b"[" * 9000, b"a: &x {b: *x}\ntrain: *x", b"? {}\n: 1"]
)
def test_no_config_ends_the_list(folder: Path, text: bytes) -> None:
    (folder / "config.yaml").write_bytes(text)
    assert only(folder).problems


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inside: st.lists(inside, max_size=3) | st.dictionaries(st.text(max_size=5), inside, max_size=3),
    max_leaves=6,
)
CONFIGS = st.fixed_dictionaries(
    {},
    optional={
        "train": VALUES | st.fixed_dictionaries({"steps": VALUES}),
        "zero": VALUES | st.fixed_dictionaries({"stage": VALUES}),
        "resolved": VALUES
        | st.fixed_dictionaries(
            {
                "world_size": VALUES,
                "parallel": st.fixed_dictionaries({"pipeline": VALUES, "data": VALUES, "tensor": VALUES}),
                "schedule": VALUES | st.fixed_dictionaries({"num_model_chunks": VALUES}),
            }
        ),
    },
)
RECORDS = st.lists(
    VALUES | st.fixed_dictionaries({"step": VALUES, "loss": VALUES, "tokens_per_s": VALUES, "eval_loss": VALUES})
)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(CONFIGS | st.binary(), RECORDS | st.binary(), st.text() | st.binary())
def test_whatever_a_folder_holds_it_is_listed(folder: Path, config: object, records: object, text: str | bytes) -> None:
    (folder / "config.yaml").write_bytes(config if isinstance(config, bytes) else json.dumps(config).encode())
    lines = records if isinstance(records, bytes) else "".join(json.dumps(each) + "\n" for each in records).encode()  # type: ignore[attr-defined]
    (folder / "metrics.jsonl").write_bytes(lines)
    (folder / "log.txt").write_bytes(text if isinstance(text, bytes) else text.encode(errors="surrogatepass"))
    run = only(folder)
    assert run.state in run_list.STATES
    assert main(["runs", str(folder), "--sort", "loss"]) == 0
    assert main(["runs", str(folder), "--format", "json"]) == 0


def test_two_hundred_runs_take_a_blink(folder: Path) -> None:
    with open(folder / "metrics.jsonl", "a", encoding="utf-8") as file:
        file.write("".join(f'{{"step": {step}, "loss": 1.0}}\n' for step in range(3, 30_000)))
    for number in range(200):
        one = folder.parent / f"{number:03}"
        one.mkdir()
        for path in folder.iterdir():
            os.link(path, one / path.name)
    began = time.process_time()
    runs = [read_run(path) for path in run_list.run_folders(folder.parent)]
    assert len(runs) == 201
    assert all(run.step == 29_999 for run in runs)
    assert time.process_time() - began < 2.0
