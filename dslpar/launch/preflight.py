"""Preflight: check a job's hosts before it starts, and report everything that is wrong at once.

    preflight = check_hosts(hosts, checks)      # findings, a table for people, and facts for the launch
    signal_job(["node1", "node2"], job_id, 15)  # during the job: send signal 15 to its processes on these hosts

`check_hosts` finds hosts that cannot be reached, that differ from this host, or that cannot connect to the first host.
Without it, ranks would run into these errors one at a time, or after a time-out. It has two phases:

1. Each host runs `python -m dslpar.launch.agent inspect`: this host directly, the others over ssh. The agent does not
   import torch, so this takes about as long as one ssh command.
2. If there are no errors so far, the first host listens at rank 0's port, and the others connect to it. ssh alone does
   not show whether a firewall is between the hosts, or whether they know the first host's name.

`signal_job` runs the same agent over ssh. `dslpar launch` uses it for a job whose guards cannot pass a signal on.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Timer
from typing import NamedTuple, TypeVar

from dslpar.cluster import ssh
from dslpar.cluster.hostfile import Host
from dslpar.core.catalog import finding
from dslpar.core.errors import Finding, has_errors
from dslpar.core.visible import visible
from dslpar.launch import agent, host_findings
from dslpar.launch.agent import HostReport
from dslpar.launch.host_findings import CONNECT_S, HostChecks, HostResult

T = TypeVar("T")
MAX_CONNECTIONS = 64
"""The most ssh connections that are open at the same time."""
_ANSWER_S = 30.0
"""Time for a host to report. Its Python may start slowly, from a busy file system."""
_NUM_PEERS = 4
"""The most other hosts for which a host looks up its network interface."""
_SSH_OPTIONS = tuple(f"ConnectTimeout={CONNECT_S}" if "Connect" in option else option for option in ssh.OPTIONS)
_HEADER = ("host", "python", "dslpar", "torch", "deepspeed", "slots", "accelerators", "cores", "interface", "clock")


class Preflight(NamedTuple):
    """Findings about the hosts, and facts for the launch."""

    results: tuple[HostResult, ...]
    findings: tuple[Finding, ...]
    interface: str = ""
    """The network interface by which hosts reach each other; empty if its name is not the same on all of them."""
    port: int | None = None
    """The port for rank 0: the requested one, or a free one on the first host."""

    def table(self) -> str:
        """Return a table for people, one line per host."""
        rows = [_HEADER, *(tuple(map(visible, _row(result))) for result in self.results)]
        widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADER))]
        return "".join("  ".join(map(str.ljust, row, widths)).rstrip() + "\n" for row in rows)


def _row(result: HostResult) -> tuple[str, ...]:
    host, report = result.host, result.report
    if report is None:
        return (host.name, "-", "-", "-", "-", str(host.slots), "-", "-", "-", "-")
    versions = (report.versions[name] or "none" for name in ("python", "dslpar", "torch", "deepspeed"))
    numbers = (str(host.slots), str(report.accelerators), str(report.cores))
    clock = f"{result.skew_s:+.0f} s" if result.skew_s else "ok"
    return (host.name, *versions, *numbers, report.interface or "-", clock)


def check_hosts(hosts: Sequence[Host], checks: HostChecks) -> Preflight:
    """Inspect all hosts concurrently. If that finds no errors, check that they can connect to the first host."""
    with _shared_mark(Path(checks.output_dir)) as (mark, error):
        queries = [_query(hosts, number, checks, mark) for number in range(len(hosts))]
        results = tuple(_map_concurrently(len(hosts), lambda number: _inspect(hosts[number], queries[number], checks)))
    reports = [result.report for result in results if result.report]
    interfaces = {report.interface for report in reports}
    first = results[0].report if results else None
    port = first.free_port if checks.port is None and first else checks.port
    findings = [*host_findings.all_findings(results, checks)]
    findings += [host_findings.output_not_writable(checks.output_dir, error)] if error else []
    if port and len(hosts) > 1 and not has_errors(findings):
        findings += _cannot_connect(hosts, port, checks)
    return Preflight(results, tuple(findings), interfaces.pop() if len(interfaces) == 1 else "", port)


def signal_job(hosts: Sequence[str], job_id: str, number: int, timeout_s: float = 5) -> None:
    """Send a signal, by its number, to a job's processes on these hosts. Hosts that do not answer are skipped."""
    argv = (sys.executable, "-m", "dslpar.launch.agent", "signal", job_id, str(int(number)))
    environ = {name: value for name, value in os.environ.items() if name == "PYTHONPATH"}

    def send(index: int) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired, OSError):
            command = ssh.command(hosts[index], argv, environ, os.getcwd(), _SSH_OPTIONS)
            subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout_s)

    list(_map_concurrently(len(hosts), send))


def _map_concurrently(count: int, function: Callable[[int], T]) -> Iterator[T]:
    """Call a function with each number below `count` in threads; yield the results in order."""
    with ThreadPoolExecutor(max_workers=min(MAX_CONNECTIONS, count or 1)) as pool:
        yield from pool.map(function, range(count))


