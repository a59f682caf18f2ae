"""The lock file of torch's compiled extensions: wait for a living owner, remove the file of a dead one.

    with building_alone(folder):                  # of torch.utils.cpp_extension, for one op
        CPUAdamBuilder().load()

torch creates `folder/lock`, keeps it open while it compiles, and removes it afterwards (torch/utils/file_baton.py). If
the owner is killed, the file stays. Two facts tell whether the owner lives. A process that has the file open is the
owner. On a network file system, or with another user's file, the owner may be out of sight. Then files that change in
the folder stand for it, since its compiler writes some. An owner in another container, which shares a local folder with
this one, counts as dead.
"""

from __future__ import annotations

import fcntl
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

LONGEST_COMPILATION_S = 600.0
"""A lock whose owner is invisible counts as left behind if nothing in its folder changed for this long.

DeepSpeed's largest ops compile for one to three minutes per file, and a folder on a network file system changes late.
"""
_POLL_S = 0.2
# File systems that are of this host alone, so that an owner on another host is impossible (the types of /proc/mounts).
_LOCAL_FILE_SYSTEMS = frozenset({"btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "ramfs", "tmpfs", "xfs", "zfs"})
log = logging.getLogger("dslpar")


@contextmanager
def building_alone(folder: Path) -> Iterator[None]:
    """Let one process of a host at a time into the block; enter it once no living process holds torch's lock.

    The kernel releases this function's own lock (`flock`) when its owner ends, however it ends.
    """
    with (folder / "dslpar.lock").open("w") as own:
        fcntl.flock(own, fcntl.LOCK_EX)
        _wait_for_owner(folder / "lock")
        yield


def _wait_for_owner(lock: Path) -> None:
    """Return when the lock's owner has released it; remove the lock if its owner is dead."""
    said = False
    while lock.exists():
        if not _may_have_owner(lock):
            lock.unlink(missing_ok=True)
            return
        if not said:
            said = True
            log.warning("another process compiles in %s: waiting until it removes its file %s", lock.parent, lock.name)
        time.sleep(_POLL_S)


def _may_have_owner(lock: Path) -> bool:
    if _is_open_in_a_process(lock):
        return True
    with suppress(FileNotFoundError):  # released meanwhile
        if _is_visible(lock):
            return False
        return time.time() - _last_change(lock.parent) < LONGEST_COMPILATION_S
    return False


def _is_open_in_a_process(lock: Path) -> bool:
    """Return whether a process of this host, whose open files this user may see, has the file open."""
    for descriptor in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(OSError):  # the process has ended, or belongs to another user
            if os.path.samestat(descriptor.stat(), lock.stat()):
                return True
    return False


def _is_visible(lock: Path) -> bool:
    """Return whether any living owner must be a process whose open files this user may see."""
    mine = os.geteuid() in (0, lock.stat().st_uid)
    return mine and Path("/proc/self/fd").exists() and _file_system(lock) in _LOCAL_FILE_SYSTEMS


def _file_system(path: Path) -> str:
    """Return the type of the file system that holds a path, as in /proc/mounts; "" if it is unknown."""
    device = path.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    with suppress(OSError):
        # Fields: id, parent, device, root, mount point, options, optional fields up to "-", type, ...
        for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines():
            fields = line.split()
            if fields[2] == number:
                return fields[fields.index("-") + 1]
    return ""


def _last_change(folder: Path) -> float:
    times = [folder.stat().st_mtime]
    for file in folder.iterdir():
        with suppress(FileNotFoundError):
            times.append(file.stat().st_mtime)
    return max(times)
