"""Bounded reading of a file that a config names, if it is a regular file.

    data = read_bounded(path, MAX_BYTES)      # longer than MAX_BYTES: there is more of it

Opening a FIFO waits for a writer, and /dev/zero never ends. Lint reads files that a config names, in an editor too, and
must neither hang nor fill memory.
"""

from __future__ import annotations

import errno
import os
import stat


def read_bounded(path: str, max_bytes: int) -> bytes:
    """Return the file's bytes. If it is longer than `max_bytes`, return more than `max_bytes`, but perhaps not all.

    Raises:
        OSError: the file cannot be read, or is not a regular file.
    """
    # Without O_NONBLOCK, opening a FIFO waits for a writer.
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0))
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file")
        # In chunks, since the size that fstat reports is not a bound: a file may grow, and files in /proc report 0.
        chunks: list[bytes] = []
        length = 0
        while length <= max_bytes:
            chunks.append(os.read(descriptor, max_bytes + 1))
            length += len(chunks[-1])
            if not chunks[-1]:
                break
        return b"".join(chunks)
    finally:
        os.close(descriptor)
