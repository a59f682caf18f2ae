"""Local facts: the programs, cores, accelerators, environment and free port of this host, for making command lines."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping

from dslpar.cluster import network
from dslpar.cluster.hostfile import Cluster
from dslpar.cluster.launchers import LAUNCHERS
from dslpar.cluster.request import LocalFacts
from dslpar.launch.agent import JOB, num_accelerators, num_cores

FORWARDED = ("CUBLAS_", "CUDA_", "DS_", "DSLPAR_", "GLOO_", "NCCL_", "OMP_", "PYTHON", "PYTORCH_", "TORCH_", "UCX_")
"""Prefixes of the environment variables that are forwarded to ranks on other hosts."""
_NOT_FORWARDED = ("CUDA_HOME", "CUDA_PATH", "CUDA_VISIBLE_DEVICES", "DS_ENV_FILE", JOB)
"""Variables that are not forwarded in spite of their prefix: this host's devices and folders, and the job's mark."""


def find_local_facts(cluster: Cluster | None, environ: Mapping[str, str]) -> LocalFacts:
    """Collect the facts of this host. This runs `mpirun --version`, and looks for a free port."""
    programs = dict(_programs(environ))
    on_cpu = environ.get("DS_ACCELERATOR") == "cpu"
    listed = None if on_cpu else environ.get("CUDA_VISIBLE_DEVICES")
    devices = None if listed is None else tuple(d.strip() for d in listed.split(",") if d.strip() not in ("", "-1"))
    accelerators = 0 if on_cpu else num_accelerators()
    forwarded = [name for name in sorted(environ) if name.startswith(FORWARDED) and name not in _NOT_FORWARDED]
    return LocalFacts(
        programs=programs,
        mpi=_mpi_of(programs["mpirun"]) if "mpirun" in programs else "",
        local_hosts=frozenset(host.name for host in (cluster.hosts if cluster else ()) if network.is_here(host.name)),
        cores=num_cores(),
        accelerators=accelerators if devices is None else min(accelerators, len(devices)),
        visible_devices=devices,
        port=network.free_port(),
        root=os.geteuid() == 0,
        environ=dict(environ),
        forwarded={name: environ[name] for name in forwarded},
        folder=os.getcwd(),
        job_id=secrets.token_hex(8),
    )


def _programs(environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield each launcher's installed programs, as pairs (name, command).

    The command is the bare name if a shell finds the same program by this name, otherwise the program's path.
    """
    beside, path = os.path.dirname(sys.executable), environ.get("PATH", os.defpath)
    yield "python", sys.executable
    known: set[str] = set()
    for launcher in LAUNCHERS.values():
        # MPI and Slurm are looked for in PATH first. A launcher that starts ranks with the Python it is installed in
        # must be the one beside this Python.
        folders = (beside, path) if launcher.of_this_python else (path, beside)
        for name in {launcher.program, *launcher.remote_programs} - known:
            known.add(name)
            if found := shutil.which(name, path=os.pathsep.join(folders)):
                in_path = shutil.which(name, path=path)
                yield name, name if in_path and os.path.samefile(in_path, found) else found


def _mpi_of(mpirun: str) -> str:
    """Return the launcher that `mpirun` belongs to; for an unknown MPI, the first line of its version text."""
    version = subprocess.run([mpirun, "--version"], capture_output=True, text=True, timeout=60).stdout
    kinds = (name for name, launcher in LAUNCHERS.items() if any(text in version for text in launcher.mpirun_version))
    return next(kinds, version.strip().partition("\n")[0] or "unknown")
