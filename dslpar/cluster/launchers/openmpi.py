"""OpenMPI's mpirun, 5.0 and later."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING

from dslpar.cluster import ssh
from dslpar.cluster.command import Command
from dslpar.cluster.launcher import Launcher, RankVariables, same_devices_on_all_hosts

if TYPE_CHECKING:
    from dslpar.cluster.request import Context, LocalFacts


def _commands(context: Context) -> Iterator[Command]:
    request, facts = context.request, context.facts
    # --bind-to none: otherwise OpenMPI numbers local ranks by core, and refuses more ranks than cores.
    flags = [facts.programs["mpirun"], "-np", str(request.world_size), "--bind-to", "none"]
    if context.remote:
        flags += ["--host", ",".join(f"{host.name}:{host.slots}" for host in context.hosts)]
        flags += ["--map-by", f"ppr:{context.slots}:node"]
        prefix = _prefix(facts)
        flags += ["--prefix", prefix] if prefix else []
        # All ssh connections start on this host: OpenMPI truncates flags at `=` when hosts start further hosts.
        flags += ["--prtemca", "plm_ssh_no_tree_spawn", "1", "--prtemca", "plm_ssh_args", shlex.join(ssh.flags())]
    elif request.world_size > facts.cores:
        flags += ["--oversubscribe"]
    flags += ["--allow-run-as-root"] if facts.root else []
    for name, value in context.mpi_environ.items():
        flags += ["-x", f"{name}={value}"]
    yield Command({}, (*flags, *context.program))


def _prefix(facts: LocalFacts) -> str:
    """Return the folder above bin/mpirun, for hosts without it in their PATH; empty for the system's own mpirun."""
    found = shutil.which(facts.programs["mpirun"], path=facts.environ.get("PATH", os.defpath))
    prefix = os.path.dirname(os.path.dirname(os.path.abspath(found))) if found else ""
    return "" if prefix in ("/usr", "/usr/local", "/") else prefix


LAUNCHER = Launcher(
    title="OpenMPI",
    variables=RankVariables(
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        ("OMPI_COMM_WORLD_LOCAL_SIZE",),
        job=("PMIX_NAMESPACE",),
    ),
    processes=("mpirun", "mpiexec", "orterun", "prterun", "prted", "orted"),
    # A prted that mpirun has started has the job's name among its arguments. Any other prted may serve other jobs too.
    ends_with_job={"mpirun": "", "mpiexec": "", "orterun": "", "prterun": "", "orted": "", "prted": "prterun-"},
    program="mpirun",
    install="pip install 'dslpar[mpi]', or the system's package openmpi-bin",
    commands=_commands,
    findings=same_devices_on_all_hosts,
    remote_programs=("ssh",),
    mpirun_version=("Open MPI", "OpenRTE"),
)
