"""os.fork that stays cheap in a process with many imported modules."""

from __future__ import annotations

import gc
import os
import warnings


def fork() -> int:
    """Call os.fork so that the child's garbage collector skips inherited objects: visiting one would copy its page."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns if the parent has threads
        gc.freeze()
        pid = os.fork()
    if pid:
        gc.unfreeze()
    return pid
