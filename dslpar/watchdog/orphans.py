"""Orphaned launchers: end launchers that wait for a host that is gone. A rank's guard does this; nobody else would.

    launchers = launchers_of(pid)       # while the rank lives: its ancestors cannot be found later
    end(launchers, patience_s=2.5)      # when it is gone: they may end by themselves until then

OpenMPI's daemons keep dead connections to each other as long as TCP does, a quarter of an hour or more. OpenMPI's own
keepalive would make `mpirun` end with status 0.

The guard ends only those ancestors of its rank that serve this one job, and the ssh processes that they started, which
wait for the same host. A process is identified by its number and its start time, because the system may have given the
number to another process meanwhile.
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
"""Index of a process's start time, in ticks since boot, among the fields of `processes.stat`."""
_NUM_SIGTERMS, _SIGTERM_S = 3, 0.2
"""`mpirun` forwards the first SIGTERM, warns at the second, and ends with status 1 at the third."""


class Process(NamedTuple):
    """A process, identified by its number and start time."""

    pid: int
    began: str

    @property
    def is_there(self) -> bool:
        """Return whether this process itself still runs, not another one with its number."""
        fields = stat(self.pid)
        return bool(fields) and fields[_BEGAN] == self.began and fields[0] not in "ZX"

    def send(self, number: int) -> None:
        """Send a signal if the process still runs and the system allows it."""
        if self.is_there:
            with contextlib.suppress(OSError):
                os.kill(self.pid, number)


def launchers_of(pid: int) -> list[Process]:
    """Return the launchers above a rank that serve only its job, the nearest first."""
    above = [above for _, above in launchers_above(pid) if ends_with_job(command_line(above))]
    return [Process(pid, fields[_BEGAN]) for pid in above if (fields := stat(pid))]


def ends_with_job(argv: Sequence[str]) -> bool:
    """Return whether a command line belongs to a launcher process that ends with its job.

    >>> ends_with_job(["prted", "--prtemca", "ess_base_nspace", "prterun-node0-130@0"]), ends_with_job(["prted"])
    (True, False)
    """
    name = program(argv)
    begins = [one.ends_with_job[name] for one in LAUNCHERS.values() if name in one.ends_with_job]
    return any(word.startswith(begin) for begin in begins for word in argv)


def end(launchers: Sequence[Process], patience_s: float) -> None:
    """Wait up to `patience_s` for launchers to end. Send SIGTERM to those that remain, and then SIGKILL."""
    _wait(launchers, patience_s)
    left = [launcher for launcher in launchers if launcher.is_there]
    # Find the launchers' ssh processes first: when a launcher is killed, they become children of init.
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
