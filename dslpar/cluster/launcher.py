"""Launcher type: the facts and functions that dslpar needs about one launcher, such as mpirun or torchrun.

A rank reads its rank and world size from the launcher's variables (dslpar/distributed/bootstrap.py). A guard, the small
process beside each rank, recognizes launchers among the rank's ancestors (dslpar/watchdog). `dslpar launch` makes the
launcher's command lines. Guards start in milliseconds, so this module and those of dslpar/cluster/launchers import only
the standard library and dslpar.cluster.command. Functions that make command lines import other modules when called.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

from dslpar.cluster.command import NOTHING, Command
from dslpar.core.catalog import finding

if TYPE_CHECKING:
    from dslpar.cluster.request import Context
    from dslpar.core.errors import Finding


class RankVariables(NamedTuple):
    """Names of the environment variables in which a launcher passes a rank its place in the job."""

    rank: str
    world_size: str
    local_rank: str
    local_size: tuple[str, ...]
    """Variables for the number of ranks on the host; the first that is set counts. Slurm's value lists all hosts."""
    job: tuple[str, ...] = ()
    """Variables that identify a job on its host. If the launcher gives no port, they determine the port."""

    def are_set(self, environ: Mapping[str, str]) -> bool:
        """Return whether rank, world size and local rank are all set."""
        return all(name in environ for name in (self.rank, self.world_size, self.local_rank))

    def names(self) -> str:
        """Return the variables' names, as arguments of the shell's `unset`."""
        return f"{self.rank} {self.world_size} {self.local_rank}"


TORCH_VARIABLES = RankVariables("RANK", "WORLD_SIZE", "LOCAL_RANK", ("LOCAL_SIZE", "LOCAL_WORLD_SIZE"))


class Launcher(NamedTuple):
    """One launcher. Its functions are pure, except that they read the files that the launcher itself would read."""

    title: str
    """The launcher's name in messages."""
    variables: RankVariables
    program: str
    """The program that must be installed on this host."""
    install: str
    """Installation advice for messages."""
    commands: Callable[[Context], Iterator[Command]]
    """Makes the launcher's command lines; most launchers need one for all hosts."""
    commands_without_ssh: Callable[[Context], Iterator[Command]] | None = None
    """Makes one command line per host, to run on that host; None: the launcher starts all hosts from one of them."""
    findings: Callable[[Context], Iterator[Finding]] = lambda context: iter(())
    """Finds parts of a request that the launcher would misread, or carry out differently."""
    processes: tuple[str, ...] = ()
    """Names of the launcher's processes above a rank: a program's file name, or a module's name after `python -m`."""
    ends_with_job: Mapping[str, str] = NOTHING
    """Names of the launcher's processes that serve only one job, so that a guard may end them.

    The value is a prefix: a process with this name serves one job if one of its arguments has the prefix; "": always.
    """
    marks: tuple[str, ...] = ()
    """Variables that only this launcher sets in its ranks. They show that `variables` are not left over."""
    remote_programs: tuple[str, ...] = ()
    """Programs that must be installed on this host to reach other hosts."""
    of_this_python: bool = False
    """Whether the launcher starts ranks with the Python that it is installed in. Then `dslpar launch` uses the launcher
    beside its own Python.
    """
    mpirun_version: tuple[str, ...] = ()
    """Texts that identify this launcher: `mpirun --version` prints one of them."""
    takes_ipv6: bool = False
    """Whether the launcher accepts an IPv6 address as a host. Other launchers split it at its colons."""
    scheduler: str = ""
    """The scheduler (a key of nodelist.ALLOCATIONS) that gives the launcher its hosts; empty: none. Such a launcher
    needs no ssh, and may run on several hosts even if no hosts are named.
    """


def same_devices_on_all_hosts(context: Context) -> Iterator[Finding]:
    """Find hosts with different selections of accelerators. mpirun sets the same CUDA_VISIBLE_DEVICES on all hosts."""
    if len({host.devices for host in context.hosts}) > 1:
        message = f"{context.request.launcher} gives all hosts the same accelerators, but the hosts' selections differ"
        yield finding("HST219", message, "--launcher deepspeed or torchrun")
