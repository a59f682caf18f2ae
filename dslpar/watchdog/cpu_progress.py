"""CPU progress: detect stuck processes by their CPU time, which also works on a busy machine.

    progress = Progress(idle_s=60)
    while running:
        if progress.is_due() and progress.is_stuck(processor_use(pids)):
            ...                     # for a minute, none of them has had anything to compute

Processes that wait for each other use almost no CPU time. Time in which a process was kept from running does not count:
when it was ready to run and others ran, when it waited for a disk, or when it was stopped.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from dslpar.watchdog import processes

IDLE_SHARE = 0.02
"""CPU time of a rank, as a share of the elapsed time, below which it counts as idle.

Measured with torch 2.13 on 2 cores: each of 2, 4 or 8 deadlocked ranks uses a share of 0.0026-0.0065, because the
thread of gloo's device wakes a hundred times per second. The share is not larger after DeepSpeed's first step. A rank
with something to compute gets more CPU time than that even beside 50 busy processes on a core, and counts as ready to
run.
"""
_LEAST_IDLE_S = 0.05
"""The least CPU time that counts as progress: the kernel counts in ticks of 10 ms, separately for user and system time.
"""


class Use(NamedTuple):
    """CPU time of a process and its children, and whether one of them is kept from running."""

    cpu_s: float
    held_back: bool
    """Whether one is ready to run, waits for a disk, or is stopped. Then using no CPU time is no sign of a deadlock."""


class Progress:
    """Detects stuck processes from samples of their CPU time.

    `idle_s`: time without progress after which processes count as stuck. `interval_s`: time between two samples; None:
    a twentieth of `idle_s`, at most 1 s.
    """

    def __init__(self, idle_s: float, interval_s: float | None = None) -> None:
        self.idle_s = idle_s
        self.allowance_s = max(_LEAST_IDLE_S, IDLE_SHARE * idle_s)
        self.interval_s = min(1.0, idle_s / 20) if interval_s is None else interval_s
        self._sampled = time.monotonic()
        self._idle_s = 0.0
        self._base: dict[int, float] = {}

    def is_due(self) -> bool:
        """Return whether it is time for the next sample."""
        return time.monotonic() - self._sampled >= self.interval_s

    def is_stuck(self, used: Mapping[int, Use]) -> bool:
        """Add a sample (process id -> CPU use), and return whether no process has made progress for `idle_s`."""
        now = time.monotonic()
        # A long gap means that this process, which takes the samples, was kept from running too.
        elapsed_s = min(now - self._sampled, 2 * self.interval_s)
        self._sampled = now
        for pid, use in used.items():
            # The CPU time of a process and its children falls when a child moves to another parent.
            self._base[pid] = min(self._base.get(pid, 0.0), use.cpu_s)
        if any(use.cpu_s - self._base[pid] > self.allowance_s for pid, use in used.items()):
            self._base = {pid: use.cpu_s for pid, use in used.items()}
            self._idle_s = 0.0
        elif not any(use.held_back for use in used.values()):
            self._idle_s += elapsed_s
        return self._idle_s >= self.idle_s


def processor_use(pids: Iterable[int]) -> dict[int, Use]:
    """Return the CPU use so far of each process with its descendants; processes that have ended are left out."""
    if not os.path.isdir("/proc"):
        return {pid: use for pid in pids if (use := _by_psutil(pid))}
    table = _table()
    trees = {pid: _tree(table, pid) for pid in pids}
    return {pid: _use(table[member] for member in tree) for pid, tree in trees.items() if tree}


def use_of_each(pid: int) -> dict[int, Use]:
    """Return the CPU use so far of a process and of each of its descendants, separately.

    Each waiting process uses a little CPU time, so the sum over many of them could look like progress.
    """
    if not os.path.isdir("/proc"):
        return processor_use([pid])
    table = _table()
    return {member: _use([table[member]]) for member in _tree(table, pid)}


def _table() -> dict[int, list[str]]:
    return {pid: fields for pid in processes.pids() if (fields := processes.stat(pid))}


def _tree(table: Mapping[int, list[str]], root: int) -> list[int]:
    """Return a process and its descendants."""
    children: dict[int, list[int]] = {}
    for pid, fields in table.items():
        children.setdefault(int(fields[1]), []).append(pid)
    tree = [root] if root in table else []
    for pid in tree:  # grows while it runs
        tree += children.get(pid, ())
    return tree


def _use(rows: Iterable[list[str]]) -> Use:
    cpu_s, held_back = 0.0, False
    for fields in rows:
        # utime, stime, cutime, cstime: the last two belong to children that have ended.
        cpu_s += sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
        held_back |= fields[0] in "RDTt"
    return Use(cpu_s, held_back)


def _by_psutil(pid: int) -> Use | None:
    """Return the use of a process without its children, on a system without /proc; None if it has ended."""
    import psutil  # guards start without site-packages

    try:
        process = psutil.Process(pid)
        times, status = process.cpu_times(), process.status()
    except psutil.NoSuchProcess:
        return None
    held_back = {psutil.STATUS_RUNNING, psutil.STATUS_DISK_SLEEP, psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP}
    return Use(times.user + times.system, status in held_back)
