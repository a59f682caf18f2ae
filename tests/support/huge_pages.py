"""Make forks of this process cheap: its memory in pages of 2 MiB.

    collapse()      # after the imports, before the forks

A fork copies the page table, and the end of the fork undoes it. For the 600 MiB of a pytest process that has collected
everything, that takes 40 ms per rank in pages of 4 KiB, and 8 ms in pages of 2 MiB; tests fork thousands of ranks. A
page that a rank writes is still copied in 4 KiB.

MADV_COLLAPSE is in Linux 6.1 and newer. Elsewhere, or where there is no memory for it, nothing changes.
"""

from __future__ import annotations

import ctypes
import re
import sys
from collections.abc import Iterator
from pathlib import Path

_MADV_COLLAPSE = 25
_HUGE_BYTES = 2 << 20
_MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) rw.p \S+ \S+ 0 *(?:\[heap\])?$")
"""A line of /proc/PID/maps: private memory that is writable and of no file."""


def collapse() -> int:
    """Move this process's memory into pages of 2 MiB, as far as the system does; return the bytes that are in them."""
    if sys.platform != "linux":
        return 0
    libc = ctypes.CDLL(None)
    return sum(
        size
        for start, size in _aligned(Path("/proc/self/maps").read_text())
        if libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), _MADV_COLLAPSE) == 0
    )


def _aligned(maps: str) -> Iterator[tuple[int, int]]:
    """Yield address and size of the whole huge pages in each mapping of memory without a file."""
    for line in maps.splitlines():
        if found := _MAPPING.match(line):
            first, end = (int(text, 16) for text in found.groups())
            start = -(-first // _HUGE_BYTES) * _HUGE_BYTES
            if start + _HUGE_BYTES <= end:
                yield start, (end - start) // _HUGE_BYTES * _HUGE_BYTES
