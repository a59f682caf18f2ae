"""Orphaned launchers: those that wait for a host that is gone. Nobody else ends them, so the guard of a rank does.

    launchers = launchers_of(pid)       # while the rank lives: nobody knows later whose child it was
    end(launchers, patience_s=2.5)      # when it is gone: they may end by themselves until then

OpenMPI's daemons wait for each other's dead connections as long as TCP does, a quarter of an hour and more, and its own
keepalive makes `mpirun` end with 0. Only ancestors of the rank are ended, only what serves this one job, each known by
when it began as well as by its number, which the system may have given to another process since; and with a launcher
the ssh processes that it started, which wait for the same host.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Sequence
from typing import NamedTuple

from dslpar.cluster.launchers import LAUNCHERS
from dslpar.watchdog.processes import command_line, launchers_above, parent, pids, program, stat

_REMOTE_SHELLS = frozenset(("ssh", "rsh"))
_BEGAN = 19
"""The field of `stat` that tells when a process began, in ticks since boot."""
_NUM_SIGTERMS, _SIGTERM_S = 3, 0.2
"""`mpirun` forwards the first SIGTERM, warns at the second, and ends with status 1 at the third."""


class Process(NamedTuple):
    """A process that was there at some time."""

    pid: int
    began: str

    @property
    def is_there(self) -> bool:
        """Whether it still runs: it, and not another one of its number."""
        fields = stat(self.pid)
        return bool(fields) and fields[_BEGAN] == self.began and fields[0] not in "ZX"

    def send(self, number: int) -> None:
        """A signal, if it is there and ours to signal."""
        if self.is_there:
            with contextlib.suppress(OSError):
                os.kill(self.pid, number)


def launchers_of(pid: int) -> list[Process]:
    """Return the launchers above a rank that serve its job alone, the nearest first."""
    above = [above for _, above in launchers_above(pid) if ends_with_job(command_line(above))]
    return [Process(pid, fields[_BEGAN]) for pid in above if (fields := stat(pid))]


def ends_with_job(argv: Sequence[str]) -> bool:
    """Whether a command line is of a launcher that ends with its job.

    >>> ends_with_job(["prted", "--prtemca", "ess_base_nspace", "prterun-node0-130@0"]), ends_with_job(["prted"])
    (True, False)
    """
    name = program(argv)
    begins = [one.ends_with_job[name] for one in LAUNCHERS.values() if name in one.ends_with_job]
    return any(word.startswith(begin) for begin in begins for word in argv)


def end(launchers: Sequence[Process], patience_s: float) -> None:
    """Wait for them so long; then tell them to end, and then kill them."""
    _wait(launchers, patience_s)
    left = [launcher for launcher in launchers if launcher.is_there]
    # Their ssh processes, found while they are their children: a launcher that is killed leaves them to init.
    above = {launcher.pid for launcher in left}
    remote = [
        pid for pid in (pids() if left else ()) if parent(pid) in above and program(command_line(pid)) in _REMOTE_SHELLS
    ]
    shells = [Process(pid, fields[_BEGAN]) for pid in remote if (fields := stat(pid))]
    for _ in range(_NUM_SIGTERMS):
        for launcher in left:
            launcher.send(signal.SIGTERM)
        _wait(left, _SIGTERM_S)
    for process in (*left, *shells):
        process.send(signal.SIGKILL)


def _wait(processes: Sequence[Process], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while any(process.is_there for process in processes) and time.monotonic() < deadline:
        time.sleep(0.05)
