"""Measure time on a machine that other processes use, too: `make prove` runs tests side by side.

watch = Stopwatch()
...
assert watch.alone_s() < 15
"""

from __future__ import annotations

import resource
import time

import psutil


class Stopwatch:
    """Counts from its creation."""

    def __init__(self) -> None:
        self._wall, self._busy, self._own = _now()

    def wall_s(self) -> float:
        """Return wall-clock seconds."""
        return time.monotonic() - self._wall

    def alone_s(self) -> float:
        """Return about the seconds that an otherwise idle machine would take. Use it for upper limits only."""
        return self.wall_s() * self.our_share()

    def our_share(self) -> float:
        """Return the share of the machine that others have not used, which is 1 if they did not run."""
        before = self._wall, self._busy, self._own
        wall, busy, own = (now - then for now, then in zip(_now(), before, strict=True))
        others = max(busy - own, 0.0) / (wall * (psutil.cpu_count() or 1))
        return max(1 - others, 0.01)


def _now() -> tuple[float, float, float]:
    """Return wall time, the machine's CPU time without idle, and the CPU time of this process and ended children."""
    cpu = psutil.cpu_times()
    usages = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    busy = sum(cpu) - cpu.idle - cpu.iowait - cpu.guest - cpu.guest_nice
    return time.monotonic(), busy, sum(one.ru_utime + one.ru_stime for one in usages)
