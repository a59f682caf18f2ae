"""What must not start: hosts and choices that a launcher would take for something else than what was asked for."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from dslpar.cluster.hostfile import Host
from dslpar.core.catalog import finding
from dslpar.core.errors import Finding
from dslpar.launch.job import LOCALHOST, Where


def for_deepspeed(where: Where) -> Iterator[Finding]:
    """What its launcher, and pdsh, would misread."""
    if where.elsewhere:
        yield from _bad_lines(where)
        yield from () if where.request.no_ssh else _paths_for_pdsh(where)
    else:
        yield from _devices_by_name(where)


def _devices_by_name(where: Where) -> Iterator[Finding]:
    """DeepSpeed's --include takes numbers."""
    named = [word for word in where.facts.visible or () if not word.isdecimal()]
    if where.facts.accelerators and named:
        message = f"CUDA_VISIBLE_DEVICES names {named[0]}, and DeepSpeed's launcher takes numbers alone"
        yield finding("HST208", message, "--launcher torchrun, or the devices' numbers")


def _bad_lines(where: Where) -> Iterator[Finding]:
    """DeepSpeed's own reading of .deepspeed_env takes no other lines."""
    lines = [line.strip() for line in where.facts.deepspeed_env]
    bad = [line for line in lines if line and not line.startswith("#") and "=" not in line]
    if bad:
        message = f"a line of .deepspeed_env is {bad[0]!r}, and DeepSpeed reads NAME=value alone"
        yield finding("HST218", message, "NAME=value a line")


_NOT_FOR_PDSH = re.compile(r"[^\w@%+=:,./~-]|%[hnu%]")
"""What a shell, or pdsh, reads as something else."""


def _paths_for_pdsh(where: Where) -> Iterator[Finding]:
    """DeepSpeed has pdsh run `cd FOLDER; PYTHON ...` on the hosts, and quotes neither path."""
    for what, path in (("folder", where.facts.folder), ("Python", where.facts.programs["python"])):
        if bad := _NOT_FOR_PDSH.search(path):
            message = f"this {what} is {path}, and DeepSpeed hands the {bad[0]!r} to pdsh and a shell as it stands"
            yield finding("HST222", message, "another path, or --launcher torchrun")


def one_choice_for_all(where: Where) -> Iterator[Finding]:
    """One command line for all hosts has one CUDA_VISIBLE_DEVICES."""
    if len({host.devices for host in where.hosts}) > 1:
        message = f"{where.request.launcher} gives every host the same accelerators, and the choice differs"
        yield finding("HST219", message, "--launcher deepspeed or torchrun")


def no_choice(where: Where) -> Iterator[Finding]:
    """Slurm chooses accelerators, nobody else."""
    if any(host.devices for host in where.hosts):
        message = "accelerators are chosen, and Slurm gives them out itself"
        yield finding("HST219", message, "whole hosts in --include and --exclude, or --launcher torchrun")


def loopback_among(hosts: Sequence[Host]) -> Iterator[Finding]:
    loop = [host for host in hosts if host.address in ("localhost", LOCALHOST, "::1")]
    if len(hosts) > 1 and loop:
        message = f"{loop[0].name} is another machine on each host: the others could not reach it"
        yield finding("HST207", message, "its name in the network", loop[0].location)


def one_machine_twice(where: Where) -> Iterator[Finding]:
    """Two names of this one: the slots of one would be left out."""
    here = [host for host in where.hosts if host.name in where.facts.here]
    for host in here[1:]:
        message = f"{host.name} is the same machine as {here[0].name}: this one"
        hint = f"one line, with all of its slots: {here[0].name} slots={here[0].slots + host.slots}"
        yield finding("HST226", message, hint, host.location)


def colons_in_addresses(where: Where) -> Iterator[Finding]:
    """An IPv6 address, where the launcher takes what follows a colon for a number or a name of its own."""
    colons = [host for host in where.hosts if ":" in host.name]
    if where.elsewhere and colons and not (where.request.launcher == "torchrun" or where.request.no_ssh):
        message = f"{where.request.launcher} takes {colons[0].name} apart at its colons"
        hint = "a name for the address (/etc/hosts, on every host), or --launcher torchrun"
        yield finding("HST227", message, hint, colons[0].location)


def too_few_accelerators(where: Where) -> Iterator[Finding]:
    """More ranks on this host than it has accelerators, if it has any."""
    facts, runs_here = where.facts, not where.hosts or any(host.name in where.facts.here for host in where.hosts)
    if runs_here and 0 < facts.accelerators < where.slots:
        message = f"{where.slots} ranks on this host, and it has {facts.accelerators} accelerators"
        yield finding("HST206", message, "DS_ACCELERATOR=cpu runs them on the CPU")