@contextlib.contextmanager
def _shared_mark(output_dir: Path) -> Iterator[tuple[str, str]]:
    """Write a temporary file that hosts see if they share the output folder; yield its path and "", or "" and an error.

    If the output folder does not exist yet, the file is written to its nearest existing parent.
    """
    folder = next(path for path in (output_dir.absolute(), *output_dir.absolute().parents) if path.is_dir())
    mark = folder / f".dslpar_{secrets.token_hex(8)}"
    try:
        mark.touch()
    except OSError as error:
        yield "", error.strerror or str(error)
        return
    try:
        yield str(mark), ""
    finally:
        mark.unlink(missing_ok=True)


def _query(hosts: Sequence[Host], number: int, checks: HostChecks, mark: str) -> agent.Query:
    """Return the agent's query for host `number`. Only the first host checks rank 0's port."""
    peers = [host.address for host in hosts[:_NUM_PEERS] if host is not hosts[number]]
    port = (checks.port or 0) if number == 0 else 0
    return agent.Query(list(checks.files), mark, peers, port, list(checks.paths))


def _agent_command(host: Host, checks: HostChecks, *argv: str) -> tuple[str, ...]:
    """Return the command that runs dslpar.launch.agent on a host: over ssh, or directly if it is this host."""
    command = (sys.executable, "-m", "dslpar.launch.agent", *argv)
    local = host.name in checks.local_hosts
    return command if local else ssh.command(host.name, command, checks.environ, os.getcwd(), _SSH_OPTIONS)


def _inspect(host: Host, query: agent.Query, checks: HostChecks) -> HostResult:
    """Run the agent on a host; return its report, or the reason why there is none."""
    start = time.time()
    try:
        done = _run(_agent_command(host, checks, "inspect", json.dumps(query._asdict())))
    except subprocess.TimeoutExpired:
        message, hint = f"did not answer within {_ANSWER_S:.0f} s", "--no-checks if it is only slow"
        return HostResult(host, failure=host_findings.unreachable(host, message, f"ssh {host.name}; {hint}"))
    except FileNotFoundError:
        message = "cannot be reached: no ssh installed here"
        return HostResult(host, failure=host_findings.unreachable(host, message, "install openssh-client"))
    answers = [line for line in done.stdout.splitlines() if line.startswith('{"dslpar": ')]  # a shell may print more
    if done.returncode or not answers:
        return HostResult(host, failure=host_findings.failure_of(host, done.returncode, done.stderr))
    fields = json.loads(answers[-1])["dslpar"]
    if set(fields) != set(HostReport._fields):
        return HostResult(host, failure=host_findings.other_dslpar(host, fields))
    report = HostReport(**fields)
    return HostResult(host, report, skew_s=_skew(report.time_s, start, time.time()))


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run a command on a host. The host's shell may print other text, in any encoding.

    Raises:
        subprocess.TimeoutExpired: it took longer than _ANSWER_S.
        FileNotFoundError: there is no such program.
    """
    return subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=_ANSWER_S
    )


def _skew(remote_s: float, start_s: float, end_s: float) -> float:
    """Return by how many seconds a remote clock is ahead of this host's, negative if it is behind.

    The remote clock was read at an unknown time between `start_s` and `end_s`, so 0 is returned if it lies between
    them.
    """
    return remote_s - end_s if remote_s > end_s else min(0.0, remote_s - start_s)


# ---- connections between hosts ----


def _cannot_connect(hosts: Sequence[Host], port: int, checks: HostChecks) -> Iterator[Finding]:
    """Find the hosts that cannot connect to the first host's port, at which rank 0 will listen."""
    first = hosts[0]

    def connect(number: int) -> str:
        """Return why a host cannot connect; empty if it can, or if the check itself failed."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            done = _run(_agent_command(hosts[number + 1], checks, "connect", first.address, str(port)))
            return done.stdout.strip().rpartition("\n")[2] if done.returncode == agent.CANNOT_CONNECT else ""
        return ""

    with _listening(first, port, checks) as listens:
        reasons = list(_map_concurrently(len(hosts) - 1, connect)) if listens else []
    for host, reason in zip(hosts[1:], reasons, strict=False):
        if reason:
            message = f"{host.name} cannot connect to {first.address}:{port}: {reason}"
            hint = f"a firewall between them: --master-port P, one that is open; is {first.address} its name there?"
            yield finding("HST224", message, hint, host.location)


@contextlib.contextmanager
def _listening(first: Host, port: int, checks: HostChecks) -> Iterator[bool]:
    """Make the first host listen at a port; yield whether it listens."""
    command = _agent_command(first, checks, "listen", str(port))
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as listener:
        assert listener.stdout is not None
        alarm = Timer(_ANSWER_S, listener.kill)  # a pipe is read without a time-out
        alarm.start()
        # The host's shell may print other lines first.
        listens = any(line.strip() == agent.LISTENING.encode() for line in listener.stdout)
        alarm.cancel()
        yield listens  # afterwards `with` closes the agent's stdin, which ends it
