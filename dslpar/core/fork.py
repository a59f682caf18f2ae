"""os.fork, with what makes it cheap in a process that has imported much."""

from __future__ import annotations

import gc
import os
import warnings


def fork() -> int:
    """As os.fork. The child's garbage collector leaves alone what it inherits: to look at an object is to copy it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # from Python 3.12 on, where the parent has threads
        gc.freeze()
        pid = os.fork()
    if pid:
        gc.unfreeze()
    return pid
