"""MPICH's mpirun (Hydra)."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import TYPE_CHECKING

from dslpar.cluster import ssh
from dslpar.cluster.command import Command
from dslpar.cluster.launcher import Launcher, RankVariables, same_devices_on_all_hosts

if TYPE_CHECKING:
    from dslpar.cluster.request import Context


def _commands(context: Context) -> Iterator[Command]:
    flags = [context.facts.programs["mpirun"], "-n", str(context.request.world_size), "-bind-to", "none"]
    if context.remote:
        flags += ["-launcher", "ssh", "-hosts", ",".join(f"{host.name}:{host.slots}" for host in context.hosts)]
    for name, value in context.mpi_environ.items():
        flags += ["-genv", name, value]
    ssh_flags = {"HYDRA_LAUNCHER_EXTRA_ARGS": shlex.join(ssh.flags())} if context.remote else {}
    yield Command(ssh_flags, (*flags, *context.program))


LAUNCHER = Launcher(
    title="MPICH",
    variables=RankVariables("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", ("MPI_LOCALNRANKS",), job=("PMI_JOBID",)),
    processes=("mpirun", "mpiexec", "mpiexec.hydra", "hydra_pmi_proxy"),
    ends_with_job={"mpirun": "", "mpiexec": "", "mpiexec.hydra": "", "hydra_pmi_proxy": ""},
    program="mpirun",
    install="pip install mpich, or the system's package mpich",
    commands=_commands,
    findings=same_devices_on_all_hosts,
    remote_programs=("ssh",),
    mpirun_version=("HYDRA",),
)
