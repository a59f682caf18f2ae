"""Host findings: report a job's hosts that cannot be reached, or that differ from this host.

"This host" is the one where `dslpar launch` runs. preflight.py collects the reports of all hosts.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from dslpar.cluster import ssh
from dslpar.cluster.hostfile import Host
from dslpar.core.catalog import finding
from dslpar.core.errors import Finding
from dslpar.launch import agent
from dslpar.launch.agent import HostReport

CONNECT_S = 5
"""Time for ssh to connect."""
_CLOCK_S = 2.0
"""Clock skew that causes no warning. Hosts with NTP differ by less, also with the delay of ssh."""
_SAME_ENVIRONMENT = "the same environment at the same path on every host"


@dataclass(frozen=True, kw_only=True)
class HostChecks:
    """Settings of the checks on all hosts."""

    files: Sequence[str]
    """The config, and the files that it imports."""
    paths: Sequence[str] = ()
    """The files and folders that a run reads."""
    output_dir: str
    port: int | None = None
    """Rank 0's port, if one is given; None: any free one."""
    local_hosts: frozenset[str] = frozenset()
    """Names in the hostfile that mean this machine."""
    environ: Mapping[str, str] = field(default_factory=dict)
    """Variables that are forwarded to the agent on the other hosts."""
    on_cpu: bool = False
    """Whether ranks run on the CPU even if there are accelerators."""


class HostResult(NamedTuple):
    """A host with its report, or with the reason why it has none."""

    host: Host
    report: HostReport | None = None
    failure: Finding | None = None
    """The reason for which there is no report."""
    skew_s: float = 0.0
    """Seconds by which the host's clock is ahead of this host's; negative if it is behind."""


def all_findings(results: Sequence[HostResult], checks: HostChecks) -> Iterator[Finding]:
    """Yield all findings, host by host."""
    yield from (result.failure for result in results if result.failure)
    own, digests = agent.versions(), {path: agent.digest(path) for path in checks.files}
    reports = [(result.host, result.report) for result in results if result.report]
    most = max((report.accelerators for _, report in reports), default=0)
    for result in results:
        if report := result.report:
            yield from _versions(result.host, report, own)
            yield from _files(result.host, report, digests)
            yield from _output(result.host, report, checks)
            yield from _accelerators(result.host, report, checks, most)
            yield from _clock(result)
    first = results[0]
    if checks.port and first.report and not first.report.port_is_free:
        yield port_taken(first.host.name, checks.port, first.report.free_port)
    for host, report in reports if len(reports) > 1 else ():
        if not report.interface:
            message = f"{host.name} has no network interface that the other hosts could reach"
            yield finding(
                "HST217",
                message,
                "set GLOO_SOCKET_IFNAME=<interface> where you launch; it is forwarded to all hosts",
                host.location,
            )


def _versions(host: Host, report: HostReport, own: Mapping[str, str]) -> Iterator[Finding]:
    differ = [name for name in own if report.versions[name] != own[name]]
    if differ:
        theirs = ", ".join(f"{name} {report.versions[name] or '(none)'}" for name in differ)
        ours = ", ".join(f"{name} {own[name] or '(none)'}" for name in differ)
        yield _other_versions(host, f"has {theirs}, but this host has {ours}")


def _files(host: Host, report: HostReport, own: Mapping[str, str]) -> Iterator[Finding]:
    for path, digest in report.digests.items():
        if digest != own[path]:
            message = f"{host.name} has " + (f"another {path} than this host" if digest else f"no file {path}")
            hint = f"copy it, or use a shared file system: scp {path} {host.name}:..."
            yield finding("HST213", message, hint, host.location)
    for path in report.missing:
        hint = f"copy it, or use a shared file system: scp -r {path} {host.name}:..."
        yield finding("BAT201", f"{host.name} has no {path}, which the config names", hint, host.location)


def _output(host: Host, report: HostReport, checks: HostChecks) -> Iterator[Finding]:
    messages = {"not shared": "does not see what this host writes to", "not writable": "may not write to"}
    if message := messages.get(report.folder):
        hint = "train.output_dir=FOLDER on a file system that all hosts share: checkpoints are written by all of them"
        yield finding("HST214", f"{host.name} {message} {checks.output_dir}", hint, host.location)


