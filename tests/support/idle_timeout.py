"""The time-out of every test: it ends a test in which nothing has happened, however busy the machine is.

A test fails when neither its process nor any below it has made progress for IDLE_S seconds, by CPU time
(`dslpar.watchdog.cpu_progress`). So a test waits for a process, or for a file, without a limit of its own. The
`timeout` of setup.cfg is by the wall clock, and far away: it ends what loops for ever.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import tempfile
import time
from types import FrameType

import pytest

from dslpar.watchdog.cpu_progress import Progress, Use, use_of_each

IDLE_S = 300.0
_INTERVAL_S = 10.0
"""Most tests end before the first look."""


def start_timer(limit_s: float, idle_s: float = IDLE_S, interval_s: float = _INTERVAL_S) -> None:
    """Look every `interval_s` seconds, from the signal handler of an alarm, and fail the test that runs then."""
    progress, ends, looking_s = Progress(idle_s, interval_s), time.monotonic() + limit_s, 0.0

    def look(number: int, frame: FrameType | None) -> None:
        nonlocal looking_s
        began_s = time.process_time()
        used, own = use_of_each(os.getpid()), os.getpid()
        used[own] = Use(used[own].cpu_s - looking_s, held_back=False)  # it runs just now, to look
        looking_s += time.process_time() - began_s
        if progress.is_stuck(used):
            _fail(f"nothing has happened for {idle_s:g} s, here and in {len(used) - 1} processes below")
        if time.monotonic() > ends:
            _fail(f"no end after {limit_s:g} s")

    signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, interval_s, interval_s)


def stop_timer() -> None:
    """Look no more."""
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)


def _fail(why: str) -> None:
    stop_timer()
    with tempfile.TemporaryFile("w+") as stacks:
        faulthandler.dump_traceback(stacks, all_threads=True)
        stacks.seek(0)
        pytest.fail(f"{why}\n{stacks.read()}")
