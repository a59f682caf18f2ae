"""Saves killed before each of their file operations: visible files are intact, and the next save succeeds.

A child counts system calls that change files, and kills itself at the k-th. A write is interrupted after half of its
bytes.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dslpar.checkpoint import folder, tensor_file, writer
from dslpar.checkpoint.folder import FileDigest
from dslpar.checkpoint.manifest import manifest_of
from tests.support.sampling import sampled
from tests.support.saving_jobs import job_of

JOB = job_of()
EVENTS = {"os.mkdir": "mkdir", "os.rename": "rename", "os.remove": "remove", "os.rmdir": "rmdir", "open": "open"}
"""Python's audit events, by operation."""


def save(root: Path, step: int, keep: int | None = 2) -> Path:
    """Save as a run of two ranks does, in one process."""
    part = writer.begin_save(root, step)
    files = {f"tensors/{rank:05d}.safetensors": {"w": torch.full((9,), step + rank)} for rank in range(2)}
    written = {name: tensor_file.write_tensors(part / name, tensors) for name, tensors in files.items()}
    for name in ("ranks/00000.pt", "ranks/00001.pt", "index.json", folder.STATE):
        written[name] = writer.write_file(part / name, [f"{name} at {step}".encode()])
    writer.set_aside(root, step)
    final = writer.publish(root, manifest_of(JOB, "text", step), written)
    writer.prune(root, keep, step)
    return final


def whole_steps(root: Path) -> list[int]:
    """Return the steps of intact checkpoints; every byte is read."""
    return [stored.step for stored in folder.scan(root).checkpoints if not folder.verify(stored)]


# ---- killed at the k-th operation ----


def in_child(act: Callable[[], object], at: int | None, operations: Path) -> bool:
    """Return whether the child finished. `operations` gets a line per operation."""
    if (pid := os.fork()) == 0:
        try:
            watch(at, operations)
            act()
            os._exit(0)
        finally:  # no code of pytest may run in the child
            traceback.print_exc()
            os._exit(1)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert status in (0, -signal.SIGKILL), status
    return status == 0


def watch(at: int | None, operations: Path) -> None:
    """Kill this process before its operation number `at`, counted from here."""
    log, done = os.open(operations, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), [0]
    write, fsync = os.write, os.fsync

    def count(line: str) -> bool:
        write(log, f"{line}\n".encode())
        done[0] += 1
        return done[0] == at

    def killed() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def write_or_die(file: int, data: Any) -> int:
        if count(f"write {path_of(file)}"):
            write(file, data[: len(data) // 2])
            killed()
        return write(file, data)

    def fsync_or_die(file: int) -> None:
        if count(f"fsync {path_of(file)}"):
            killed()
        fsync(file)

    def audit(event: str, args: tuple[Any, ...]) -> None:
        if changes(event, args) and count(" ".join([EVENTS[event], *(str(arg) for arg in args if names(arg))])):
            killed()

    os.write, os.fsync = write_or_die, fsync_or_die
    sys.addaudithook(audit)


def changes(event: str, args: tuple[Any, ...]) -> bool:
    """Return whether an event is one of the operations; opening a file counts only for writing."""
    return event in EVENTS and (event != "open" or bool(args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)))


def names(value: Any) -> bool:
    return isinstance(value, str | Path)


def path_of(file: int) -> str:
    return os.readlink(f"/proc/self/fd/{file}")


Prepare = Callable[[Path], list[int]]
"""Prepares existing checkpoints, and returns the steps that must be visible and intact whenever the save is killed."""


def two_before(root: Path) -> list[int]:
    save(root, 4)
    save(root, 5)
    return [5]


def nothing_before(root: Path) -> list[int]:
    return []


def one_of_the_same_step(root: Path) -> list[int]:
    """The checkpoint of the same step was altered, so the run was resumed from the earlier one."""
    save(root, 5)
    (save(root, 6) / "index.json").write_text("{}")
    return [5]


def left_by_kills(root: Path) -> list[int]:
    """An interrupted save of step 6, and an interrupted removal."""
    save(root, 5)
    save(root, 6).rename(root / "step_000006.part")
    shutil.copytree(root / "step_000005", root / "step_000004.old.part")
    return [5]


def one_of_a_later_step(root: Path) -> list[int]:
    """The run was resumed from the earlier checkpoint."""
    save(root, 5)
    save(root, 9)
    return [5]


PREPARED = [nothing_before, two_before, one_of_the_same_step, left_by_kills, one_of_a_later_step]


@pytest.mark.parametrize("prepare", sampled(PREPARED, {two_before}))
def test_a_kill_before_any_operation_leaves_intact_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prepare: Prepare
) -> None:
    monkeypatch.setattr(os, "fsync", lambda file: None)  # still counted; the system survives, so nothing needs to wait
    prepared, operations, at, ended = tmp_path / "prepared", tmp_path / "operations", 0, False
    prepared.mkdir()
    stay, before = prepare(prepared), set(whole_steps(prepared))
    while not ended:
        at += 1
        root = tmp_path / str(at) / "checkpoints"
        shutil.copytree(prepared, root)
        ended = in_child(lambda root=root: save(root, 6), at, operations)
        last = operations.read_text().splitlines()[-1]
        steps = whole_steps(root)
        damaged = {stored.step for stored in folder.scan(root).checkpoints} - set(steps)
        assert set(stay) <= set(steps) <= before | {6}, f"killed at {last}"
        assert damaged <= ({6} if prepare is one_of_the_same_step and 6 not in steps else set()), f"killed at {last}"
        assert not folder.scan(root).unreadable, f"killed at {last}"
        assert not {6, 9} <= set(steps), f"killed at {last}: the newest is not of this run"
        if ended or at % 3 == 0:
            save(root, 7)
            assert whole_steps(root) == ([6, 7] if 6 in steps else [*before - {4, 9}, 7] if before else [7])
            assert not list(root.glob("*.part")), f"killed at {last}"
    assert at > 30, "operations are seen"


