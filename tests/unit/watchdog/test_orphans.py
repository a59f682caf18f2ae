"""Launchers that wait for a host that is gone: which ones are ended, and which are not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dslpar.watchdog import orphans, processes
from dslpar.watchdog.orphans import Process
from tests.support.stopwatch import Stopwatch
from tests.support.waiting import wait, wait_until

LAUNCHER = """\
import signal, subprocess, sys, time
{before}
rank = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
shell = subprocess.Popen(["bash", "-c", "exec -a ssh sleep 600"])
other = subprocess.Popen(["sleep", "600"])
print(rank.pid, shell.pid, other.pid, flush=True)
time.sleep(600)
"""


@contextmanager
def launched(
    folder: Path, name: str, words: tuple[str, ...] = (), before: str = ""
) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """Start a program with a launcher's name, and its children: a rank, an ssh, and another."""
    path = folder / name
    path.write_text(LAUNCHER.format(before=before))
    process = subprocess.Popen([sys.executable, str(path), *words], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    children = [int(word) for word in process.stdout.readline().split()]
    try:
        yield process, children
    finally:
        for pid in (*children, process.pid):
            Process(pid, began(pid)).send(signal.SIGKILL)
        process.wait(10)
        process.stdout.close()


def began(pid: int) -> str:
    fields = processes.stat(pid)
    return fields[19] if fields else ""


@pytest.mark.parametrize(
    ("name", "words", "found"),
    [
        ("prterun", (), True),
        ("mpiexec.hydra", (), True),
        ("prted", ("--prtemca", "ess_base_nspace", "prterun-host0-130@0"), True),
        ("prted", ("--prtemca", "ess_base_nspace", "prte-host0-130@0"), False),
        ("deepspeed", (), False),
        ("torchrun", (), False),
        ("bash", (), False),
    ],
)
def test_only_launchers_of_this_one_job(tmp_path: Path, name: str, words: tuple[str, ...], found: bool) -> None:
    """OpenMPI's daemons may run other people's jobs, and DeepSpeed's runner ends with its child."""
    with launched(tmp_path, name, words) as (process, (rank, *_)):
        above = orphans.launchers_of(rank)
        assert above == ([Process(process.pid, began(process.pid))] if found else [])
        assert all(one.is_there for one in above)


@pytest.mark.parametrize("deaf", [False, True])
def test_it_is_asked_and_then_ended_and_its_ssh_with_it(tmp_path: Path, deaf: bool) -> None:
    before = "signal.signal(signal.SIGTERM, signal.SIG_IGN)" if deaf else ""
    with launched(tmp_path, "prterun", before=before) as (process, (rank, shell, other)):
        above = orphans.launchers_of(rank)
        watch = Stopwatch()
        orphans.end(above, 0.3)
        assert watch.wall_s() > 0.25
        assert watch.alone_s() < 5
        assert wait(process) == (-signal.SIGKILL if deaf else -signal.SIGTERM)
        wait_until(lambda: not Process(shell, began(shell)).is_there, "the shell stays")
        assert Process(other, began(other)).is_there, "what it started besides is not ours to end"


def test_a_launcher_that_ends_by_itself_is_left_in_peace(tmp_path: Path) -> None:
    with launched(tmp_path, "prterun", before="signal.setitimer(signal.ITIMER_REAL, 0.5)") as (process, (rank, *_)):
        above = orphans.launchers_of(rank)
        watch = Stopwatch()
        orphans.end(above, 30)
        assert watch.alone_s() < 10
        assert wait(process) == -signal.SIGALRM


def test_another_process_of_its_number_is_not_signalled() -> None:
    process = subprocess.Popen(["sleep", "600"])
    later = Process(process.pid, str(int(began(process.pid)) - 1))
    orphans.end([later], 0.1)
    later.send(signal.SIGKILL)
    assert process.poll() is None
    process.kill()
    process.wait(10)


def test_who_is_gone_is_not_there() -> None:
    process = subprocess.Popen(["true"])
    was = Process(process.pid, began(process.pid))
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert not was.is_there, "its parent has not asked for its status yet"
    process.wait(10)
    assert not was.is_there
    assert orphans.launchers_of(process.pid) == []
