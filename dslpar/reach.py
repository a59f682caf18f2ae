"""The hosts of a job, before it starts: who can be reached, and who differs; all that is wrong at once.

    checked = reach.check(hosts, look)     # findings, a table for people, and what was learnt for the launch

Each host runs `python -m dslpar.visit` over ssh, and this one without; nothing there imports torch, so it takes about
as long as one ssh. What it finds would else be found by ranks, one at a time, or by a time-out.
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
from typing import NamedTuple, TypeVar

from dslpar import network, ssh, visit
from dslpar.errors import WORLD, Finding, Location, Severity
from dslpar.hostfile import Host
from dslpar.visit import Sight

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
_SETTINGS = (f"ConnectTimeout={_CONNECT_S}", "BatchMode=yes", "ServerAliveInterval=3", "ServerAliveCountMax=3")


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
    with _mark(Path(look.output_dir)) as mark:
        questions = [_question(hosts, number, look, mark) for number in range(len(hosts))]
        visited = tuple(_each(hosts, lambda number: _visit(hosts[number], questions[number], look)))
    seen = [one.sight for one in visited if one.sight]
    interfaces = {sight.interface for sight in seen}
    port = visited[0].sight.free_port if look.port is None and visited[0].sight else look.port
    return Checked(visited, tuple(_findings(visited, look)), interfaces.pop() if len(interfaces) == 1 else "", port)


def interface_to(host: str) -> str:
    """The interface of ours by which `host` is met; empty where that is not known."""
    with contextlib.suppress(OSError):
        return network.interface_to(host)
    return ""


def signal_job(hosts: Sequence[str], job: str, number: int, to: visit.To = "all", timeout_s: float = 5) -> None:
    """Sends a signal to a job's processes on these hosts, by their number; hosts that do not answer are passed over."""
    words = (sys.executable, "-m", "dslpar.visit", "signal", job, str(int(number)), to)
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
def _mark(output_dir: Path) -> Iterator[str]:
    """A file that hosts which share the output folder see; beside it, where it is not there yet. Empty: none can be."""
    folder = next(path for path in (output_dir.absolute(), *output_dir.absolute().parents) if path.is_dir())
    mark = folder / f".dslpar_{secrets.token_hex(8)}"
    try:
        mark.touch()
    except OSError:
        yield str(mark)
        return
    try:
        yield str(mark)
    finally:
        mark.unlink(missing_ok=True)


def _question(hosts: Sequence[Host], number: int, look: Look, mark: str) -> visit.Question:
    """The first host is asked about rank 0's port, and how it meets the others; those, how they meet the first."""
    others = [host.name for host in hosts[:_ASKED] if host is not hosts[number]]
    return visit.Question(list(look.files), mark, others, (look.port or 0) if number == 0 else 0)


def _visit(host: Host, question: visit.Question, look: Look) -> Visited:
    words = (sys.executable, "-m", "dslpar.visit", "look", json.dumps(question._asdict()))
    command = words if host.name in look.here else ssh.words(host.name, words, look.environ, os.getcwd(), _SETTINGS)
    began = time.time()
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_ANSWER_S)
    except subprocess.TimeoutExpired:
        return Visited(host, wrong=_unreachable(host, f"did not answer within {_ANSWER_S:.0f} s", "ssh " + host.name))
    except FileNotFoundError:
        return Visited(
            host, wrong=_unreachable(host, "cannot be visited: there is no ssh here", "install openssh-client")
        )
    answers = [line for line in done.stdout.splitlines() if line.startswith('{"dslpar": ')]  # a shell may say more
    if done.returncode or not answers:
        return Visited(host, wrong=_why(host, done.returncode, done.stderr))
    sight = Sight(**json.loads(answers[-1])["dslpar"])
    return Visited(host, sight, skew_s=_skew(sight.time_s, began, time.time()))


def _skew(there_s: float, began_s: float, ended_s: float) -> float:
    """How far a clock is outside of what passed here meanwhile."""
    return there_s - ended_s if there_s > ended_s else min(0.0, there_s - began_s)


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
        known = ((message, help_) for words, message, help_ in _WHY if words in said)
        message, help_ = next(known, (f"cannot be reached: {last}", "ssh {host}"))
        return _unreachable(host, message, help_.format(host=host.name))
    if status == ssh.NO_FOLDER:
        return _other_files(host, f"has no folder {os.getcwd()}", "the same folder on every host: a shared file system")
    if status in (126, 127):
        said = f"has no {sys.executable}"
        return _at(host, "HST212", "other-versions", said, "the same environment at the same path on every host")
    if "No module named" in last:
        said = f"has no dslpar for its Python: {last}"
        return _at(host, "HST212", "other-versions", said, "the same environment at the same path on every host")
    return _at(host, "HST212", "other-versions", f"cannot run dslpar: {last}", f"ssh {host.name} {sys.executable} -V")


