"""Flush files and folders to disk."""

from __future__ import annotations

import errno
import os
from pathlib import Path


def fsync(*paths: Path) -> None:
    """Flush these files and folders to disk.

    EINVAL for a folder is ignored: a file system that cannot sync folders has nothing to flush.
    """
    for path in paths:
        opened = os.open(path, os.O_RDONLY)
        try:
            os.fsync(opened)
        except OSError as error:
            if error.errno != errno.EINVAL or not path.is_dir():
                raise
        finally:
            os.close(opened)
