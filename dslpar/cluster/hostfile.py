"""Clusters: hosts and their slots, from a hostfile in any launcher's syntax, or from a scheduler's allocation.

A slot is a place for one rank. A line of a hostfile has one of these forms:

    node1 slots=4                  syntax of DeepSpeed and OpenMPI; OpenMPI also reads `max_slots=M`
    node1:4                        syntax of MPICH's Hydra
    node1                          one slot per line, as in PBS's node file (OpenMPI: one slot per core; MPICH: one)
    gpu[07-12,31] slots=4          Slurm's node list; each node has 4 slots

Empty lines and comments (`#`) are allowed. The comment `# device: h100-80g` names the hosts' accelerator, for
forecasts. The syntax that each launcher reads was tested with DeepSpeed 0.19, OpenMPI 5.0.11 and MPICH 5.0.2. dslpar
passes the hosts to every launcher in that launcher's own syntax.

>>> cluster = parse("node1 slots=4\\nnode2 slots=4\\n", "hostfile")
>>> cluster.world_size, cluster.hosts[1].name
(8, 'node2')
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from dslpar.cluster import nodelist
from dslpar.core.errors import Location

Syntax = Literal["slots", "colon", "name", "list"]
"""The syntax of a line, in the order of the module's docstring. DeepSpeed reads only "slots"."""

_SLOTS = re.compile(
    r"\s*([^\s=,#\[\]]+|\S*\[\S*)\s+slots=(\d{1,9})(?:\s+max[_-]slots=(\d{1,9}))?\s*(?:#.*)?$", re.ASCII
)
_COLON = re.compile(r"\s*([\w.@-]+):(\d{1,9})\s*(?:#.*)?$", re.ASCII)
_NAME = re.compile(r"\s*([A-Za-z0-9_][\w.@-]{0,254})()\s*(?:#.*)?$", re.ASCII)
_DEVICE = re.compile(r"^[ \t]*#[ \t]*device:[ \t]*([\w.-]{1,64})[ \t]*\r?$", re.ASCII | re.MULTILINE)
_GRAMMAR = "one host per line: NAME slots=N"


class Host(NamedTuple):
    """A machine, with the number of ranks that it takes."""

    name: str
    slots: int
    location: Location
    """The location of the host's line in the hostfile."""
    slots_location: Location
    """The location of its number of slots, else of the line."""
    syntax: Syntax = "slots"
    devices: tuple[int, ...] | None = None
    """The accelerators that `--include` or `--exclude` selects; None: all."""

    @property
    def address(self) -> str:
        """The host's name in the network, without the user name for ssh (user@host)."""
        return self.name.rpartition("@")[2]


class BadLine(NamedTuple):
    """An invalid line."""

    location: Location
    text: str
    reason: str = "is not a host"
    hint: str = _GRAMMAR


class FilterError(NamedTuple):
    """An invalid part of `--include` or `--exclude`. The linter has one rule per kind."""

    kind: Literal["host", "slot", "syntax"]
    location: Location
    message: str
    hint: str


class Cluster(NamedTuple):
    """The hosts of a hostfile or an allocation, in order, and the invalid lines."""

    path: str
    """The hostfile's path, or the variable or file with the allocation."""
    hosts: tuple[Host, ...]
    bad_lines: tuple[BadLine, ...]
    filter_errors: tuple[FilterError, ...] = ()
    filtered: bool = False
    """Whether `--include` or `--exclude` was applied."""
    from_file: bool = True
    """False: the hosts come from a scheduler's allocation."""
    device: str | None = None
    """The hosts' accelerator, from a comment such as `# device: h100-80g`."""
    device_location: Location | None = None

    @property
    def world_size(self) -> int:
        """The number of slots on all hosts together."""
        return sum(host.slots for host in self.hosts)

    @property
    def invalid(self) -> bool:
        """Return whether a line or a filter is invalid, so that hosts may be missing."""
        return bool(self.bad_lines or self.filter_errors)

    @property
    def readable_by_deepspeed(self) -> bool:
        """Return whether DeepSpeed can read the same hosts from the file itself."""
        return self.from_file and all(host.syntax == "slots" for host in self.hosts)


def parse(text: str, path: str) -> Cluster:
    """Parse a hostfile's text; this never raises."""
    hosts: list[Host] = []
    bad: list[BadLine] = []
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip() and not line.lstrip().startswith("#"):
            for found in _hosts(line, Location(path, number, 1, number, len(line) + 1)):
                (hosts if isinstance(found, Host) else bad).append(found)  # type: ignore[arg-type]
    device = _DEVICE.search(text)
    cluster = Cluster(path, tuple(_merge_names(hosts)), tuple(bad))
    if device is None:
        return cluster
    row, column = text.count("\n", 0, device.start(1)) + 1, device.start(1) - text.rfind("\n", 0, device.start(1))
    location = Location(path, row, column, row, column + len(device[1]))
    return cluster._replace(device=device[1], device_location=location)


def format_hosts(hosts: Sequence[Host]) -> str:
    """Return a hostfile in the syntax that DeepSpeed and OpenMPI read."""
    return "".join(f"{host.name} slots={host.slots}\n" for host in hosts)


def _hosts(line: str, place: Location) -> Iterator[Host | BadLine]:
    """Parse one line into its host, the hosts of a node list, or an error."""
    kinds: tuple[tuple[Syntax, re.Pattern[str]], ...] = (("slots", _SLOTS), ("colon", _COLON), ("name", _NAME))
    for syntax, pattern in kinds:
        if match := pattern.match(line):
            slots = place._replace(column=match.start(2) + 1, end_column=match.end(2) + 1) if match[2] else place
            host = Host(match[1], int(match[2] or 1), place, slots, syntax)
            yield from _with_max_slots(host, match[3] if syntax == "slots" else None, line)
            return
    yield BadLine(place, line.strip())


def _with_max_slots(host: Host, most: str | None, line: str) -> Iterator[Host | BadLine]:
    if most is not None and int(most) < host.slots:
        yield BadLine(
            host.location,
            line.strip(),
            "has more slots than max_slots",
            f"choose max_slots={host.slots}, or leave it out",
        )
    elif "[" not in host.name:
        yield host
    else:
        try:
            names = nodelist.expand(host.name)
        except ValueError:
            hint = "NAME slots=N, or as Slurm writes it: gpu[07-12,31] slots=8"
            yield BadLine(host.location, line.strip(), "is not a valid node list", hint)
            return
        yield from (host._replace(name=name, syntax="list") for name in names)


def _merge_names(hosts: Sequence[Host]) -> Iterator[Host]:
    """Merge repeated lines with only a name into one host, with one slot per line.

    Other repeated hosts are kept, so that the linter can report them.
    """
    bare: dict[str, int] = {}
    for host in hosts:
        if host.syntax == "name":
            bare[host.name] = bare.get(host.name, 0) + 1
    seen: set[str] = set()
    for host in hosts:
        if host.syntax != "name":
            yield host
        elif host.name not in seen:
            seen.add(host.name)
            yield host._replace(slots=bare[host.name])