def _unreachable(host: Host, said: str, help_: str) -> Finding:
    return _at(host, "HST211", "unreachable-host", said, help_)


def _other_files(host: Host, said: str, help_: str) -> Finding:
    return _at(host, "HST213", "config-differs-there", said, help_)


def _at(host: Host, code: str, name: str, said: str, help_: str, severity: Severity = "error") -> Finding:
    return Finding(code, name, severity, f"{host.name} {said}", help_, host.location)


# ---- who differs ----


def _findings(visited: Sequence[Visited], look: Look) -> Iterator[Finding]:
    yield from (one.wrong for one in visited if one.wrong)
    own, digests = visit.versions(), {path: visit.digest(path) for path in look.files}
    for one in visited:
        if one.sight:
            yield from _versions(one.host, one.sight, own)
            yield from _files(one.host, one.sight, digests)
            yield from _output(one.host, one.sight, look)
            yield from _accelerators(one.host, one.sight, look)
            yield from _clock(one)
    yield from _port(visited[0], look)
    yield from _interfaces([(one.host, one.sight) for one in visited if one.sight])


def _versions(host: Host, sight: Sight, own: Mapping[str, str]) -> Iterator[Finding]:
    other = [f"{name} {sight.versions[name] or '(none)'}" for name in own if sight.versions[name] != own[name]]
    if other:
        here = ", ".join(f"{name} {own[name] or '(none)'}" for name in own if sight.versions[name] != own[name])
        said = f"has {', '.join(other)}, and this host {here}"
        yield _at(host, "HST212", "other-versions", said, "the same environment at the same path on every host")


def _files(host: Host, sight: Sight, own: Mapping[str, str]) -> Iterator[Finding]:
    for path, there in sight.digests.items():
        if there != own[path]:
            said = f"has no file {path}" if not there else f"has another {path} than this host"
            yield _other_files(host, said, f"copy it, or use a shared file system: scp {path} {host.name}:...")


def _output(host: Host, sight: Sight, look: Look) -> Iterator[Finding]:
    if sight.folder != "shared":
        said = {
            "not shared": f"does not see what this host writes to {look.output_dir}",
            "not writable": f"may not write to {look.output_dir}",
        }[sight.folder]
        help_ = "train.output_dir=FOLDER on a file system that all hosts share: checkpoints are written by all of them"
        yield _at(host, "HST214", "output-not-shared", said, help_)


def _accelerators(host: Host, sight: Sight, look: Look) -> Iterator[Finding]:
    needed = max(host.devices) + 1 if host.devices else host.slots
    if not look.on_cpu and 0 < sight.accelerators < needed:
        said = f"{host.name} has {sight.accelerators} accelerators, and the hostfile asks for {needed}"
        help_ = f"slots={sight.accelerators}; DS_ACCELERATOR=cpu runs ranks on the CPU"
        yield Finding("HST206", "too-few-accelerators", "error", said, help_, host.slots_location)


def _clock(one: Visited) -> Iterator[Finding]:
    if abs(one.skew_s) > _CLOCK_S:
        way = "ahead of" if one.skew_s > 0 else "behind"
        said = f"has a clock {abs(one.skew_s):.0f} s {way} this host's"
        help_ = "NTP (timedatectl set-ntp true); logs and files' times of this job will be off until then"
        yield _at(one.host, "HST215", "clocks-differ", said, help_, "warning")


def _port(first: Visited, look: Look) -> Iterator[Finding]:
    if look.port and first.sight and not first.sight.port_is_free:
        said = f"port {look.port} of {first.host.name} is taken: another job meets there"
        help_ = f"--master-port {first.sight.free_port}, or none, to have a free one found"
        yield Finding("HST216", "port-taken", "error", said, help_, Location(WORLD))


def _interfaces(seen: Sequence[tuple[Host, Sight]]) -> Iterator[Finding]:
    """Of several hosts; each asks by which interface it meets the others."""
    for host, sight in seen if len(seen) > 1 else ():
        if not sight.interface:
            said = "meets the other hosts by no interface that they could reach"
            yield _at(
                host, "HST217", "no-interface", said, "GLOO_SOCKET_IFNAME=<interface>, set here, travels", "warning"
            )


def _row(one: Visited) -> tuple[str, ...]:
    if one.sight is None:
        return (one.host.name, "-", "-", "-", "-", str(one.host.slots), "-", "-", "-", "-")
    sight = one.sight
    numbers = (str(one.host.slots), str(sight.accelerators), str(sight.cores))
    versions = tuple(sight.versions[name] or "none" for name in ("python", "dslpar", "torch", "deepspeed"))
    return (one.host.name, *versions, *numbers, sight.interface or "-", f"{one.skew_s:+.0f} s" if one.skew_s else "ok")
