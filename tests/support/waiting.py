"""Wait for other processes as long as they make progress: a busy machine delays them, and fails no test.

wait_until(lambda: path.exists(), f"no {path}")
status = wait(process)
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from typing import Any

from dslpar.watchdog.cpu_progress import Progress, use_of_each

IDLE_S = 60.0


def wait_until(
    condition: Callable[[], object],
    otherwise: str | Callable[[], str],
    idle_s: float = IDLE_S,
    longest_pause_s: float = 0.1,
) -> None:
    """Return when the condition holds. The pauses between checks grow, since a check may take time.

    Raises:
        AssertionError: no descendant made progress for `idle_s` seconds; the text is `otherwise`.
    """
    pause_s, progress = 0.005, Progress(idle_s)
    while not condition():
        if progress.is_due():
            below = use_of_each(os.getpid())
            del below[os.getpid()]  # it only waits
            if progress.is_stuck(below):
                raise AssertionError(otherwise if isinstance(otherwise, str) else otherwise())
        time.sleep(pause_s)
        pause_s = min(pause_s * 1.5, longest_pause_s)


def wait(process: subprocess.Popen[Any], idle_s: float = IDLE_S) -> int:
    """Return the status of a process when it has ended. Raises: AssertionError, as `wait_until` does."""
    wait_until(lambda: process.poll() is not None, f"{process.args!r} hangs", idle_s)
    status: int = process.returncode
    return status
