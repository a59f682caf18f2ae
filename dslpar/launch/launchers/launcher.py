"""What a launcher is to `dslpar launch`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from dslpar.core.catalog import finding
from dslpar.core.errors import Finding
from dslpar.launch.request import Command, Context


def _no_findings(context: Context) -> Iterator[Finding]:
    return iter(())


@dataclass(frozen=True, kw_only=True)
class Launcher:
    """One launcher. Its functions are pure but for files that the launcher itself would read."""

    program: str
    """What must be installed here."""
    install: str
    """How to install it."""
    commands: Callable[[Context], Iterator[Command]]
    """Its command lines; most launchers need one."""
    commands_without_ssh: Callable[[Context], Iterator[Command]] | None = None
    """One for each host, to be run on it; None: it starts all hosts from one of them."""
    findings: Callable[[Context], Iterator[Finding]] = _no_findings
    """What it would misread, or do otherwise than requested."""
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
    if len({host.devices for host in context.hosts}) > 1:
        message = f"{context.request.launcher} gives every host the same accelerators, and the selection differs"
        yield finding("HST219", message, "--launcher deepspeed or torchrun")
