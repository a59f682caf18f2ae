"""The hosts of a job, before it starts: who can be reached, who differs, and whether they meet; all that is wrong at
once.

    checked = reach.check(hosts, look)     # findings, a table for people, and what was learnt for the launch

Each host runs `python -m dslpar.launch.agent` over ssh, and this one without; nothing there imports torch, so it
takes about as long as one ssh. What it finds would else be found by ranks, one at a time, or by a time-out. Where all
is well so far, the first host listens at rank 0's port and the others connect to it: that ssh gets through says nothing
of a firewall between them, nor of the names by which they know each other.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from threading import Timer
from typing import NamedTuple, TypeVar

from dslpar.cluster import network
from dslpar.cluster.hostfile import Host
from dslpar.core.catalog import finding
from dslpar.core.errors import Finding, has_errors
from dslpar.launch import agent, ssh
from dslpar.launch.agent import Sight

T = TypeVar("T")
AT_ONCE = 64
"""ssh connections that are opened side by side."""
_CONNECT_S = 5
_ANSWER_S = 30.0
"""How long a host that was reached may take to look: a Python that starts from a busy file system."""
_CLOCK_S = 2.0
"""How far clocks may be apart without a word: less is NTP's, and what ssh itself takes."""
_ASKED = 4
"""Hosts that each other one looks for a way to, until there is one."""
_SETTINGS = tuple(f"ConnectTimeout={_CONNECT_S}" if "Connect" in one else one for one in ssh.ALIVE)


@dataclass(frozen=True, kw_only=True)
class Look:
    """What the hosts are asked about."""

    files: Sequence[str]
    """The config, and what it imports."""
    output_dir: str
    port: int | None = None
    """Of rank 0, where somebody has said it; None: any free one."""
    here: frozenset[str] = frozenset()
    """The hosts that are this machine."""
    environ: Mapping[str, str] = field(default_factory=dict)
    """Variables that travel."""
    on_cpu: bool = False
    """Whether ranks run on the CPU, whatever accelerators there are."""


class Visited(NamedTuple):
    """A host, and what it said; or why it did not."""

    host: Host
    sight: Sight | None = None
    wrong: Finding | None = None
    skew_s: float = 0.0
    """Its clock before ours, in seconds."""


class Checked(NamedTuple):
    """What is wrong, and what is there."""

    visited: tuple[Visited, ...]
    findings: tuple[Finding, ...]
    interface: str = ""
    """By which all hosts meet; empty where its name differs, or is not known."""
    port: int | None = None
    """A free one on the first host."""

    def table(self) -> str:
        """A line a host, for people."""
        head = (
            "host",
            "python",
            "dslpar",
            "torch",
            "deepspeed",
            "slots",
            "accelerators",
            "cores",
            "interface",
            "clock",
        )
        rows = [head, *(_row(one) for one in self.visited)]
        widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
        return "".join("  ".join(map(str.ljust, row, widths)).rstrip() + "\n" for row in rows)


def check(hosts: Sequence[Host], look: Look) -> Checked:
    """Visits every host, all at once."""
    with _mark(Path(look.output_dir)) as (mark, why):
        questions = [_question(hosts, number, look, mark) for number in range(len(hosts))]
        visited = tuple(_each(hosts, lambda number: _visit(hosts[number], questions[number], look)))
    seen = [one.sight for one in visited if one.sight]
    interfaces = {sight.interface for sight in seen}
    first = visited[0].sight if visited else None
    port = first.free_port if look.port is None and first else look.port
    findings = [*_findings(visited, look), *_not_writable(why, look)]
    if port and len(hosts) > 1 and not has_errors(findings):
        findings += _apart(hosts, port, look)
    return Checked(visited, tuple(findings), interfaces.pop() if len(interfaces) == 1 else "", port)


def interface_to(host: str) -> str:
    """The interface of ours by which `host` is met; empty where that is not known."""
    with contextlib.suppress(OSError):
        return network.interface_to(host)
    return ""


