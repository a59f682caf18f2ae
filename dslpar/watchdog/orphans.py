"""Launchers that wait for a host that is gone. Nobody else ends them, so the guard of a rank does (guard.py).

    above = launchers_of(pid)           # while the rank lives: nobody knows later whose child it was
    end(above, patience_s=2.5)          # when it is gone: they may end by themselves until then

OpenMPI's daemons wait for each other's dead connections as long as TCP does, a quarter of an hour and more, and its own
keepalive makes `mpirun` end with 0. Only ancestors of the rank are ended, only what serves this one job, each known by
when it began as well as by its number, which the system may have given to another process since; with a launcher the
ssh's that it started, which wait for the same host.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from dslpar.cluster.launchers import LAUNCHERS
from dslpar.watchdog.processes import launchers_above, parent, program, stat, words_of

_SHELLS = frozenset(("ssh", "rsh"))
_BEGAN = 19
"""Of a process's fields, from the third on: when it began, in ticks since boot."""
_ASKS, _ASK_S = 3, 0.2
"""`mpirun` forwards the first SIGTERM, warns at the second, and ends with status 1 at the third."""


class Process(NamedTuple):
    """One that was there at some time."""

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
    """Those above a rank that serve its job alone, the nearest first."""
    above = (above for _, above in launchers_above(pid))
    return [Process(one, stat(one)[_BEGAN]) for one in above if is_of_one_job(words_of(one)) and stat(one)]


def is_of_one_job(words: Sequence[str]) -> bool:
    """Whether a command line is of a launcher that ends with its job.

    >>> is_of_one_job(["prted", "--prtemca", "ess_base_nspace", "prterun-node0-130@0"]), is_of_one_job(["prted"])
    (True, False)
    """
    name = program(words)
    begins = [row.ends_with_job[name] for row in LAUNCHERS.values() if name in row.ends_with_job]
    return any(word.startswith(begin) for begin in begins for word in words)


def end(launchers: Sequence[Process], patience_s: float) -> None:
    """Waits for them so long; then asks, and then ends them."""
    _wait(launchers, patience_s)
    left = [one for one in launchers if one.is_there]
    shells = [shell for one in left for shell in _shells_of(one.pid)]
    for _ in range(_ASKS):
        _send(left, signal.SIGTERM)
        _wait(left, _ASK_S)
    _send([*left, *shells], signal.SIGKILL)


def _wait(some: Sequence[Process], seconds: float) -> None:
    ends = time.monotonic() + seconds
    while any(one.is_there for one in some) and time.monotonic() < ends:
        time.sleep(0.05)


def _send(some: Sequence[Process], number: int) -> None:
    for one in some:
        one.send(number)


def _shells_of(pid: int) -> list[Process]:
    """The remote shells that a process has started."""
    numbers = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()]
    shells = [one for one in numbers if parent(one) == pid and program(words_of(one)) in _SHELLS]
    return [Process(one, fields[_BEGAN]) for one in shells if (fields := stat(one))]
