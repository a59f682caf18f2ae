"""Failing and stopped runs of one process: divergence, full disks, deleted folders, signals, out of memory."""

from __future__ import annotations

import errno
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import TextIO

import pytest
import torch

from dslpar.core.catalog import finding
from dslpar.core.errors import DslparError
from dslpar.core.mesh import Mesh
from dslpar.distributed import bootstrap
from dslpar.distributed.groups import Groups
from dslpar.layers import Attention
from dslpar.linter import check
from dslpar.training import failures, loop
from dslpar.watchdog import failure_reports, marks
from tests.support.forked_training import train_alone
from tests.support.ranks import on_ranks
from tests.support.runs import CONFIG, ROOT, metrics, write_config
from tests.support.waiting import wait_until


def start(folder: Path, *words: str, config: str = CONFIG, file_bytes: int = -1) -> subprocess.Popen[str]:
    """Start train.py in one process, into `folder`/out; no file of it may grow beyond `file_bytes`."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes))

    command = [sys.executable, "train.py", "--config", str(write_config(folder, config))]
    return subprocess.Popen(
        [*command, f"train.output_dir={folder / 'out'}", *words],
        cwd=ROOT,
        env=os.environ | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=limit if file_bytes >= 0 else None,
    )


def test_a_run_that_diverges_ends_and_says_where(tmp_path: Path) -> None:
    """The weights are 1e30 after the first step: three steps are skipped, and the fourth is one too many."""
    words = ("optimizer.lr=1e30", "train.clip_grad_norm=None", "train.steps=50", "train.save_interval=0")
    config = write_config(tmp_path)
    status, said = train_alone("--config", str(config), f"train.output_dir={tmp_path / 'out'}", *words)
    assert status == 1, said
    lines = metrics(tmp_path / "out")
    assert [line.get("skipped", False) for line in lines] == [False] + [True] * 4
    assert (
        "PRE230 not-finite: the loss or the gradient is not finite for 4 steps in a row, most recently in step 5"
        in said
    )
    assert "the first such value: the output of " in said
    assert re.search(r"<command line>:1:\d+: PRE230 .*\n.*optimizer.lr=1e30", said), "the place is the lr"
    hint = (
        "help: a smaller optimizer.lr than 1e+30; or a warm-up, lr_scheduler.warmup_steps; or train.clip_grad_norm=1.0"
    )
    assert f"{hint}\n" in said
    assert f", on rank 0 of 1 on {os.uname().nodename}, stage 0 (pipe 0, data 0, tensor 0), step 5" in said
    assert "Traceback" not in said


def limits(bound_s: float | None) -> list[float]:
    import torch.distributed as dist

    dist.new_group([0, 1])
    bootstrap.extend_timeouts(bound_s)
    cpu = torch.device("cpu")
    return [group._get_backend(cpu).options._timeout.total_seconds() for group in dist.distributed_c10d._world.pg_map]


@pytest.mark.parametrize(("bound_s", "limit_s"), [(3600, 3660), (10, 1800), (None, 365 * 24 * 3600)])
def test_torch_waits_longer_than_a_checkpoint_may_take(bound_s: float | None, limit_s: float) -> None:
    """gloo's own limit is 30 minutes, NCCL's ten: the waiting rank would be reported as the first failure."""
    assert on_ranks(2, limits, bound_s) == [[limit_s] * 2] * 2


@pytest.mark.prove  # `make test` has the next test, and one of a checkpoint
def test_a_disk_that_is_full_ends_the_run(tmp_path: Path) -> None:
    """A limit of the file size stands in for it: metrics.jsonl exceeds it, and log.txt is kept below."""
    words = ("train.steps=100000", "train.save_interval=0", "train.log_interval=100000")
    process = start(tmp_path, *words, file_bytes=24_000)
    said, _ = process.communicate()
    assert process.returncode == 1, said
    assert "CKP230 disk-full: cannot write to " in said
    assert "File too large" in said
    assert "Traceback" not in said
    last = json.loads((tmp_path / "out" / "metrics.jsonl").read_text().rpartition("\n")[0].splitlines()[-1])["step"]
    place = f"rank 0 of 1 on {os.uname().nodename}, stage 0 (pipe 0, data 0, tensor 0)"
    assert f"{place}, step {last + 2}: " in said, "in the step that told all ranks of the line that is not there"


def test_a_disk_that_breaks_as_a_checkpoint_is_due_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the operating system's error on the one file is fake; the forked run is unchanged."""
    real = os.fsync

    def broken(file: int) -> None:
        if os.readlink(f"/proc/self/fd/{file}").endswith("metrics.jsonl"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(file)

    monkeypatch.setattr(os, "fsync", broken)
    words = ("--config", str(write_config(tmp_path)), f"train.output_dir={tmp_path / 'out'}")
    status, said = train_alone(*words)
    assert status == 1, said
    assert "CKP230 disk-full: cannot write to " in said
    assert "[Errno 5] Input/output error" in said
    assert "Traceback" not in said


def test_a_run_folder_that_is_deleted_in_mid_run_is_told_and_the_step_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = loop.write_record

    def write_and_delete(file: TextIO, record: loop.Record) -> None:
        write(file, record)
        if record["step"] == 2:
            shutil.rmtree(tmp_path / "out")

    monkeypatch.setattr(loop, "write_record", write_and_delete)
    words = ("--config", str(write_config(tmp_path)), f"train.output_dir={tmp_path / 'out'}", "train.steps=9")
    status, said = train_alone(*words)
    assert status == 1, said
    (saved,) = (tmp_path / "out" / "checkpoints").iterdir()
    assert saved.name == "step_000003", "of the step that told all ranks"
    assert f"CKP231 run-folder-gone: {tmp_path / 'out'} was deleted or moved while the run wrote to it" in said
    assert f"; step 3 is saved in {saved}" in said
    assert "Traceback" not in said


@pytest.mark.prove  # `make test` has tests/distributed/training
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_run_that_is_told_to_stop_saves_and_can_be_queued_again(tmp_path: Path, number: signal.Signals) -> None:
    process = start(tmp_path, "train.steps=100000", "train.log_interval=100000", "train.requeue_status=99")
    path = tmp_path / "out" / "metrics.jsonl"
    wait_until(lambda: path.exists() and path.stat().st_size, f"no {path}")
    process.send_signal(number)
    said, _ = process.communicate()
    assert process.returncode == 99, said
    step = metrics(tmp_path / "out")[-1]["step"]
    (saved,) = (tmp_path / "out" / "checkpoints").iterdir()
    assert saved.name == f"step_{step:06d}"
    assert f"told to stop: step {step} is saved in {saved}" in said


# ---- helps ----


def test_memory_that_runs_out_names_the_keys_that_decide_it() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**50)
    assert "HST230 out-of-memory" in failure_reports.advice(caught.value)
    workspace = RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")
    for error in (MemoryError(), torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), workspace):
        report = failure_reports.make_report(marks.Rank(0, 1, "node", 1), "step 3", error, None)
        assert "micro_size" in report.text
        assert report.message().startswith("[rank 0 of 1 on node, step 3] ")


