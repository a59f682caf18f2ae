"""os.fork for tests, with what makes it cheap in a process that has imported much."""

from __future__ import annotations

import gc
import os
import warnings


def fork() -> int:
    """As os.fork; what the child inherits, its garbage collector leaves alone: to look at it is to copy it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # from Python 3.12 on, where pytest has threads of its own
        gc.freeze()
        pid = os.fork()
    if pid:
        gc.unfreeze()
    return pid
