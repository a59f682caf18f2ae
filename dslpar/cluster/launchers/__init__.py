"""Launchers, one module each: a rank's environment variables, the launcher's processes, and its command lines.

To add a launcher, add a module here with a `LAUNCHER` (dslpar/cluster/launcher.py), and a line in docs/hosts.md. The
module's name is the value of --launcher; no other list must be changed.

The variables come from the launchers' manuals, and from tests with DeepSpeed 0.19, OpenMPI 5 and MPICH 5.

    >>> LAUNCHERS["mpich"].variables.rank
    'PMI_RANK'
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib import import_module

from dslpar.cluster.launcher import Launcher, RankVariables


def _load() -> Mapping[str, Launcher]:
    """Import the modules of this folder; return their launchers by name.

    This does not use pkgutil: to import it would take a starting guard as long as all of these modules together.
    """
    files = sorted(file for file in os.listdir(__path__[0]) if file.endswith(".py") and file != "__init__.py")
    found = {name: import_module(f"{__name__}.{name}").LAUNCHER for name in (file[:-3] for file in files)}
    # Schedulers come last: a launcher that starts ranks inside an allocation has precedence over its scheduler.
    return dict(sorted(found.items(), key=lambda item: bool(item[1].scheduler)))


LAUNCHERS = _load()
VARIABLES: tuple[RankVariables, ...] = tuple(dict.fromkeys(launcher.variables for launcher in LAUNCHERS.values()))
