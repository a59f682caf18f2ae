"""What this host has that launchers need: programs, cores, accelerators, an environment, a free port."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from dslpar.cluster import network
from dslpar.cluster.hostfile import Cluster
from dslpar.launch.agent import JOB, num_accelerators, num_cores
from dslpar.launch.commands import LAUNCHERS
from dslpar.launch.job import Facts

_JOB_HOSTFILE = "/job/hostfile"
"""DeepSpeed reads it where it exists, whether asked to or not."""
TRAVELS = ("DS_", "DSLPAR_", "GLOO_", "NCCL_", "OMP_", "PYTHON", "TORCH_", "UCX_")
"""How variables begin that ranks on other hosts get from here."""
_STAYS = ("DS_ENV_FILE", JOB)


def look_around(cluster: Cluster | None, environ: Mapping[str, str]) -> Facts:
    """What this host has. It asks mpirun for its version, and the system for a free port."""
    programs = dict(_programs(environ))
    visible = _visible(environ)
    return Facts(
        programs=programs,
        mpi=_mpi_of(programs["mpirun"]) if "mpirun" in programs else "",
        mpi_prefix=_prefix(programs.get("mpirun", ""), environ),
        here=frozenset(host.name for host in (cluster.hosts if cluster else ()) if network.is_here(host.name)),
        cores=num_cores(),
        accelerators=0 if environ.get("DS_ACCELERATOR") == "cpu" else _num_accelerators(visible),
        visible=visible if environ.get("DS_ACCELERATOR") != "cpu" else None,
        threads=environ.get("OMP_NUM_THREADS"),
        cores_per_task=environ.get("SLURM_CPUS_PER_TASK", ""),
        port=network.free_port(),
        root=os.geteuid() == 0,
        job_hostfile=os.path.isfile(_JOB_HOSTFILE),
        travels={name: environ[name] for name in sorted(environ) if name.startswith(TRAVELS) and name not in _STAYS},
        deepspeed_env=tuple(_deepspeed_env_lines(environ)),
        pdsh_flags=environ.get("PDSH_SSH_ARGS_APPEND", ""),
        folder=os.getcwd(),
        job=secrets.token_hex(8),
    )


def _programs(environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """By name alone where the shell would find the same. DeepSpeed's and torch's launchers are those of this Python,
    since they start it; for an MPI or Slurm, PATH has the word.
    """
    beside, path = os.path.dirname(sys.executable), environ.get("PATH", os.defpath)
    yield "python", sys.executable
    for name in dict.fromkeys(word for launcher in LAUNCHERS.values() for word in (launcher.needs, *launcher.reaches)):
        folders = (beside, path) if name in ("deepspeed", "torchrun") else (path, beside)
        if found := shutil.which(name, path=os.pathsep.join(folders)):
            known = shutil.which(name, path=path)
            yield name, name if known and os.path.samefile(known, found) else found


def _mpi_of(mpirun: str) -> str:
    message = subprocess.run([mpirun, "--version"], capture_output=True, text=True, timeout=60).stdout
    kinds = {"Open MPI": "openmpi", "OpenRTE": "openmpi", "HYDRA": "mpich"}
    return next(
        (kind for words, kind in kinds.items() if words in message), message.strip().partition("\n")[0] or "unknown"
    )


def _prefix(mpirun: str, environ: Mapping[str, str]) -> str:
    """The folder above bin/mpirun, which other hosts' PATH may not know; the system's own they know."""
    found = shutil.which(mpirun, path=environ.get("PATH", os.defpath)) if mpirun else None
    prefix = os.path.dirname(os.path.dirname(os.path.abspath(found))) if found else ""
    return "" if prefix in ("/usr", "/usr/local", "/") else prefix


def _deepspeed_env_lines(environ: Mapping[str, str]) -> Iterator[str]:
    """Of the files that DeepSpeed would read: at home, then here."""
    name = environ.get("DS_ENV_FILE", ".deepspeed_env")
    for path in dict.fromkeys(Path(folder, name) for folder in (os.path.expanduser("~"), ".")):
        if path.is_file():
            yield from path.read_text(encoding="utf-8").splitlines()


def _visible(environ: Mapping[str, str]) -> tuple[str, ...] | None:
    message = environ.get("CUDA_VISIBLE_DEVICES")
    return (
        None
        if message is None
        else tuple(word.strip() for word in message.split(",") if word.strip() not in ("", "-1"))
    )


def _num_accelerators(visible: tuple[str, ...] | None) -> int:
    """Those that are visible."""
    return num_accelerators() if visible is None else min(num_accelerators(), len(visible))
