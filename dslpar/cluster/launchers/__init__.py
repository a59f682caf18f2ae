"""The launchers, a module each: where a rank stands, which processes are its own, its command lines.

To add one: a module here with a `LAUNCHER` (dslpar/cluster/launcher.py), and its line in docs/hosts.md. The module has
the name that --launcher takes; nothing else lists it.

The variables are those of the launchers' manuals, and those that DeepSpeed 0.19, OpenMPI 5 and MPICH 5 do set.

    >>> launched_by({"PMI_RANK": "3", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1"})
    'MPICH'
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib import import_module

from dslpar.cluster.launcher import Launcher, RankVariables


def _load() -> Mapping[str, Launcher]:
    """Import the modules of this folder; by os, since pkgutil would cost a guard's start as much as all of them."""
    files = sorted(file for file in os.listdir(__path__[0]) if file.endswith(".py") and file != "__init__.py")
    found = {name: import_module(f"{__name__}.{name}").LAUNCHER for name in (file[:-3] for file in files)}
    # Where variables are looked for, who starts ranks inside an allocation comes before who made it.
    return dict(sorted(found.items(), key=lambda item: bool(item[1].scheduler)))


LAUNCHERS = _load()
VARIABLES: tuple[RankVariables, ...] = tuple(dict.fromkeys(launcher.variables for launcher in LAUNCHERS.values()))


def launched_by(environ: Mapping[str, str]) -> str:
    """The launcher that has started this process as one of several; empty: none, or it is a terminal's shell
    (`srun --pty`), or a host's only process, as Kubernetes numbers hosts by RANK and WORLD_SIZE alone.
    """
    for variables in VARIABLES:
        if variables.are_set(environ) and int(environ[variables.world_size]) > 1:
            titles = [launcher.title for launcher in LAUNCHERS.values() if launcher.variables == variables]
            return "" if "SLURM_PTY_PORT" in environ else " or ".join(titles)
    return ""
