"""Measures time where other processes use the machine too: `make prove` runs tests side by side.

watch = Stopwatch()
...
assert watch.alone_s() < 15
"""

from __future__ import annotations

import resource
import time

import psutil


class Stopwatch:
    """Counts from when it is made."""

    def __init__(self) -> None:
        self._wall, self._busy, self._own = _now()

    def wall_s(self) -> float:
        """Seconds by the clock."""
        return time.monotonic() - self._wall

    def alone_s(self) -> float:
        """Seconds that a machine without others would have taken, about: for upper limits, and for these alone."""
        return self.wall_s() * self.our_share()

    def our_share(self) -> float:
        """The share of the machine that others have not used: 1 where they have not run."""
        before = self._wall, self._busy, self._own
        wall, busy, own = (now - then for now, then in zip(_now(), before, strict=True))
        others = max(busy - own, 0.0) / (wall * (psutil.cpu_count() or 1))
        return max(1 - others, 0.01)


def _now() -> tuple[float, float, float]:
    """Wall time; CPU time of the machine, all but idle; CPU time of this process and of those below that have ended."""
    cpu = psutil.cpu_times()
    usages = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    busy = sum(cpu) - cpu.idle - cpu.iowait - cpu.guest - cpu.guest_nice
    return time.monotonic(), busy, sum(one.ru_utime + one.ru_stime for one in usages)