# ---- on disk before it is visible ----


def test_every_file_and_folder_is_on_disk_before_the_rename_and_the_rename_after_it(tmp_path: Path) -> None:
    root, operations = tmp_path / "run" / "checkpoints", tmp_path / "operations"
    assert in_child(lambda: save(root, 6), None, operations)
    lines = operations.read_text().splitlines()
    part, final = folder.part_path(root, 6), folder.final_path(root, 6)
    rename = lines.index(f"rename {part} {final}")
    files = {path.relative_to(final).as_posix() for path in final.rglob("*")}
    for name in files:
        did = [line.split()[0] for line in lines[:rename] if line.endswith(f" {part / name}")]
        assert did[-1] == "fsync", f"{name}: {did}"
    assert f"fsync {part}" in lines[:rename]
    assert f"fsync {root}" in lines[rename:]
    assert f"fsync {root.parent}" in lines[:rename], "the folder of checkpoints is new itself"
    assert {"checkpoint.json", "tensors", "tensors/00001.safetensors"} <= files


# ---- a disk that fails ----


def test_a_file_that_is_gone_or_short_before_it_is_published_is_an_error(tmp_path: Path) -> None:
    """The cause is a full disk, or a host with files that nobody else sees; nothing becomes visible."""
    save(tmp_path, 5)
    written = writer.write_file(writer.begin_save(tmp_path, 6) / "a", [b"1234"])
    manifest = manifest_of(JOB, "text", 6)
    for files, message in (
        ({"a": FileDigest(5, written.xxh3_128)}, "5 bytes were written, but 4 are"),
        ({"a": written, "b": written}, "4 bytes were written, but no are"),
        ({}, "no bytes were written, but 4 are"),
    ):
        with pytest.raises(OSError, match=message):
            writer.publish(tmp_path, manifest, files)
    assert whole_steps(tmp_path) == [5]
    writer.publish(tmp_path, manifest, {"a": written})
    assert whole_steps(tmp_path) == [5, 6]


def test_a_write_that_the_system_takes_in_parts_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    system = os.write
    monkeypatch.setattr(os, "write", lambda file, data: system(file, data[:3]))
    assert writer.write_file(tmp_path / "a", [b"12345678", b"", b"9"]).bytes == 9
    monkeypatch.undo()
    assert (tmp_path / "a").read_bytes() == b"123456789"
