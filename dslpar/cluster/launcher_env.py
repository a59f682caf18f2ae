"""The variables in which each launcher tells a process its place in a job.

deepspeed and torchrun say it one way, OpenMPI, MPICH and Slurm each another (their manuals, and FACTS 1.2 to 1.4).

    >>> around({"PMI_RANK": "3", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1"})
    'MPICH'
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Launcher(NamedTuple):
    """The variables in which a launcher tells a rank its place."""

    name: str
    rank: str
    world_size: str
    local_rank: str
    local_size: tuple[str, ...]
    """Of these, the first that is set; of Slurm, all hosts' in a list."""
    job: tuple[str, ...] = ()
    """Tell jobs on one host apart, where the launcher names no port: the port is made of them."""


LAUNCHERS = (
    Launcher("deepspeed, torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", ("LOCAL_SIZE", "LOCAL_WORLD_SIZE")),
    Launcher(
        "OpenMPI",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        ("OMPI_COMM_WORLD_LOCAL_SIZE",),
        ("PMIX_NAMESPACE",),
    ),
    Launcher("MPICH", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", ("MPI_LOCALNRANKS",), ("PMI_JOBID",)),
    # of a step that srun started; in a batch script by itself, Slurm's variables are of one process
    Launcher(
        "Slurm",
        "SLURM_PROCID",
        "SLURM_STEP_NUM_TASKS",
        "SLURM_LOCALID",
        ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE"),
        ("SLURM_JOB_ID", "SLURM_STEP_ID"),  # a job may have several steps on one host at once
    ),
)
"""In the order in which they are asked: who starts ranks inside an allocation comes before who made that."""


def around(environ: Mapping[str, str]) -> str:
    """Who has started this process as one of several; empty: nobody, or it is a terminal's shell (`srun --pty`), or a
    host's only one, as Kubernetes numbers hosts by RANK and WORLD_SIZE alone.
    """
    for launcher in LAUNCHERS:
        needed = (launcher.rank, launcher.world_size, launcher.local_rank)
        if all(name in environ for name in needed) and int(environ[launcher.world_size]) > 1:
            return "" if "SLURM_PTY_PORT" in environ else launcher.name
    return ""
