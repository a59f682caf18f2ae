"""torch's lock file of a compilation: a living owner keeps it, a dead owner's is removed."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from dslpar.distributed.deepspeed_patches import build_lock
from dslpar.distributed.deepspeed_patches.build_lock import building_alone

# As torch's FileBaton.try_acquire and release do, in a process of its own.
OWNER = """
import os, sys
lock = sys.argv[1]
os.open(lock, os.O_CREAT | os.O_EXCL)
print("held", flush=True)
sys.stdin.readline()
os.remove(lock)
"""


def owner(lock: Path) -> subprocess.Popen[str]:
    """Start a process that holds the lock until it reads a line."""
    started = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(lock)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert started.stdout
    assert started.stdout.readline() == "held\n"
    return started


def entered(folder: Path) -> tuple[threading.Thread, threading.Event]:
    """Enter `building_alone` in a thread; the event is set inside."""
    inside = threading.Event()

    def enter() -> None:
        with building_alone(folder):
            inside.set()

    thread = threading.Thread(target=enter)
    thread.start()
    return thread, inside


def test_a_living_owner_keeps_its_lock(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    lock = tmp_path / "lock"
    with owner(lock) as other:
        thread, inside = entered(tmp_path)
        assert not inside.wait(0.6)
        assert lock.exists()
        other.communicate("release\n")
        thread.join()
        assert inside.is_set()
        assert other.returncode == 0, "the lock was its own to the end"
    assert [each.getMessage().startswith("another process compiles in") for each in caplog.records] == [True]


def test_a_killed_owner_s_lock_is_removed(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    with owner(lock) as other:
        other.kill()
    assert lock.exists()
    with building_alone(tmp_path):
        assert not lock.exists()


def test_an_owner_that_is_killed_while_others_wait_ends_their_wait(tmp_path: Path) -> None:
    with owner(tmp_path / "lock") as other:
        thread, inside = entered(tmp_path)
        assert not inside.wait(0.3)
        other.kill()
    thread.join()
    assert inside.is_set()


@pytest.mark.parametrize("age_s", [0, build_lock.LONGEST_COMPILATION_S + 60])
def test_an_owner_out_of_sight_is_told_by_what_changes(
    age_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build_lock, "_file_system", lambda path: "nfs4")
    (tmp_path / "lock").touch()
    then = time.time() - age_s
    for path in (tmp_path / "lock", tmp_path):
        os.utime(path, (then, then))
    assert build_lock._may_have_owner(tmp_path / "lock") == (age_s == 0)
    (tmp_path / "build.ninja").touch()
    assert build_lock._may_have_owner(tmp_path / "lock"), "a file has just been written"


def test_the_file_system_of_a_path_is_known(tmp_path: Path) -> None:
    assert build_lock._file_system(Path("/proc/self/stat")) == "proc"
    assert build_lock._file_system(tmp_path) != ""
