"""What must be known of each launcher by who runs beneath it: a row a launcher, and nothing else.

A rank reads from it where it stands in its job (dslpar/distributed/bootstrap.py), and a rank's guard which processes
above the rank are launchers (dslpar/watchdog). How a launcher is started stands in dslpar/launch/launchers. This file
imports the standard library alone: guards load it, and start in milliseconds.

The variables are those of the launchers' manuals, and those that DeepSpeed 0.19, OpenMPI 5 and MPICH 5 do set.

    >>> launched_by({"PMI_RANK": "3", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1"})
    'MPICH'
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class RankVariables(NamedTuple):
    """The environment variables in which a launcher tells a rank its place."""

    rank: str
    world_size: str
    local_rank: str
    local_size: tuple[str, ...]
    """Of these, the first that is set; Slurm's holds a list with a number for each host."""
    job: tuple[str, ...] = ()
    """Tell jobs on one host apart, where the launcher names no port: the port is made of them."""

    def are_set(self, environ: Mapping[str, str]) -> bool:
        """Whether they tell a whole place."""
        return all(name in environ for name in (self.rank, self.world_size, self.local_rank))


class LauncherRow(NamedTuple):
    """A launcher, as seen from beneath."""

    title: str
    """How messages name it."""
    variables: RankVariables
    programs: tuple[str, ...] = ()
    """What its processes above a rank run: a program's file name, or a module's name after `python -m`."""
    ends_with_job: Mapping[str, str] = {}
    """Those of the programs that serve one job alone, so that a guard may end them, each with how an argument must
    begin for that; "": whatever the arguments.
    """


_TORCH = RankVariables("RANK", "WORLD_SIZE", "LOCAL_RANK", ("LOCAL_SIZE", "LOCAL_WORLD_SIZE"))

LAUNCHERS: Mapping[str, LauncherRow] = {
    "deepspeed": LauncherRow(
        "deepspeed",
        _TORCH,
        programs=("deepspeed", "deepspeed.pt", "ds", "deepspeed.launcher.runner", "deepspeed.launcher.launch"),
        ends_with_job={"deepspeed.launcher.launch": ""},  # the runner ends with what it runs
    ),
    "openmpi": LauncherRow(
        "OpenMPI",
        RankVariables(
            "OMPI_COMM_WORLD_RANK",
            "OMPI_COMM_WORLD_SIZE",
            "OMPI_COMM_WORLD_LOCAL_RANK",
            ("OMPI_COMM_WORLD_LOCAL_SIZE",),
            job=("PMIX_NAMESPACE",),
        ),
        programs=("mpirun", "mpiexec", "orterun", "prterun", "prted", "orted"),
        # A prted of `mpirun` is known by the job's name; any other one serves a machine's other users too.
        ends_with_job={"mpirun": "", "mpiexec": "", "orterun": "", "prterun": "", "orted": "", "prted": "prterun-"},
    ),
    "mpich": LauncherRow(
        "MPICH",
        RankVariables("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", ("MPI_LOCALNRANKS",), job=("PMI_JOBID",)),
        programs=("mpirun", "mpiexec", "mpiexec.hydra", "hydra_pmi_proxy"),
        ends_with_job={"mpirun": "", "mpiexec": "", "mpiexec.hydra": "", "hydra_pmi_proxy": ""},
    ),
    # Variables of a step that srun started; in a batch script by itself, Slurm's are those of one process. Above a rank
    # stands slurmstepd, which ends the step by itself.
    "slurm": LauncherRow(
        "Slurm",
        RankVariables(
            "SLURM_PROCID",
            "SLURM_STEP_NUM_TASKS",
            "SLURM_LOCALID",
            ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE"),
            job=("SLURM_JOB_ID", "SLURM_STEP_ID"),  # a job may have several steps on one host at once
        ),
    ),
    "torchrun": LauncherRow(
        "torchrun", _TORCH, programs=("torchrun", "torch.distributed.run", "torch.distributed.launch")
    ),
}
"""In the order in which variables are looked for: who starts ranks inside an allocation comes before who made it."""

VARIABLES: tuple[RankVariables, ...] = tuple(dict.fromkeys(row.variables for row in LAUNCHERS.values()))


def launched_by(environ: Mapping[str, str]) -> str:
    """The launcher that has started this process as one of several; empty: none, or it is a terminal's shell
    (`srun --pty`), or a host's only process, as Kubernetes numbers hosts by RANK and WORLD_SIZE alone.
    """
    for variables in VARIABLES:
        if variables.are_set(environ) and int(environ[variables.world_size]) > 1:
            titles = [row.title for row in LAUNCHERS.values() if row.variables == variables]
            return "" if "SLURM_PTY_PORT" in environ else " or ".join(titles)
    return ""
