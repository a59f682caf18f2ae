"""Memory in huge pages: nothing in it changes, and a fork copies less of the page table where the system has them."""

from __future__ import annotations

import mmap
import re
import sys
from pathlib import Path

import pytest

from tests.support import huge_pages

SIZE = 16 << 20


def _in_huge_pages() -> int:
    """Return the bytes of this process that are in huge pages."""
    found = re.search(r"AnonHugePages: +(\d+) kB", Path("/proc/self/smaps_rollup").read_text())
    assert found is not None
    return int(found[1]) * 1024


def test_memory_without_a_file_is_chosen_and_aligned() -> None:
    maps = (
        "7f0000100000-7f0000800000 rw-p 00000000 00:00 0 \n"
        "7f0001000000-7f0001200000 rw-p 00000000 00:00 0 [heap]\n"
        "7f0002000000-7f0002800000 r-xp 00000000 08:01 123 /usr/lib/libc.so\n"
        "7f0003000000-7f0003800000 rw-s 00000000 00:00 0 \n"
        "7f0004000000-7f0004800000 rw-p 00001000 08:01 123 /usr/lib/libc.so\n"
        "7f0005000000-7f0005800000 r--p 00000000 00:00 0 \n"
        "7f0006000000-7f0006100000 rw-p 00000000 00:00 0 \n"
        "7ffc00000000-7ffc00800000 rw-p 00000000 00:00 0 [stack]\n"
    )
    assert [*huge_pages._aligned(maps)] == [(0x7F0000200000, 3 << 21), (0x7F0001000000, 1 << 21)]


@pytest.mark.skipif(sys.platform != "linux", reason="Linux's")
def test_memory_is_the_same_afterwards() -> None:
    with mmap.mmap(-1, SIZE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory[:] = bytes(range(256)) * (SIZE // 256)
        collapsed = huge_pages.collapse()
        assert memory[:] == bytes(range(256)) * (SIZE // 256)
        assert collapsed == 0 or _in_huge_pages() > 0
    assert huge_pages.collapse() >= 0
