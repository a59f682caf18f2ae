"""Clusters: hostfiles in DeepSpeed's syntax, one `NAME slots=N` a line; empty lines and `#` comments may stand between.

>>> cluster = parse("node1 slots=4\\nnode2 slots=4\\n", "hostfile")
>>> cluster.world_size, cluster.hosts[1].name
(8, 'node2')
"""

from __future__ import annotations

import re
from typing import NamedTuple

from dslpar.errors import Location

_LINE = re.compile(r"\s*(\S+)\s+slots=(\d{1,9})\s*(?:#.*)?$", re.ASCII)


class Host(NamedTuple):
    """One machine and the ranks that it takes."""

    name: str
    slots: int
    location: Location
    """Of its line."""
    slots_location: Location
    """Of the number of slots."""


class BadLine(NamedTuple):
    """A line that no launcher reads."""

    location: Location
    text: str


class Cluster(NamedTuple):
    """The hosts of a hostfile, in order, and the lines that are none."""

    path: str
    hosts: tuple[Host, ...]
    bad_lines: tuple[BadLine, ...]

    @property
    def world_size(self) -> int:
        """Slots of all hosts."""
        return sum(host.slots for host in self.hosts)


def parse(text: str, path: str) -> Cluster:
    """Read a hostfile's text; never raises."""
    hosts, bad = [], []
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        match = _LINE.match(line)
        place = Location(path, number, 1, number, len(line) + 1)
        if match is None:
            bad.append(BadLine(place, line.strip()))
        else:
            slots = place._replace(column=match.start(2) + 1, end_column=match.end(2) + 1)
            hosts.append(Host(match[1], int(match[2]), place, slots))
    return Cluster(path, tuple(hosts), tuple(bad))