@pytest.mark.parametrize("error", [RuntimeError("rank 1 broke"), FileNotFoundError(2, "no such file"), ValueError("3")])
def test_other_errors_speak_for_themselves(error: Exception) -> None:
    assert failure_reports.advice(error) == ""


def test_a_finding_that_stops_a_program_is_told_with_the_program_s_lines_alone() -> None:
    with pytest.raises(DslparError) as caught:
        Attention(Groups(Mesh()), 64, 5)
    report = failure_reports.make_report(marks.Rank(0, 1, "node", 1), "", caught.value, caught.tb)
    head, own = report.text.split("raised by\n")
    assert "TEN205" in head
    assert "Traceback" not in report.text
    assert own.count("File ") == 1
    assert "Attention(Groups(Mesh()), 64, 5)" in own


def test_of_a_finding_raised_from_others_the_first_one_s_lines_and_what_is_no_finding_are_told() -> None:
    def innermost() -> None:
        Attention(Groups(Mesh()), 64, 5)

    def wrapped() -> None:
        try:
            innermost()
        except DslparError as error:
            raise DslparError(error.findings) from error

    with pytest.raises(DslparError) as caught:
        wrapped()
    text = failure_reports.make_report(marks.Rank(0, 1, "node", 1), "", caught.value, caught.tb).text
    assert "in innermost" in text
    with pytest.raises(DslparError) as caught:
        raise_from(ValueError("the cause"))
    text = failure_reports.make_report(marks.Rank(0, 1, "node", 1), "", caught.value, caught.tb).text
    assert text.endswith("ValueError: the cause\n")


def raise_from(cause: Exception) -> None:
    raise DslparError([finding("CFG224", "no handler")]) from cause


def test_an_index_out_of_range_on_a_gpu_says_where_to_look() -> None:
    """The text is torch's. On a CPU the same mistake is an IndexError at its line, which needs no help."""
    error = RuntimeError("CUDA error: device-side assert triggered\nCUDA kernel errors might be reported later")
    report = failure_reports.make_report(marks.Rank(0, 1, "node", 1), "step 3", error, None)
    assert "HST232 index-out-of-range-on-device" in report.text
    assert "vocab_size" in report.text


def test_a_full_disk_in_a_traceback() -> None:
    assert "CKP230 disk-full" in failure_reports.advice(OSError(28, "No space left on device"))


@pytest.mark.parametrize(
    ("more", "steps"),
    [
        ("", 3),
        ("precision = 'bf16'\nzero = 1\n", 3),
        ("precision = 'fp16'\nzero = 1\n", 16),
        ("precision = dict(dtype='fp16', loss_scale=128)\nzero = 1\n", 3),
        ("train['max_skipped'] = 7\n", 7),
    ],
)
def test_how_many_steps_may_be_skipped(tmp_path: Path, more: str, steps: int) -> None:
    """With fp16's scale, from 2**16 down, the limit is one step less than DeepSpeed takes to raise its own error."""
    assert failures.max_skipped(check.resolve(str(write_config(tmp_path, CONFIG + more)), 1)) == steps
