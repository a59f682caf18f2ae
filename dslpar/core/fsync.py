"""What is written is on the disk, and not in the system's memory alone."""

from __future__ import annotations

import errno
import os
from pathlib import Path


def fsync(*paths: Path) -> None:
    """Bring what was written to these files and folders to the disk.

    A file system that cannot sync a folder (EINVAL) has nothing to bring there.
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
