"""`--include` and `--exclude`: a part of a cluster's hosts and accelerators, in the words of DeepSpeed's launcher.

    node1@node2:0,2        all of node1, and accelerators 0 and 2 of node2

What is left keeps the hostfile's order. Unlike DeepSpeed's launcher, this one says all that is wrong at once.

>>> from dslpar.cluster.hostfile import parse
>>> hosts = parse("node1 slots=4\\nnode2 slots=4\\n", "hostfile")
>>> [(host.name, host.devices) for host in choose(hosts, "node1@node2:0,2", "--include").hosts]
[('node1', None), ('node2', (0, 2))]
>>> as_deepspeed(choose(hosts, "node1@node2:0", "--exclude").hosts)
'node2:1,2,3'
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from dslpar.cluster.hostfile import Cluster, Host, WrongChoice
from dslpar.core.errors import Location
from dslpar.core.suggest import only_near

MAX_SLOTS = 65_536
"""Of a host whose slots are chosen one by one."""
Flag = Literal["--include", "--exclude"]
_GRAMMAR = "NAME, or NAME:SLOT,SLOT; @ between hosts: node1@node2:0,2"
_PART = re.compile(r"([^:@,\s]+)(?::(\d{1,9}(?:,\d{1,9})*))?", re.ASCII)


def choose(cluster: Cluster, text: str, flag: Flag) -> Cluster:
    """What is left of the cluster; what is wrong with the choice stands in `wrong_choices`, and then all is left."""
    wrong: list[WrongChoice] = []
    named: dict[str, set[int]] = {}
    known = {host.name: host for host in cluster.hosts}
    for part, place in _parts(text, flag):
        problems = list(_wrong(part, place, known))
        if not problems:
            name, _, slots = part.partition(":")
            named.setdefault(name, set()).update(map(int, slots.split(","))) if slots else named.setdefault(name, set())
        wrong += problems
    hosts = tuple(_left(cluster.hosts, named, flag))
    if not hosts and not wrong:
        message = f"{flag} {text} leaves no host"
        wrong.append(WrongChoice("syntax", _place(flag, 0, len(text)), message, "leave a host, or a slot of one"))
    return cluster._replace(wrong_choices=tuple(wrong)) if wrong else cluster._replace(hosts=hosts, chosen=True)


def as_deepspeed(hosts: Sequence[Host]) -> str:
    """The hosts as DeepSpeed's `--include` names them."""
    return "@".join(
        host.name + (":" + ",".join(map(str, host.devices)) if host.devices is not None else "") for host in hosts
    )


def _parts(text: str, flag: Flag) -> Iterator[tuple[str, Location]]:
    start = 0
    for part in text.split("@"):
        yield part, _place(flag, start, start + len(part))
        start += len(part) + 1


def _place(flag: Flag, start: int, end: int) -> Location:
    return Location(flag, 1, start + 1, 1, end + 1)


def _wrong(part: str, place: Location, known: Mapping[str, Host]) -> Iterator[WrongChoice]:
    match = _PART.fullmatch(part)
    if match is None:
        yield WrongChoice("syntax", place, f"{part[:40]!r} chooses nothing", _GRAMMAR)
    elif match[1] not in known:
        near = only_near(match[1], known) or ", ".join(list(known)[:4])
        yield WrongChoice("host", place, f"there is no host {match[1]}", near or _GRAMMAR)
    elif match[2]:
        slots = known[match[1]].slots
        beyond = [number for number in match[2].split(",") if int(number) >= slots]
        if slots > MAX_SLOTS:
            yield WrongChoice("slot", place, f"{match[1]} has {slots} slots", f"at most {MAX_SLOTS} to choose from")
        elif beyond:
            message = f"{match[1]} has no slot {', '.join(beyond)}: it has {slots}, from 0"
            yield WrongChoice("slot", place, message, f"0 to {slots - 1}" if slots else _GRAMMAR)


def _left(hosts: Sequence[Host], named: Mapping[str, set[int]], flag: Flag) -> Iterator[Host]:
    """A host that is named without slots is meant whole."""
    for host in hosts:
        if host.name not in named or not named[host.name]:  # named whole, or not at all
            if (host.name in named) == (flag == "--include"):
                yield host
            continue
        meant = named[host.name]
        devices = tuple(slot for slot in range(host.slots) if (slot in meant) == (flag == "--include"))
        if devices:
            yield host._replace(slots=len(devices), devices=devices if len(devices) < host.slots else None)
