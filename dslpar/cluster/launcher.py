"""Launcher type: a launcher's interface to its ranks and their guards, and to `dslpar launch`, which starts it.

A rank uses it to read its place in the job (dslpar/distributed/bootstrap.py). A guard uses it to recognize launchers
among the rank's ancestors (dslpar/watchdog). Guards start in milliseconds, so this module and those of
dslpar/cluster/launchers import only the standard library and dslpar.cluster.command. Functions that make command lines
import the rest when they are called.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

from dslpar.cluster.command import NOTHING, Command

if TYPE_CHECKING:
    from dslpar.cluster.request import Context
    from dslpar.core.errors import Finding


class RankVariables(NamedTuple):
    """Environment variables in which a launcher passes a rank its place."""

    rank: str
    world_size: str
    local_rank: str
    local_size: tuple[str, ...]
    """Candidates, of which the first that is set counts. Slurm's has a list with one number per host."""
    job: tuple[str, ...] = ()
    """Variables that identify a job on its host. They determine the port if the launcher names none."""

    def are_set(self, environ: Mapping[str, str]) -> bool:
        """Return whether rank, world size and local rank are all set."""
        return all(name in environ for name in (self.rank, self.world_size, self.local_rank))


TORCH_VARIABLES = RankVariables("RANK", "WORLD_SIZE", "LOCAL_RANK", ("LOCAL_SIZE", "LOCAL_WORLD_SIZE"))


class Launcher(NamedTuple):
    """One launcher. Its functions are pure, except that they read files which the launcher itself would read."""

    title: str
    """Its name in messages."""
    variables: RankVariables
    program: str
    """The program that must be installed on this host."""
    install: str
    """Installation advice for messages."""
    commands: Callable[[Context], Iterator[Command]]
    """Makes its command lines; most launchers need one."""
    commands_without_ssh: Callable[[Context], Iterator[Command]] | None = None
    """Makes one command line per host, to run on that host; None: the launcher starts all hosts from one of them."""
    findings: Callable[[Context], Iterator[Finding]] = lambda context: iter(())
    """Finds parts of a request that it would misread, or carry out differently."""
    processes: tuple[str, ...] = ()
    """Names of its processes above a rank: a program's file name, or a module's name after `python -m`."""
    ends_with_job: Mapping[str, str] = NOTHING
    """Processes that serve only one job, so that a guard may end them.

    The value is the prefix that one of the arguments must have for that; "" means any arguments.
    """
    remote_programs: tuple[str, ...] = ()
    """Programs that must be installed on this host to reach others."""
    of_this_python: bool = False
    """Whether it starts ranks with the Python that it is installed in. Then the one beside this Python is used."""
    mpirun_version: tuple[str, ...] = ()
    """Texts of which `mpirun --version` prints one if mpirun is this launcher."""
    takes_ipv6: bool = False
    """Whether it accepts an IPv6 address as a host. Others read the part after a colon as a number or a name."""
    scheduler: str = ""
    """The scheduler (a key of nodelist.ALLOCATIONS) that gives it hosts. It reaches them without ssh, and may run on
    several hosts even if none is named.
    """


def same_devices_on_all_hosts(context: Context) -> Iterator[Finding]:
    """Find hosts with different selections of accelerators: mpirun has one CUDA_VISIBLE_DEVICES for all hosts."""
    from dslpar.core.catalog import finding

    if len({host.devices for host in context.hosts}) > 1:
        message = f"{context.request.launcher} gives every host the same accelerators, and the selection differs"
        yield finding("HST219", message, "--launcher deepspeed or torchrun")
