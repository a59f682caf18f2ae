"""Ranks with real guards, for tests of guards: processes without torch that do only what a test asks for."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path
from types import TracebackType

import psutil

from benchmarks.faults import processes_with
from dslpar.watchdog import processes, rank_monitor
from tests.support.paths import ROOT
from tests.support.stopwatch import Stopwatch
from tests.support.waiting import wait, wait_until

RANK = """\
import os, pathlib, signal, sys, time
sys.path.insert(0, {root!r})
from dslpar.watchdog import rank_monitor
from dslpar.watchdog.marks import Rank
rank, world, meeting = {rank}, {world}, pathlib.Path({folder!r}, "hub")
monitor = rank_monitor.monitor_rank(Rank(rank, world, "host" + str(rank // 2), os.getpid()), os.environ)
if rank == 0 and world > 1:
    meeting.with_suffix(".part").write_text("127.0.0.1:%d:%s" % (monitor.guard_port(), monitor.secret))
    meeting.with_suffix(".part").rename(meeting)
elif rank:
    while not meeting.exists():
        time.sleep(0.01)
    monitor.page.hub = meeting.read_text()
monitor.page.location = "stage %d (pipe %d, data 0, tensor 0)" % (rank, rank)
monitor.page.enter("step", 7)
def wait(seconds):
    code = "import time\\ndef all_reduce():\\n    time.sleep(%r)\\nall_reduce()" % seconds
    exec(compile(code, "site-packages/torch/distributed/distributed_c10d.py", "exec"), {{}})
time.sleep(0.5)
pathlib.Path({folder!r}, "ready%d" % rank).touch()
{then}
"""
WAITS = "wait(600)"


class Ranks:
    """The processes of a job, each with its guard. `then`: what each does once it is in step 7.

    `launcher`: a program that starts rank 0, with Python.
    """

    def __init__(self, folder: Path, *then: str, reports: str = "", launcher: Path | None = None) -> None:
        self.folder, self.mark = folder, f"GUARDED={uuid.uuid4().hex}"
        name, _, value = self.mark.partition("=")
        environ = {key: text for key, text in os.environ.items() if key != rank_monitor.REPORTS} | {name: value}
        environ |= {rank_monitor.REPORTS: reports} if reports else {}
        self.processes = []
        for rank, code in enumerate(then):
            text = RANK.format(root=str(ROOT), rank=rank, world=len(then), folder=str(folder), then=code)
            with open(folder / f"said{rank}", "wb") as said:
                words = [sys.executable, *([str(launcher)] if launcher and not rank else []), "-c", text]
                self.processes.append(subprocess.Popen(words, env=environ, stderr=said))

    def __enter__(self) -> Ranks:
        ready = [self.folder / f"ready{rank}" for rank in range(len(self.processes))]
        wait_until(lambda: all(path.exists() for path in ready), lambda: "\n".join(self.all_said()))
        self.watch = Stopwatch()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, t: TracebackType | None) -> None:
        for pid in processes_with(self.mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in self.processes:
            process.wait()

    def statuses(self) -> list[int]:
        """Return all ranks' statuses, once they and their guards have ended."""
        codes = [wait(process) for process in self.processes]
        wait_until(lambda: not processes_with(self.mark), "a guard stays")
        return codes

    def said(self, rank: int) -> str:
        """Return the terminal output of a rank and its guard."""
        return (self.folder / f"said{rank}").read_text()

    def all_said(self) -> list[str]:
        """Return the lines of all ranks."""
        return [line for rank in range(len(self.processes)) for line in self.said(rank).splitlines()]

    def wait_until_met(self) -> None:
        """Wait until all guards have joined the hub. Nobody misses a rank that is frozen earlier."""
        hub, others = psutil.Process(self.guard_of(0)), len(self.processes) - 1

        def met() -> bool:
            return sum(one.status == "ESTABLISHED" for one in hub.net_connections("inet")) >= others

        wait_until(met, "guards do not meet")
        time.sleep(0.5)
        self.watch = Stopwatch()

    def guard_of(self, rank: int) -> int:
        """Return the pid of a rank's guard."""
        below = processes.descendants(self.processes[rank].pid)
        return next(pid for pid in below if "guard.main()" in " ".join(processes.command_line(pid)))