def signal_job(hosts: Sequence[str], job: str, number: int, timeout_s: float = 5) -> None:
    """Sends a signal to a job's processes on these hosts, by their number; hosts that do not answer are passed over."""
    words = (sys.executable, "-m", "dslpar.launch.agent", "signal", job, str(int(number)))
    travels = {name: value for name, value in os.environ.items() if name == "PYTHONPATH"}

    def send(index: int) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired, OSError):
            command = ssh.words(hosts[index], words, travels, os.getcwd(), _SETTINGS)
            subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout_s)

    list(_each(hosts, send))


def _each(items: Sequence[object], do: Callable[[int], T]) -> Iterator[T]:
    """Of each number of an item, side by side, in order."""
    with ThreadPoolExecutor(max_workers=min(AT_ONCE, len(items) or 1)) as pool:
        yield from pool.map(do, range(len(items)))


@contextlib.contextmanager
def _mark(output_dir: Path) -> Iterator[tuple[str, str]]:
    """A file that hosts which share the output folder see; beside it, where it is not there yet. Or none, and why."""
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


def _question(hosts: Sequence[Host], number: int, look: Look, mark: str) -> agent.Question:
    """The first host is asked about rank 0's port, and how it meets the others; those, how they meet the first."""
    others = [host.address for host in hosts[:_ASKED] if host is not hosts[number]]
    return agent.Question(list(look.files), mark, others, (look.port or 0) if number == 0 else 0)


def _words(host: Host, look: Look, *words: str) -> tuple[str, ...]:
    """What runs dslpar.launch.agent on a host; on this one without ssh."""
    command = (sys.executable, "-m", "dslpar.launch.agent", *words)
    return command if host.name in look.here else ssh.words(host.name, command, look.environ, os.getcwd(), _SETTINGS)


def _visit(host: Host, question: agent.Question, look: Look) -> Visited:
    command = _words(host, look, "look", json.dumps(question._asdict()))
    began = time.time()
    try:
        done = _run(command)
    except subprocess.TimeoutExpired:
        message = f"did not answer within {_ANSWER_S:.0f} s"
        return Visited(
            host, wrong=_unreachable(host, message, f"ssh {host.name}; --no-checks where it is slow, and well")
        )
    except FileNotFoundError:
        return Visited(
            host, wrong=_unreachable(host, "cannot be visited: there is no ssh here", "install openssh-client")
        )
    answers = [line for line in done.stdout.splitlines() if line.startswith('{"dslpar": ')]  # a shell may say more
    if done.returncode or not answers:
        return Visited(host, wrong=_why(host, done.returncode, done.stderr))
    found = json.loads(answers[-1])["dslpar"]
    if set(found) != set(Sight._fields):
        return Visited(host, wrong=_other_dslpar(host, found))
    sight = Sight(**found)
    return Visited(host, sight, skew_s=_skew(sight.time_s, began, time.time()))


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Whatever a host's shell says beside, in whatever encoding.

    Raises:
        subprocess.TimeoutExpired, FileNotFoundError: it took too long; there is no such program.
    """
    return subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=_ANSWER_S
    )


def _skew(there_s: float, began_s: float, ended_s: float) -> float:
    """How far a clock is outside of what passed here meanwhile."""
    return there_s - ended_s if there_s > ended_s else min(0.0, there_s - began_s)


# ---- whether they meet ----


def _apart(hosts: Sequence[Host], port: int, look: Look) -> Iterator[Finding]:
    """Those that cannot connect to the first one's port, where rank 0 will listen."""
    first = hosts[0]
    with _listening(first, port, look) as listens:
        words = ("meet", first.address, str(port))
        why = list(_each(hosts[1:], lambda number: _met(_words(hosts[number + 1], look, *words)))) if listens else []
    for host, message in zip(hosts[1:], why, strict=False):
        if message:
            hint = f"a firewall between them: --master-port P, one that is open; is {first.address} its name there?"
            yield finding(
                "HST224", f"{host.name} cannot connect to {first.address}:{port}: {message}", hint, host.location
            )


