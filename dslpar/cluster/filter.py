"""Host filter: `--include` and `--exclude` select hosts and accelerators, in the syntax of DeepSpeed's launcher.

    node1@node2:0,2        all of node1, and accelerators 0 and 2 of node2

The remaining hosts keep the hostfile's order. Unlike DeepSpeed's launcher, this reports all errors at once.

>>> from dslpar.cluster.hostfile import parse
>>> hosts = parse("node1 slots=4\\nnode2 slots=4\\n", "hostfile")
>>> [(host.name, host.devices) for host in filter_hosts(hosts, "node1@node2:0,2", "--include").hosts]
[('node1', None), ('node2', (0, 2))]
>>> as_deepspeed(filter_hosts(hosts, "node1@node2:0", "--exclude").hosts)
'node2:1,2,3'
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from dslpar.cluster.hostfile import Cluster, FilterError, Host
from dslpar.core.errors import Location
from dslpar.core.suggest import only_near

MAX_SLOTS = 65_536
"""The most slots that a host may have if some of them are selected."""
Flag = Literal["--include", "--exclude"]
_GRAMMAR = "NAME, or NAME:SLOT,SLOT; @ between hosts: node1@node2:0,2"
_PART = re.compile(r"([^:@,\s]+)(?::(\d{1,9}(?:,\d{1,9})*))?", re.ASCII)


def filter_hosts(cluster: Cluster, text: str, flag: Flag) -> Cluster:
    """Return the cluster with only the selected hosts and slots; in case of errors all of it, with `filter_errors`."""
    errors: list[FilterError] = []
    named: dict[str, set[int]] = {}
    known = {host.name: host for host in cluster.hosts}
    for part, location in _parts(text, flag):
        problems = list(_errors(part, location, known))
        if not problems:
            name, _, slots = part.partition(":")
            chosen = named.setdefault(name, set())
            if slots:
                chosen.update(map(int, slots.split(",")))
        errors += problems
    hosts = tuple(_apply(cluster.hosts, named, flag))
    if not hosts and not errors:
        message = f"{flag} {text} leaves no host"
        errors.append(
            FilterError(
                "syntax",
                _location(flag, 0, len(text)),
                message,
                "select hosts so that at least one slot is left",
            )
        )
    if errors:
        return cluster._replace(filter_errors=tuple(errors))
    return cluster._replace(hosts=hosts, filtered=True)


def as_deepspeed(hosts: Sequence[Host]) -> str:
    """Return the value of DeepSpeed's `--include` that selects these hosts and their accelerators."""
    return "@".join(
        host.name + (":" + ",".join(map(str, host.devices)) if host.devices is not None else "") for host in hosts
    )


def _parts(text: str, flag: Flag) -> Iterator[tuple[str, Location]]:
    start = 0
    for part in text.split("@"):
        yield part, _location(flag, start, start + len(part))
        start += len(part) + 1


def _location(flag: Flag, start: int, end: int) -> Location:
    return Location(flag, 1, start + 1, 1, end + 1)


def _errors(part: str, location: Location, known: Mapping[str, Host]) -> Iterator[FilterError]:
    match = _PART.fullmatch(part)
    if match is None:
        yield FilterError("syntax", location, f"{part[:40]!r} selects nothing", _GRAMMAR)
    elif match[1] not in known:
        if near := only_near(match[1], known):
            hint = f"did you mean {near!r}?"
        elif known:
            hint = f"choose from {', '.join(list(known)[:4])}"
        else:
            hint = _GRAMMAR
        yield FilterError("host", location, f"unknown host {match[1]}", hint)
    elif match[2]:
        slots = known[match[1]].slots
        beyond = [number for number in match[2].split(",") if int(number) >= slots]
        if slots > MAX_SLOTS:
            yield FilterError(
                "slot", location, f"{match[1]} has {slots} slots", f"choose hosts of at most {MAX_SLOTS} slots"
            )
        elif beyond:
            message = f"{match[1]} has no slot {', '.join(beyond)}: it has {slots} slots, numbered from 0"
            yield FilterError("slot", location, message, f"choose slots from 0 to {slots - 1}" if slots else _GRAMMAR)


def _apply(hosts: Sequence[Host], named: Mapping[str, set[int]], flag: Flag) -> Iterator[Host]:
    """Yield the remaining hosts. A name without slots selects the whole host."""
    includes = flag == "--include"
    for host in hosts:
        slots = named.get(host.name)
        if slots is None:  # not named
            if not includes:
                yield host
        elif not slots:  # named as a whole
            if includes:
                yield host
        else:
            devices = tuple(slot for slot in range(host.slots) if (slot in slots if includes else slot not in slots))
            if devices:
                yield host._replace(slots=len(devices), devices=devices if len(devices) < host.slots else None)
