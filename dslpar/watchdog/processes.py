"""Processes, read from /proc: ancestors and descendants, the program of a command line, and the exit status.

There are two reasons not to use psutil. A guard starts without site-packages, to start in milliseconds. And psutil
knows the exit status only of child processes.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path

from dslpar.cluster.launchers import LAUNCHERS

_PROGRAMS = frozenset(("dslpar", "dslpar.cli", *(name for one in LAUNCHERS.values() for name in one.processes)))


def launchers_above(pid: int) -> list[tuple[int, int]]:
    """Return the pairs (process, its parent) from `pid` up to its highest ancestor that is a launcher.

    Return an empty list if no ancestor is a launcher.
    """
    chain: list[tuple[int, int]] = []
    known = 0
    while (above := parent(pid)) > 1:
        chain.append((pid, above))
        if program(command_line(above)) in _PROGRAMS:
            known = len(chain)
        pid = above
    return chain[:known]


def pids() -> list[int]:
    """Return the ids of all processes in /proc."""
    return [int(name) for name in os.listdir("/proc") if name.isdecimal()]


def descendants(root: int) -> list[int]:
    """Return the living descendants of a process, also those in another session, such as torchrun's ranks.

    psutil's `children` raises AccessDenied if /proc hides other users' processes (hidepid=1).
    """
    children: dict[int, list[int]] = {}
    for pid in pids():
        fields = stat(pid)
        if fields and fields[0] not in "ZX":
            children.setdefault(int(fields[1]), []).append(pid)
    found = list(children.get(root, ()))
    for pid in found:  # grows while it runs
        found += children.get(pid, ())
    return found


def program(argv: Sequence[str]) -> str:
    """Return the program or module that a command line runs, without its Python interpreter.

    >>> program(["/usr/bin/python3", "-u", "-m", "deepspeed.launcher.launch", "--world_info=e30"])
    'deepspeed.launcher.launch'
    """
    if not argv:
        return ""
    name = os.path.basename(argv[0])
    if not name.startswith("python"):
        return name
    for word, following in zip_longest(argv[1:], argv[2:], fillvalue=""):
        if word == "-m":
            return following
        if not word.startswith("-"):
            return os.path.basename(word)
    return name


def command_line(pid: int) -> list[str]:
    """Return a process's command line; empty if the process is gone."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8", errors="replace").split("\0")[:-1]
    return []


def parent(pid: int) -> int:
    """Return the id of a process's parent; 0 if the process is gone, or if the system has no /proc."""
    fields = stat(pid)
    return int(fields[1]) if fields else 0


def stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the third on; empty if the process is gone.

    The first two of them are the state and the parent. The last one is the wait status of a zombie.
    """
    with contextlib.suppress(OSError):
        # The second field is the program's name in brackets, which may itself contain brackets and spaces. So the rest
        # begins after the last bracket.
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    return []
