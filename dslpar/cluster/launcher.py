"""What a launcher is: to the ranks and guards that run beneath it, and to `dslpar launch`, which starts it.

A rank reads where it stands in its job (dslpar/distributed/bootstrap.py), and its guard which processes above the rank
are launchers (dslpar/watchdog). Guards start in milliseconds, so this module, and those of dslpar/cluster/launchers,
import the standard library and dslpar.cluster.command alone; functions that make command lines import the rest when
called.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

from dslpar.cluster.command import NOTHING, Command

if TYPE_CHECKING:
    from dslpar.cluster.request import Context
    from dslpar.core.errors import Finding


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


TORCH_VARIABLES = RankVariables("RANK", "WORLD_SIZE", "LOCAL_RANK", ("LOCAL_SIZE", "LOCAL_WORLD_SIZE"))


class Launcher(NamedTuple):
    """One launcher. Its functions are pure but for files that the launcher itself would read."""

    title: str
    """How messages name it."""
    variables: RankVariables
    program: str
    """What must be installed here."""
    install: str
    """How to install it."""
    commands: Callable[[Context], Iterator[Command]]
    """Its command lines; most launchers need one."""
    commands_without_ssh: Callable[[Context], Iterator[Command]] | None = None
    """One for each host, to be run on it; None: it starts all hosts from one of them."""
    findings: Callable[[Context], Iterator[Finding]] = lambda context: iter(())
    """What it would misread, or do otherwise than requested."""
    processes: tuple[str, ...] = ()
    """What its processes above a rank run: a program's file name, or a module's name after `python -m`."""
    ends_with_job: Mapping[str, str] = NOTHING
    """Those of the processes that serve one job alone, so that a guard may end them, each with how an argument must
    begin for that; "": whatever the arguments.
    """
    remote_programs: tuple[str, ...] = ()
    """What must be installed here to reach other hosts."""
    of_this_python: bool = False
    """Whether it starts ranks with the Python that it is installed in: the one beside this Python is meant, then."""
    mpirun_version: tuple[str, ...] = ()
    """What `mpirun --version` says, one of these, where mpirun is this launcher's."""
    takes_ipv6: bool = False
    """Whether it takes an IPv6 address for a host; others read what follows a colon as a number or a name."""
    scheduler: str = ""
    """The scheduler (a key of nodelist.ALLOCATIONS) that gives it hosts: it reaches them without ssh, also where none
    is named.
    """


def same_devices_on_all_hosts(context: Context) -> Iterator[Finding]:
    """Find a selection of accelerators that differs from host to host: mpirun's one line has one
    CUDA_VISIBLE_DEVICES for all.
    """
    from dslpar.core.catalog import finding

    if len({host.devices for host in context.hosts}) > 1:
        message = f"{context.request.launcher} gives every host the same accelerators, and the selection differs"
        yield finding("HST219", message, "--launcher deepspeed or torchrun")
