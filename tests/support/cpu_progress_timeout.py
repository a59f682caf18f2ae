"""Idle time-out of every test: it ends a test without progress, however busy the machine is.

A test fails when neither its process nor a descendant has made progress for IDLE_S seconds, by CPU time
(`dslpar.watchdog.cpu_progress`). So a test needs no limit of its own when it waits for a process or a file. The
`timeout` of setup.cfg is much longer wall-clock time. It ends endless loops.
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
"""Most tests end before the first check."""


def start_timer(limit_s: float, idle_s: float = IDLE_S, interval_s: float = _INTERVAL_S) -> None:
    """Check every `interval_s` seconds, in an alarm's signal handler, and fail the running test."""
    progress, ends, looking_s = Progress(idle_s, interval_s), time.monotonic() + limit_s, 0.0

    def look(number: int, frame: FrameType | None) -> None:
        nonlocal looking_s
        began_s = time.process_time()
        used, own = use_of_each(os.getpid()), os.getpid()
        used[own] = Use(used[own].cpu_s - looking_s, held_back=False)  # this process runs now only because it checks
        looking_s += time.process_time() - began_s
        if progress.is_stuck(used):
            _fail(f"nothing has happened for {idle_s:g} s, here and in {len(used) - 1} processes below")
        if time.monotonic() > ends:
            _fail(f"no end after {limit_s:g} s")

    signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, interval_s, interval_s)


def stop_timer() -> None:
    """Stop checking."""
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)


def _fail(why: str) -> None:
    stop_timer()
    with tempfile.TemporaryFile("w+") as stacks:
        faulthandler.dump_traceback(stacks, all_threads=True)
        stacks.seek(0)
        pytest.fail(f"{why}\n{stacks.read()}")
