"""The launchers, a module each: its command lines, what it needs, and what it would do wrong.

To add one: a module here with a `LAUNCHER` (launcher.py), a row in dslpar/cluster/launchers.py for its ranks to read,
and its line in docs/hosts.md. Module and row have the name that --launcher takes.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module

from dslpar.cluster.launchers import LAUNCHERS
from dslpar.launch.launchers.launcher import Launcher

NAMES: tuple[str, ...] = tuple(LAUNCHERS)


def load(name: str) -> Launcher:
    """Import the launcher of that name."""
    launcher: Launcher = import_module(f"{__name__}.{name}").LAUNCHER
    return launcher


def all_launchers() -> Iterator[tuple[str, Launcher]]:
    """Each launcher with its name."""
    return ((name, load(name)) for name in NAMES)