def _accelerators(host: Host, report: HostReport, checks: HostChecks, most: int) -> Iterator[Finding]:
    """Find hosts with too few accelerators.

    `most`: the largest number of accelerators on any host. If it is 0, all ranks run on CPUs.
    """
    needed, count = max(host.devices) + 1 if host.devices else host.slots, report.accelerators
    if not checks.on_cpu and most and count < needed:
        message = f"{host.name} has {count} accelerators, but the hostfile asks for {needed}"
        fits = f"slots={count}" if count else "leave it out, or check its driver (nvidia-smi)"
        yield finding("HST206", message, f"{fits}; DS_ACCELERATOR=cpu runs ranks on the CPU", host.slots_location)


def _clock(result: HostResult) -> Iterator[Finding]:
    if abs(result.skew_s) > _CLOCK_S:
        way = "ahead of" if result.skew_s > 0 else "behind"
        message = f"{result.host.name} has a clock {abs(result.skew_s):.0f} s {way} this host's"
        hint = "NTP (timedatectl set-ntp true); logs and files' times of this job will be off until then"
        yield finding("HST215", message, hint, result.host.location)


def port_taken(host: str, port: int, free: int) -> Finding:
    """Return the finding that rank 0 cannot listen at its port. `free`: another port, which is free."""
    message = f"port {port} of {host} is in use, perhaps by another job"
    return finding("HST216", message, f"--master-port {free}, or none, to have a free one found")


def output_not_writable(output_dir: str, reason: str) -> Finding:
    """Return the finding that this host itself may not write to the output folder."""
    hint = "train.output_dir=FOLDER on a file system that all hosts share, and may write to"
    return finding("HST214", f"this host may not write to {output_dir}: {reason}", hint)


# ---- hosts without a report ----

_SSH_ERRORS = (
    ("Could not resolve hostname", "has a name that is unknown here", "its address, in the hostfile or in /etc/hosts"),
    ("Connection refused", "refuses ssh", "start sshd there; set another port in ~/.ssh/config"),
    ("Host key verification failed", "has an unknown or a changed host key", "ssh {host}, once"),
    ("Permission denied", "accepts no login without a password", "ssh-copy-id {host}"),
    ("timed out", f"does not answer within {CONNECT_S} s", "is it up, and is this its name on the network?"),
    ("No route to host", "cannot be reached: no route", "is it up, and is this its name on the network?"),
    ("Network is unreachable", "cannot be reached: no network", "is this its name on the network?"),
)
"""Texts in ssh's error output, each with its meaning and a hint."""


def failure_of(host: Host, status: int, stderr: str) -> Finding:
    """Return the finding that the agent did not run on a host, from the exit status and error output of its command."""
    last = next((line for line in reversed(stderr.splitlines()) if line.strip()), f"status {status}")
    if status == ssh.FAILED:
        known = ((message, hint) for text, message, hint in _SSH_ERRORS if text in stderr)
        message, hint = next(known, (f"cannot be reached: {last}", "ssh {host}"))
        return unreachable(host, message, hint.format(host=host.name))
    if status == ssh.NO_FOLDER:
        hint = "the same folder on every host: a shared file system"
        return finding("HST213", f"{host.name} has no folder {os.getcwd()}", hint, host.location)
    if status in (126, 127):
        return _other_versions(host, f"has no {sys.executable}")
    if "No module named" in last:
        return _other_versions(host, f"has no dslpar for its Python: {last}")
    return _other_versions(host, f"cannot run dslpar: {last}", f"ssh {host.name} {sys.executable} -V")


def other_dslpar(host: Host, report: Mapping[str, object]) -> Finding:
    """Return the finding that a host has another dslpar version. Its report has other fields than this version's."""
    versions = report.get("versions")
    version = versions.get("dslpar") if isinstance(versions, dict) else "(unknown)"
    return _other_versions(host, f"has dslpar {version}, but this host has another version")


def unreachable(host: Host, message: str, hint: str) -> Finding:
    return finding("HST211", f"{host.name} {message}", hint, host.location)


def _other_versions(host: Host, message: str, hint: str = _SAME_ENVIRONMENT) -> Finding:
    return finding("HST212", f"{host.name} {message}", hint, host.location)
