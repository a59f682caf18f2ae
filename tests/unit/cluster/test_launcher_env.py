"""dslpar.cluster.launcher_env: a rank's place by each launcher's variables, and sets that disagree."""

import re

import pytest

from dslpar.cluster.launcher_env import rank_variables, read_place, starts_several, titles, without_ranks
from dslpar.core.errors import DslparError

_SETS = {
    "torch": ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    "openmpi": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    "mpich": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
    "slurm": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
}


def place(name: str, rank: int, world_size: int, local_rank: int = 0) -> dict[str, str]:
    """Return the variables of a set."""
    return dict(zip(_SETS[name], map(str, (rank, world_size, local_rank)), strict=True))


TORCHRUN = {"TORCHELASTIC_RUN_ID": "none"}
DEEPSPEED = {"CROSS_RANK": "0", "CROSS_SIZE": "1", "LOCAL_SIZE": "2"}

TOGETHER = {
    "torchrun inside srun, one per host": (place("torch", 5, 8, 1) | place("slurm", 1, 2), 5),
    "torchrun numbers hosts in another order": (place("torch", 1, 8, 1) | place("slurm", 1, 2) | TORCHRUN, 1),
    "a lone torchrun per task": (place("torch", 0, 1) | place("slurm", 3, 4, 3) | TORCHRUN, 0),
    "deepspeed inside mpirun": (place("torch", 1, 2, 1) | place("openmpi", 0, 1) | DEEPSPEED, 1),
    "Ray inside srun": (place("torch", 0, 8) | place("slurm", 1, 2) | {"RAY_JOB_ID": "01000000"}, 0),
    "a program that spawns ranks, inside mpirun": (place("torch", 9, 16, 1) | place("openmpi", 1, 2), 9),
    "a script that sets RANK from OpenMPI's": (place("torch", 3, 4, 0) | place("openmpi", 3, 4, 3), 3),
    "mpirun inside a Slurm job": (place("openmpi", 1, 8, 1) | place("slurm", 1, 2), 1),
    "mpirun on the second host of a Slurm job": (place("openmpi", 4, 8) | place("slurm", 0, 1), 4),
    "mpirun in an interactive shell": (place("openmpi", 1, 2, 1) | place("slurm", 0, 8), 1),
    "a script that sets RANK, mpirun, Slurm": (
        place("torch", 4, 8) | place("openmpi", 4, 8) | place("slurm", 0, 1),
        4,
    ),
    "Kubernetes numbers hosts": ({"RANK": "1", "WORLD_SIZE": "2"} | place("openmpi", 3, 4), 3),
    "in a Slurm job's shell": (place("torch", 3, 4, 3) | place("slurm", 0, 1), 3),
}


@pytest.mark.parametrize("case", TOGETHER)
def test_launchers_that_work_together_are_accepted(case: str) -> None:
    environ, rank = TOGETHER[case]
    variables = rank_variables(environ)
    assert variables is not None
    assert read_place(variables, environ).rank == rank


APART = {
    "WORLD_SIZE=1 is left over, under mpirun": ("torch", (0, 1), "openmpi", (1, 2)),
    "and on its rank 0": ("torch", (0, 1), "openmpi", (0, 2)),
    "WORLD_SIZE=4 is left over, under mpirun": ("torch", (0, 4), "openmpi", (1, 2)),
    "the same world size, another rank": ("torch", (0, 2), "openmpi", (1, 2)),
    "WORLD_SIZE=1 is left over, under MPICH": ("torch", (0, 1), "mpich", (0, 8)),
    "WORLD_SIZE=1 is left over, under srun": ("torch", (0, 1), "slurm", (0, 4)),
    "MPICH's are left over, under OpenMPI": ("mpich", (0, 1), "openmpi", (1, 2)),
    "OpenMPI's are left over, under MPICH": ("mpich", (1, 2), "openmpi", (0, 4)),
}


@pytest.mark.parametrize("case", APART)
def test_variables_that_are_left_over_are_refused(case: str) -> None:
    """The message has both sets with their values, and following the help leaves the other set."""
    inner, inner_place, outer, outer_place = APART[case]
    environ = place(inner, *inner_place) | place(outer, *outer_place)
    with pytest.raises(DslparError) as caught:
        rank_variables(environ)
    (found,) = caught.value.findings
    assert found.code == "HST229"
    for name, value in environ.items():
        assert f"{name}={value}" in found.message or name in (_SETS[inner][2], _SETS[outer][2])
    unset = re.findall(r"unset ((?:[A-Z_]+ ?)+)", found.help)
    assert [names.split() for names in unset] == [list(_SETS[inner]), list(_SETS[outer])]
    for names, (rank, world_size) in zip(unset, (outer_place, inner_place), strict=True):
        left = {name: value for name, value in environ.items() if name not in names.split()}
        variables = rank_variables(left)
        assert variables is not None
        assert read_place(variables, left)[:2] == (rank, world_size)


def test_the_launcher_of_one_of_several_processes() -> None:
    slurm = place("slurm", 5, 8, 1)
    for environ, title in (
        ({}, ""),
        ({"SLURM_PROCID": "0", "SLURM_LOCALID": "0"}, ""),  # a batch script, without srun
        ({"PMI_RANK": "0", "PMI_SIZE": "1"}, ""),
        (slurm, "Slurm"),
        (place("mpich", 3, 8), "MPICH"),
        (place("torch", 1, 4, 1), "deepspeed or torchrun"),
        ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "n0"}, ""),  # a host of a Kubernetes job
        (slurm | {"SLURM_PTY_PORT": "4000"}, ""),  # srun --pty bash
    ):
        variables = starts_several(environ)
        assert (titles(variables) if variables else "") == title, environ


def test_a_new_job_starts_without_variables_of_another() -> None:
    kept = {"PATH": "/bin", "MASTER_ADDR": "n0", "SLURM_JOB_ID": "7"} | place("slurm", 0, 1)
    left_over = place("torch", 0, 1) | place("openmpi", 0, 1) | place("mpich", 0, 1) | TORCHRUN | DEEPSPEED
    assert without_ranks(kept | left_over) == kept | {"CROSS_RANK": "0"}
