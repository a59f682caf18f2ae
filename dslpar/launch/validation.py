"""Validation of hosts: find hosts on which ranks would not start as requested.

Each launcher's module (dslpar/cluster/launchers) has the checks for that launcher alone.
"""

from __future__ import annotations

from collections.abc import Iterator

from dslpar.cluster.command import LOCALHOST
from dslpar.cluster.launcher import Launcher
from dslpar.cluster.request import Context
from dslpar.core.catalog import finding
from dslpar.core.errors import Finding


def findings(context: Context, launcher: Launcher) -> Iterator[Finding]:
    """Yield the findings about a job's hosts under a launcher."""
    yield from _localhost_among_hosts(context)
    yield from _one_machine_twice(context)
    yield from _too_few_accelerators(context)
    yield from _colons_in_addresses(context, launcher)
    yield from launcher.findings(context)


def _localhost_among_hosts(context: Context) -> Iterator[Finding]:
    loopback = [host for host in context.hosts if host.address in ("localhost", LOCALHOST, "::1")]
    if len(context.hosts) > 1 and loopback:
        message = f"{loopback[0].name} means a different machine on each host, so the others could not reach this host"
        yield finding("HST207", message, "its name on the network", loopback[0].location)


def _one_machine_twice(context: Context) -> Iterator[Finding]:
    """Find several names of this machine in the hostfile. Ranks would start under only one of these names."""
    local = [host for host in context.hosts if host.name in context.facts.local_hosts]
    for host in local[1:]:
        message = f"{host.name} and {local[0].name} are the same machine, this host"
        hint = f"one line, with all of its slots: {local[0].name} slots={local[0].slots + host.slots}"
        yield finding("HST226", message, hint, host.location)


def _too_few_accelerators(context: Context) -> Iterator[Finding]:
    """Find more ranks on this host than it has accelerators, if it has any."""
    facts, hosts = context.facts, context.hosts
    runs_here = not hosts or any(host.name in facts.local_hosts for host in hosts)
    if runs_here and 0 < facts.accelerators < context.slots:
        message = f"{context.slots} ranks on this host, which has only {facts.accelerators} accelerators"
        yield finding("HST206", message, "DS_ACCELERATOR=cpu runs them on the CPU")


def _colons_in_addresses(context: Context, launcher: Launcher) -> Iterator[Finding]:
    colons = [host for host in context.hosts if ":" in host.name]
    if context.remote and colons and not (launcher.takes_ipv6 or context.request.no_ssh):
        message = f"{context.request.launcher} cannot parse the IPv6 address {colons[0].name}"
        hint = "a name for the address (/etc/hosts, on every host), or --launcher torchrun"
        yield finding("HST227", message, hint, colons[0].location)
