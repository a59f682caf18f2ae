"""Launcher variables of a rank: read its rank and world size, and refuse two sets of variables that disagree.

    variables = rank_variables(os.environ)      # RANK, WORLD_SIZE, LOCAL_RANK; or OpenMPI's, MPICH's, Slurm's; or None
    place = read_place(variables, os.environ)   # Place(rank=1, world_size=8, local_rank=1)

The environment may hold several sets. Some of them belong together: `srun torchrun` starts ranks in two levels, and
`mpirun` in a Slurm job does so too. Others are left over, for example WORLD_SIZE=1 from a shell's earlier experiment.
Under `mpirun -np 2`, this would start two lone runs in one folder, so such a pair is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from dslpar.cluster.launcher import RankVariables
from dslpar.cluster.launchers import LAUNCHERS, VARIABLES
from dslpar.core.catalog import raise_finding

_RAY = "RAY_JOB_ID"
"""Ray sets it in its workers. Ray Train sets RANK, WORLD_SIZE and LOCAL_RANK too, and is no launcher of dslpar's."""


class Place(NamedTuple):
    """A process's place in its job, by one set of variables."""

    rank: int
    world_size: int
    local_rank: int


def rank_variables(environ: Mapping[str, str]) -> RankVariables | None:
    """Return the first complete set of variables, which gives this process's place in its job; None: there is none.

    Raises:
        DslparError: another set gives another place, or a value is not a number or not a rank of its world.
    """
    complete = [variables for variables in VARIABLES if variables.are_set(environ)]
    if len(complete) > 1:
        _refuse_conflict(complete[0], complete[1], environ)
    return complete[0] if complete else None


def read_place(variables: RankVariables, environ: Mapping[str, str]) -> Place:
    """Return the place that a complete set of variables gives.

    Raises:
        DslparError: a value is not a number or not a rank of its world.
    """
    rank, world_size, local_rank = (
        read_number(name, environ) for name in (variables.rank, variables.world_size, variables.local_rank)
    )
    if rank >= world_size:
        message = f"{variables.rank} is {rank}, but {variables.world_size} is {world_size}, so ranks are below that"
        raise_finding("HST201", message, f"if they are left over: unset {variables.names()}")
    return Place(rank, world_size, local_rank)


def read_number(name: str, environ: Mapping[str, str]) -> int:
    """Return a launcher variable's value.

    Raises:
        DslparError: it is not a whole number from 0.
    """
    if not environ[name].strip().isdecimal():
        raise_finding("HST201", f"{name} is {environ[name]!r}, not a whole number", f"unset {name}, or set the number")
    return int(environ[name])


def is_first_process(environ: Mapping[str, str]) -> bool:
    """Return whether all complete sets of variables give this process rank 0, so that it reports for all ranks."""
    complete = (variables for variables in VARIABLES if variables.are_set(environ))
    return all(environ[variables.rank].strip() == "0" for variables in complete)


def starts_several(environ: Mapping[str, str]) -> RankVariables | None:
    """Return the variables of the launcher that started this process as one of several; None: there is none.

    Two cases do not count: a terminal's shell (`srun --pty`), and an environment with only RANK and WORLD_SIZE.
    Kubernetes uses these two to number hosts, each with a single process.

    >>> starts_several({"PMI_RANK": "3", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1"}).rank
    'PMI_RANK'
    """
    for variables in VARIABLES:
        if variables.are_set(environ) and read_number(variables.world_size, environ) > 1:
            return None if "SLURM_PTY_PORT" in environ else variables
    return None


def titles(variables: RankVariables) -> str:
    """Name the launchers that set these variables."""
    return " or ".join(launcher.title for launcher in LAUNCHERS.values() if launcher.variables == variables)


def without_ranks(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment in which a launcher starts a new job: without variables that are left over from another.

    A scheduler's variables stay, since its job gives the new one its hosts.
    """
    dropped = {_RAY}
    for launcher in LAUNCHERS.values():
        if not launcher.scheduler:
            rank, world_size, local_rank, local_size, job = launcher.variables
            dropped |= {rank, world_size, local_rank, *local_size, *job, *launcher.marks}
    return {name: value for name, value in environ.items() if name not in dropped}


def _refuse_conflict(inner: RankVariables, outer: RankVariables, environ: Mapping[str, str]) -> None:
    """Raise DslparError if `inner`, the set that counts, is left over from another job than `outer`'s.

    Two sets belong together if each process of `outer` started the same number of consecutive ranks of `inner`. This
    includes equal sets, as of a script that sets RANK from OMPI_COMM_WORLD_RANK. Two other cases are no conflict:

    - A launcher has set `inner` in this process. torchrun may number hosts in another order than srun, or start one job
      per task.
    - `outer` is a scheduler's, and `inner` an MPI launcher's. Slurm then numbers mpirun's daemons, of which the first
      host may have none.
    """
    if _is_set_by_launcher(inner, environ) or (_is_scheduler(outer) and not _is_torch(inner)):
        return
    place, other = read_place(inner, environ), read_place(outer, environ)
    per_process, rest = divmod(place.world_size, other.world_size)
    if not rest and place.rank // per_process == other.rank:
        return
    message = f"{_describe(inner, environ)}, but {_describe(outer, environ)}"
    hint = (
        f"if {titles(outer)} started this job, the former are left over: unset {inner.names()};"
        f" otherwise the latter are: unset {outer.names()}"
    )
    raise_finding("HST229", message, hint)


def _is_set_by_launcher(variables: RankVariables, environ: Mapping[str, str]) -> bool:
    marks = {name for launcher in LAUNCHERS.values() if launcher.variables == variables for name in launcher.marks}
    return any(name in environ for name in ({*marks, _RAY} if _is_torch(variables) else marks))


def _is_torch(variables: RankVariables) -> bool:
    return variables == LAUNCHERS["torchrun"].variables


def _is_scheduler(variables: RankVariables) -> bool:
    return any(launcher.scheduler for launcher in LAUNCHERS.values() if launcher.variables == variables)


def _describe(variables: RankVariables, environ: Mapping[str, str]) -> str:
    """Describe a set with its values: "RANK=0 and WORLD_SIZE=1 make this process rank 0 of 1"."""
    rank, world_size = environ[variables.rank], environ[variables.world_size]
    values = f"{variables.rank}={rank} and {variables.world_size}={world_size}"
    return f"{values} make this process rank {rank} of {world_size}"
