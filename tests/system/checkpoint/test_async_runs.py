"""Runs of train.py with asynchronous saves, on a disk that is slow, full or never answers.

The forked ranks inherit a slow `os.fsync`. For one file of one checkpoint it waits until the run has done what the test
checks, so no test depends on speed. Everything else is the program itself.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import pytest
import torch

from dslpar.training import loop
from tests.support.forked_training import ForkedJob, start_job
from tests.support.runs import metrics, write_config
from tests.support.sampling import sampled

CONFIG = """\
model = dict(type='GPT', num_layers=2, hidden_size=16, num_heads=2, vocab_size=256, max_seq_len=16, dropout=0.1)
optimizer = dict(type='AdamW', lr=1e-2)
zero = 1
batch = dict(global_size=4)
data = dict(files=['text.txt'])
"""
LONGEST_S = 60.0
"""A write that is held up longer fails, and so does the run. The test then shows the condition that did not come."""
RANKS = 2


class Run:
    """A run of two ranks below `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.out, self.said = folder, folder / "out", folder / "said.txt"
        folder.mkdir(exist_ok=True)
        self.config = write_config(folder, CONFIG)

    @property
    def root(self) -> Path:
        return self.out / "checkpoints"

    @property
    def names(self) -> list[str]:
        """Return the names in the folder of checkpoints."""
        return sorted(path.name for path in self.root.iterdir())

    @property
    def num_lines(self) -> int:
        """Return the number of steps in metrics.jsonl."""
        path = self.out / "metrics.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def start(self, *words: str) -> Any:
        return start_job(RANKS, ["--config", str(self.config), f"train.output_dir={self.out}", *words], self.said)

    def ended(self, statuses: list[int], *words: str, idle_s: float = 90) -> str:
        """Wait until the run ends with these statuses, and return its output."""
        with self.start(*words) as job:
            assert job.wait(idle_s) == statuses, self.said.read_text()
        return self.said.read_text()

    def order(self, *lines: str) -> list[int]:
        """Return the positions of these lines in the log; each must occur once."""
        log = (self.out / "log.txt").read_text()
        for line in lines:
            assert len(re.findall(line, log)) == 1, f"{line}:\n{log}"
        return [found.start() for line in lines if (found := re.search(line, log))]


def published(step: int) -> str:
    """Return the log's line on a published checkpoint."""
    return rf"checkpoint of step {step} in "


def taken(step: int) -> str:
    """Return the log's line on a taken checkpoint."""
    return rf"step {step}/\d+  loss"


def slow(monkeypatch: pytest.MonkeyPatch, step: int, rank: int, until: Callable[[], object]) -> None:
    """Make the sync of that rank's tensors of that step last until the condition holds."""
    real, held_up = os.fsync, f"step_{step:06d}.part/tensors/{rank:05d}.safetensors"

    def fsync(file: int) -> None:
        if os.readlink(f"/proc/self/fd/{file}").endswith(held_up):
            deadline = time.monotonic() + LONGEST_S
            while not until():
                if time.monotonic() > deadline:
                    raise OSError(errno.ETIMEDOUT, "held up for too long")
                time.sleep(0.005)
        real(file)

    monkeypatch.setattr(os, "fsync", fsync)


def tensors_of(folder: Path) -> dict[str, bytes]:
    """Return the bytes of a checkpoint's tensors and index."""
    paths = [*sorted((folder / "tensors").iterdir()), folder / "index.json"]
    return {path.name: path.read_bytes() for path in paths}


def states_of(folder: Path) -> list[Any]:
    """Return counters and schedulers, and each rank's random state of torch."""
    ranks = [torch.load(path, weights_only=True) for path in sorted((folder / "ranks").iterdir())]
    return [torch.load(folder / "state.pt"), *(state["random"]["torch"].tolist() for state in ranks)]


# ---- steps continue ----


@pytest.mark.parametrize("rank", sampled(range(RANKS), {1}))
def test_steps_go_on_and_it_is_published_when_the_last_rank_has_written(
    rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("train.steps=60", "train.save_interval=20", "optimizer.lr=1e-3")
    waited = Run(tmp_path / "waited")
    waited.ended([0, 0], *words, "train.async_save=False")
    for step in (20, 40):
        line, following = waited.order(published(step), taken(step + 1))
        assert line < following
    run = Run(tmp_path / "run")

    def five_steps_on() -> bool:
        assert not (run.root / "step_000020").exists()
        return run.num_lines >= 25

    slow(monkeypatch, 20, rank, five_steps_on)
    run.ended([0, 0], *words)
    done, line, due = run.order(taken(25), published(20), taken(40))
    assert done < line < due, "not before, and no later than at the next agreement: the next save is far away"
    assert run.names == waited.names == ["step_000020", "step_000040", "step_000060"]
    for name in run.names:
        assert tensors_of(run.root / name) == tensors_of(waited.root / name), "of its step, not of those after it"
        assert states_of(run.root / name) == states_of(waited.root / name)
    same = ("step", "loss", "grad_norm", "lr")
    numbers = [[[line[key] for key in same] for line in metrics(each.out)] for each in (run, waited)]
    assert numbers[0] == numbers[1]


def test_one_at_a_time_and_no_step_s_time_has_the_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The save of step 4 is due while that of step 2 is held up, until a second and a half after step 4."""
    run, seen = Run(tmp_path / "run"), list[float]()

    def long_after_step_4() -> bool:
        assert [path.name for path in run.root.glob("*.part")] == ["step_000002.part"]
        assert run.num_lines <= 4, "step 5 has waited"
        if run.num_lines == 4:
            seen.append(time.monotonic())
        return bool(seen) and time.monotonic() - seen[0] > 1.5

    slow(monkeypatch, 2, 1, long_after_step_4)
    run.ended([0, 0], "train.steps=6", "train.save_interval=2")
    places = run.order(taken(4), published(2), taken(5), published(4), published(6))
    assert places == sorted(places)
    assert run.names == ["step_000002", "step_000004", "step_000006"]
    assert max(line["step_s"] for line in metrics(run.out)[1:]) < 1.5, "what waits is no step"


# ---- nothing is lost at the end ----


def test_the_end_of_a_run_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path / "run")
    slow(monkeypatch, 2, 0, lambda: run.num_lines == 3)
    run.ended([0, 0], "train.steps=3", "train.save_interval=2")
    assert run.names == ["step_000002", "step_000003"]
    places = run.order(taken(3), published(2), published(3))
    assert places == sorted(places)


def test_a_stop_waits_and_saves_its_own_step_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path / "run")
    slow(monkeypatch, 20, 1, (tmp_path / "told").exists)
    with run.start("train.steps=100000", "train.save_interval=20") as job:
        wait_for(job, lambda: run.num_lines >= 22)
        os.kill(job.pids[1], signal.SIGTERM)
        time.sleep(0.3)
        (tmp_path / "told").touch()
        assert job.wait(60) == [75, 75], run.said.read_text()
    step = metrics(run.out)[-1]["step"]
    assert run.names == ["step_000020", f"step_{step:06d}"]
    places = run.order(published(20), published(step), f"told to stop: step {step} is saved in ")
    assert places == sorted(places)
    assert "is loaded: step" in run.ended([0, 0], "--resume", f"train.steps={step + 2}")


def wait_for(job: ForkedJob, condition: Callable[[], bool]) -> None:
    while not condition():
        assert job.runs
        time.sleep(0.005)


def test_numbers_that_are_not_finite_end_a_run_and_its_checkpoint_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path / "run")
    slow(monkeypatch, 2, 1, lambda: run.num_lines == 3)
    words = ("optimizer.lr=1e30", "train.max_skipped=1", "train.steps=50", "train.save_interval=2")
    said = run.ended([1, 1], *words)
    assert "PRE230 not-finite" in said
    assert run.names == ["step_000002"]


# ---- a disk that fails ----


def test_a_disk_that_is_full_for_one_rank_s_thread_ends_all_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path / "run")

    def full() -> bool:
        if run.num_lines >= 5:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return False

    slow(monkeypatch, 4, 1, full)
    said = run.ended([1, 1], "train.steps=1000", "train.save_interval=2")
    assert said.count(f"CKP205 no-checkpoint: cannot write checkpoints to {str(run.root)!r}: ") == 1
    assert re.search(r"rank 1 of 2 on \S+, stage 0 \(.*\), step 4: \[Errno 28\] No space left on device", said)
    assert "Traceback" not in said
    assert run.names == ["step_000002"], "the one before is as it was, and the disk has its room again"
    assert 5 <= run.num_lines <= 6, "it is told at the next agreement, or where the next save comes due"
    monkeypatch.undo()
    assert "is loaded: step 2, " in run.ended([0, 0], "--resume", "train.steps=8", "train.save_interval=2")


def test_a_bug_in_the_thread_ends_the_run_with_its_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path / "run")

    def broken() -> bool:
        raise ValueError("no disk has this")

    slow(monkeypatch, 2, 1, broken)
    with run.start("train.steps=1000", "train.save_interval=2") as job:
        assert 0 not in job.wait(60)
    said = run.said.read_text()
    assert "ValueError: no disk has this" in said
    assert "rank 1 of 2 on" in said
    assert run.num_lines <= 4
    assert run.names == ["step_000002.part"]


def test_a_crash_elsewhere_does_not_wait_for_a_disk_that_never_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, write = Run(tmp_path / "run"), loop.write_record

    def crash(file: TextIO, record: loop.Record) -> None:
        write(file, record)
        if record["step"] == 5:
            raise ValueError("no more steps")

    monkeypatch.setattr(loop, "write_record", crash)
    for rank in range(RANKS):
        slow(monkeypatch, 4, rank, lambda: False)
    with run.start("train.steps=1000", "train.save_interval=4") as job:
        assert 0 not in job.wait(LONGEST_S / 2)
    said = run.said.read_text()
    assert "ValueError: no more steps" in said
    assert "the checkpoint of step 4 was being written and is incomplete" in said
    assert run.names == ["step_000004.part"]


def test_a_folder_that_is_deleted_below_a_write_is_told_and_the_step_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, write = Run(tmp_path / "run"), loop.write_record
    part = run.root / "step_000002.part"

    def write_and_delete(file: TextIO, record: loop.Record) -> None:
        write(file, record)
        if record["step"] == 3:
            while not (part / "ranks" / "00000.pt").exists():  # else the thread would write into a folder that goes
                time.sleep(0.005)
            shutil.rmtree(run.out)

    monkeypatch.setattr(loop, "write_record", write_and_delete)
    slow(monkeypatch, 2, 1, lambda: not part.exists())
    said = run.ended([1, 1], "train.steps=1000", "train.save_interval=2")
    (saved,) = run.names
    step = int(saved.removeprefix("step_"))
    assert step in (3, 4)
    assert "CKP231 run-folder-gone: " in said
    assert f"; step {step} is saved in {run.root / saved}" in said
    assert "Traceback" not in said


# ---- killed while a thread writes ----


@pytest.mark.parametrize("killed", [(1,), pytest.param((0, 1), marks=pytest.mark.prove)])
def test_killed_in_the_middle_of_a_write_it_goes_on_from_the_one_before(
    killed: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path / "run")
    slow(monkeypatch, 20, 0, lambda: False)
    words = ("train.save_interval=10", "train.steps=30")
    with run.start(*words) as job:
        wait_for(job, lambda: run.num_lines >= 22)
        job.kill(*killed)
        statuses = job.wait(30)
    assert 0 not in statuses
    assert [statuses[rank] for rank in killed] == [-signal.SIGKILL] * len(killed)
    assert run.names == ["step_000010", "step_000020.part"]
    monkeypatch.undo()
    said = run.ended([0, 0], "--resume", *words)
    assert "is loaded: step 10, " in said
    assert run.names == ["step_000010", "step_000020", "step_000030"]
    assert [line["step"] for line in metrics(run.out)] == list(range(1, 31))
