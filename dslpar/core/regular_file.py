"""Read a file that a config names: a regular one, and so much of it alone.

    data = read_bounded(path, MAX_BYTES)      # longer than MAX_BYTES: there is more of it

A FIFO would wait for somebody who writes to it, and /dev/zero never ends: lint reads what a config names, in an editor
too, and neither hangs nor fills memory.
"""

from __future__ import annotations

import errno
import os
import stat


def read_bounded(path: str, max_bytes: int) -> bytes:
    """Return the file's bytes; of one that is longer than `max_bytes`, more than so many, but not all.

    Raises:
        OSError: it cannot be read, or is not a regular file.
    """
    # Without O_NONBLOCK, to open a FIFO waits for somebody who writes to it.
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0))
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file")
        # In chunks, since the size that fstat reports is no bound: a file may grow, and those of /proc say 0.
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