@contextlib.contextmanager
def _listening(first: Host, port: int, look: Look) -> Iterator[bool]:
    """Whether somebody listens at that port of the first host, as long as it lasts."""
    command = _words(first, look, "listen", str(port))
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as listener:
        assert listener.stdout is not None
        alarm = Timer(_ANSWER_S, listener.kill)
        alarm.start()
        listens = any(line.strip() == agent.LISTENS.encode() for line in listener.stdout)  # a shell may say more before
        alarm.cancel()
        yield listens


def _met(command: Sequence[str]) -> str:
    """Why a host does not meet the first; empty: it does, or cannot say."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        done = _run(command)
        return done.stdout.strip().rpartition("\n")[2] if done.returncode == agent.APART else ""
    return ""


# ---- who cannot be reached, or cannot run there ----

_WHY = (
    (
        "Could not resolve hostname",
        "has a name that is not known here",
        "its address, in the hostfile or in /etc/hosts",
    ),
    ("Connection refused", "refuses ssh", "start sshd there; another port belongs into ~/.ssh/config"),
    ("Host key verification failed", "has a key that is not known here, or another than before", "ssh {host}, once"),
    ("Permission denied", "lets nobody in without a password", "ssh-copy-id {host}"),
    ("timed out", f"does not answer within {_CONNECT_S} s", "is it up, and is this its name in the network?"),
    ("No route to host", "cannot be reached: no route", "is it up, and is this its name in the network?"),
    ("Network is unreachable", "cannot be reached: no network", "is this its name in the network?"),
)
"""What ssh says, what it means, and what to do."""


def _why(host: Host, status: int, said: str) -> Finding:
    last = next((line for line in reversed(said.splitlines()) if line.strip()), f"status {status}")
    if status == ssh.FAILED:
        known = ((message, hint) for words, message, hint in _WHY if words in said)
        message, hint = next(known, (f"cannot be reached: {last}", "ssh {host}"))
        return _unreachable(host, message, hint.format(host=host.name))
    if status == ssh.NO_FOLDER:
        return _other_files(host, f"has no folder {os.getcwd()}", "the same folder on every host: a shared file system")
    if status in (126, 127):
        return _other_versions(host, f"has no {sys.executable}")
    if "No module named" in last:
        return _other_versions(host, f"has no dslpar for its Python: {last}")
    return finding(
        "HST212", f"{host.name} cannot run dslpar: {last}", f"ssh {host.name} {sys.executable} -V", host.location
    )


def _other_dslpar(host: Host, sight: Mapping[str, object]) -> Finding:
    """One that says other things of itself than this one."""
    versions = sight.get("versions")
    version = versions.get("dslpar") if isinstance(versions, dict) else "(unknown)"
    return _other_versions(host, f"has dslpar {version}, and this host another")


def _other_versions(host: Host, message: str) -> Finding:
    hint = "the same environment at the same path on every host"
    return finding("HST212", f"{host.name} {message}", hint, host.location)


def _unreachable(host: Host, message: str, hint: str) -> Finding:
    return finding("HST211", f"{host.name} {message}", hint, host.location)


def _other_files(host: Host, message: str, hint: str) -> Finding:
    return finding("HST213", f"{host.name} {message}", hint, host.location)


# ---- who differs ----


def _findings(visited: Sequence[Visited], look: Look) -> Iterator[Finding]:
    yield from (one.wrong for one in visited if one.wrong)
    own, digests = agent.versions(), {path: agent.digest(path) for path in look.files}
    most = max((one.sight.accelerators for one in visited if one.sight), default=0)
    for one in visited:
        if one.sight:
            yield from _versions(one.host, one.sight, own)
            yield from _files(one.host, one.sight, digests)
            yield from _output(one.host, one.sight, look)
            yield from _accelerators(one.host, one.sight, look, most)
            yield from _clock(one)
    yield from _port(visited[0], look)
    yield from _interfaces([(one.host, one.sight) for one in visited if one.sight])


def _versions(host: Host, sight: Sight, own: Mapping[str, str]) -> Iterator[Finding]:
    other = [f"{name} {sight.versions[name] or '(none)'}" for name in own if sight.versions[name] != own[name]]
    if other:
        here = ", ".join(f"{name} {own[name] or '(none)'}" for name in own if sight.versions[name] != own[name])
        message = f"has {', '.join(other)}, and this host {here}"
        yield _other_versions(host, message)


def _files(host: Host, sight: Sight, own: Mapping[str, str]) -> Iterator[Finding]:
    for path, there in sight.digests.items():
        if there != own[path]:
            message = f"has no file {path}" if not there else f"has another {path} than this host"
            yield _other_files(host, message, f"copy it, or use a shared file system: scp {path} {host.name}:...")


def _output(host: Host, sight: Sight, look: Look) -> Iterator[Finding]:
    if sight.folder != "shared":
        message = {
            "not shared": f"does not see what this host writes to {look.output_dir}",
            "not writable": f"may not write to {look.output_dir}",
        }[sight.folder]
        hint = "train.output_dir=FOLDER on a file system that all hosts share: checkpoints are written by all of them"
        yield finding("HST214", f"{host.name} {message}", hint, host.location)


def _not_writable(why: str, look: Look) -> Iterator[Finding]:
    """By this host, so that nothing is known of the others."""
    if why:
        message = f"this host may not write to {look.output_dir}: {why}"
        hint = "train.output_dir=FOLDER on a file system that all hosts share, and may write to"
        yield finding("HST214", message, hint)


def _accelerators(host: Host, sight: Sight, look: Look, most: int) -> Iterator[Finding]:
    """`most`: that any host has; where none has one, all ranks run on CPUs."""
    needed = max(host.devices) + 1 if host.devices else host.slots
    if not look.on_cpu and most and sight.accelerators < needed:
        message = f"{host.name} has {sight.accelerators} accelerators, and the hostfile asks for {needed}"
        fits = (
            f"slots={sight.accelerators}" if sight.accelerators else "leave it out, or see to its driver (nvidia-smi)"
        )
        hint = f"{fits}; DS_ACCELERATOR=cpu runs ranks on the CPU"
        yield finding("HST206", message, hint, host.slots_location)


def _clock(one: Visited) -> Iterator[Finding]:
    if abs(one.skew_s) > _CLOCK_S:
        way = "ahead of" if one.skew_s > 0 else "behind"
        message = f"has a clock {abs(one.skew_s):.0f} s {way} this host's"
        hint = "NTP (timedatectl set-ntp true); logs and files' times of this job will be off until then"
        yield finding("HST215", f"{one.host.name} {message}", hint, one.host.location)


def _port(first: Visited, look: Look) -> Iterator[Finding]:
    if look.port and first.sight and not first.sight.port_is_free:
        yield port_taken(first.host.name, look.port, first.sight.free_port)


def port_taken(host: str, port: int, free: int) -> Finding:
    """Where rank 0 is to listen, somebody does."""
    message = f"port {port} of {host} is taken: another job meets there"
    hint = f"--master-port {free}, or none, to have a free one found"
    return finding("HST216", message, hint)


def _interfaces(seen: Sequence[tuple[Host, Sight]]) -> Iterator[Finding]:
    """Of several hosts; each asks by which interface it meets the others."""
    for host, sight in seen if len(seen) > 1 else ():
        if not sight.interface:
            message = "meets the other hosts by no interface that they could reach"
            yield finding(
                "HST217", f"{host.name} {message}", "GLOO_SOCKET_IFNAME=<interface>, set here, travels", host.location
            )


def _row(one: Visited) -> tuple[str, ...]:
    if one.sight is None:
        return (one.host.name, "-", "-", "-", "-", str(one.host.slots), "-", "-", "-", "-")
    sight = one.sight
    numbers = (str(one.host.slots), str(sight.accelerators), str(sight.cores))
    versions = tuple(sight.versions[name] or "none" for name in ("python", "dslpar", "torch", "deepspeed"))
    return (one.host.name, *versions, *numbers, sight.interface or "-", f"{one.skew_s:+.0f} s" if one.skew_s else "ok")
