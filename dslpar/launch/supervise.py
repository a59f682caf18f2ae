"""Runs a job's launchers to their end, and the end of everything that they started; then says who failed first.

    status = supervise.run(plan, job)

Each launcher runs in a session of its own, so that a signal reaches it once, whether from a terminal or by `kill`. What
a dead launcher leaves behind becomes this process's child (Linux's "subreaper"), so nothing can outlive it here; ranks
on other hosts are ended by their guards, at the latest when they lose this process.

SIGINT goes to the launchers, as a terminal would send it. SIGTERM, SIGHUP and SIGUSR1 go to the ranks and past the
launchers, each of which has its own way to be hasty with it: ranks save a checkpoint and leave. A second signal ends
all at once; not one that comes with the first (a scheduler's, and a shell's that passes it on), nor the SIGTERM that
SIGUSR1 warns of.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from dslpar.cluster import network
from dslpar.launch import commands as launch_commands
from dslpar.launch import preflight
from dslpar.launch.job import Plan
from dslpar.layout.resolve import Job
from dslpar.reporting import run_dir
from dslpar.watchdog import first_failure, processes, rank_monitor
from dslpar.watchdog.receiver import Receiver
from dslpar.watchdog.reports import Stopped

_LOOK_S = 0.05
_PATIENCE_S = 5.0
"""How long ranks and launchers may take to end after a death or SIGINT, before they are killed."""
_LAUNCHER_S = 1.5
"""How long a launcher may take when no rank is left: ssh waits long for a host that is gone."""
_STOP_PATIENCE_S = 3.0
"""And how much longer than `train.term_grace` after SIGTERM."""
_FAR_PATIENCE_S = 3.0
"""How long the guards on other hosts may take to leave when the launchers are gone."""
_PR_SET_CHILD_SUBREAPER = 36
_STOPS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
_HANDLED = (signal.SIGINT, *_STOPS)
_AGAIN_S = 2.0
"""A second signal to stop that comes sooner is the same one."""


class Came(NamedTuple):
    """A signal to this process."""

    number: int
    time_s: float
    """Since the epoch."""


def run(plan: Plan, job: Job) -> int:
    """Runs it. Its exit status: 0 if every rank ended in order, 1 if one failed, `train.requeue_status` if they were
    stopped, 128 + n if one was ended by signal n, or if this process was told to end by signal n.
    """
    with tempfile.TemporaryDirectory(prefix="dslpar_reports_") as folder, _signals() as received:
        try:
            supervised = _Supervised(plan, job, Path(folder), received)
            supervised.wait()
        except BaseException:  # of ours: the job would go on, and nobody look after it
            _kill(descendants(os.getpid()))
            raise
        message, status = supervised.verdict()
        sys.stderr.write(message)
        return status


@contextlib.contextmanager
def _signals() -> Iterator[list[Came]]:
    """The signals that come meanwhile, in order. One that is ignored (nohup) stays so."""
    received: list[Came] = []

    def note(number: int, frame: FrameType | None) -> None:
        received.append(Came(number, time.time()))

    before = {number: signal.getsignal(number) for number in _HANDLED}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, note)
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Supervised:
    """One job, from its launchers' start to its last word; a class, since it is what has happened so far."""

    def __init__(self, plan: Plan, job: Job, folder: Path, received: list[Came]) -> None:
        self.plan, self.job, self.folder, self.received = plan, job, folder, received
        self.began = time.time()
        _adopt_orphans()
        self.watch = first_failure.Watch(folder, here=not plan.elsewhere)
        self.receiver = _receiver(plan, folder) if plan.elsewhere else None
        variable = self.receiver.variable if self.receiver else str(folder)
        carrying = launch_commands.carrying(plan, {rank_monitor.REPORTS: variable})
        self.launchers = [
            subprocess.Popen(
                command.words,
                env={**os.environ, **command.environ},
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
            for command in (command.placed(folder) for command in carrying.commands)
        ]
        self.told: set[tuple[int, int]] = set()
        """(process, signal) of what was sent to ranks."""
        self.stop = 0
        """The signal that ranks are to have; 0: none."""

    # ---- while it runs ----

    def wait(self) -> None:
        """Until all is over. After a death or a signal there is a time to end; a second signal ends it."""
        seen, deadline = 0, float("inf")
        while [one for one in self.launchers if one.poll() is None]:
            if self._look() or self._failed():
                deadline = min(deadline, time.monotonic() + (_PATIENCE_S if self._somebody() else _LAUNCHER_S))
            while seen < len(self.received):
                deadline = min(deadline, time.monotonic() + self._take(seen))
                seen += 1
            self._stop_ranks()
            if time.monotonic() > deadline:
                _kill(descendants(os.getpid()))
            time.sleep(_LOOK_S)
        self._end_all()
        self._look()

    def _look(self) -> bool:
        """Whether a rank has died."""
        if self.receiver is not None:
            self.receiver.look()
        return self.watch.look()

    def _somebody(self) -> bool:
        """Whether a rank may still be there: on other hosts, as far as their guards tell."""
        return self.receiver is None or self.receiver.connected > 0

    def _failed(self) -> bool:
        """Whether a launcher has, of several."""
        return any(one.returncode for one in self.launchers)

    def _take(self, index: int) -> float:
        """What becomes of a signal; the seconds that all have to end."""
        number, when = self.received[index]
        before = [one for one in self.received[:index] if one.number != signal.SIGUSR1]
        if index and number == signal.SIGUSR1:
            return float("inf")
        if before:
            same = number in _STOPS and before[0].number in _STOPS and when - before[0].time_s < _AGAIN_S
            return float("inf") if same else -1.0
        return self._pass_on(number)

    def _pass_on(self, number: int) -> float:
        """A signal to those whom it is for; the seconds that they have."""
        if number in _STOPS and (self.receiver or self.watch.born()) and self._reaches_ranks():
            self.stop = signal.SIGUSR1 if number == signal.SIGUSR1 else signal.SIGTERM
            if self.receiver is not None:
                self.receiver.stop(self.stop)
                self._signal_elsewhere(self.receiver, signal.SIGTERM)
            early = number == signal.SIGUSR1  # a warning: no clock runs
            return float("inf") if early else self.job.spec.train.term_grace + _STOP_PATIENCE_S
        if self.plan.elsewhere:  # no signal to DeepSpeed's: it would end all jobs of its kind on all hosts
            _kill(descendants(os.getpid()))
        for one in self.launchers:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(one.pid, signal.SIGINT if number == signal.SIGINT else signal.SIGTERM)
        return _PATIENCE_S

    def _reaches_ranks(self) -> bool:
        """Whether there are ranks that a signal can be passed to, by their guards or by ssh."""
        return self.receiver is None or self.receiver.connected > 0 or bool(self.plan.hosts)

    def _signal_elsewhere(self, receiver: Receiver, number: int) -> None:
        """By ssh to all of the job, where guards have not come to us: behind a firewall, or not there yet."""
        if len(receiver.met) < len(self.plan.ranks):
            preflight.signal_job([host.name for host in self.plan.hosts], self.plan.job, number)

    def _stop_ranks(self) -> None:
        """The signal to each rank here, once."""
        born = [] if self.receiver or not self.stop else [(who.pid, self.stop) for who in self.watch.born()]
        for pid, number in {*born} - self.told:
            self.told.add((pid, number))
            _send(pid, number)

    def _end_all(self) -> None:
        """Ends, at last by SIGKILL, whatever the launchers left, here and elsewhere."""
        ends = time.monotonic() + _PATIENCE_S
        for pid in _living():
            _send(pid, signal.SIGTERM)
        while left := _living():
            self._look()
            if time.monotonic() > ends:
                _kill(left)
            time.sleep(_LOOK_S)
        if self.receiver is not None:
            self._end_elsewhere(self.receiver)

    def _end_elsewhere(self, receiver: Receiver) -> None:
        ends = time.monotonic() + _FAR_PATIENCE_S
        self._look()
        while receiver.connected and time.monotonic() < ends:
            time.sleep(_LOOK_S)
            self._look()
        if any(one.returncode for one in self.launchers):
            self._signal_elsewhere(receiver, signal.SIGKILL)
        if receiver.connected:
            preflight.signal_job([host.name for host in self.plan.hosts], self.plan.job, signal.SIGKILL)

    # ---- the last words ----

    def verdict(self) -> tuple[str, int]:
        """What to say, and the exit status."""
        code = next((one.returncode for one in self.launchers if one.returncode), 0)
        told, when = signal_of(code), _when(Path(self.job.output_dir), self.began)
        stopped, death = self.watch.stopped(), self.watch.first(told)
        if death is not None and self.received and death.time_s >= self.received[0].time_s:
            death = None  # it comes of the signal
        if stopped is not None and death is None:
            return self._said_of_stop(stopped), stopped.status
        if death is not None:
            return f"dslpar launch: {death.told(when)}", 128 + death.signal if death.signal else 1
        if self.received:
            number = self.received[0].number
            return f"dslpar launch: stopped by {signal.Signals(number).name}{when}; no process is left\n", 128 + number
        if code:
            how = f"was ended by {signal.Signals(told).name}" if told else f"ended with status {code}"
            message = f"dslpar launch: the launcher {how}{when}; what it and the ranks said stands above\n"
            return message, 128 + told if told else code
        if not self._all_ended():
            return f"dslpar launch: the launcher ended with status 0, and not every rank had ended{when}\n", 1
        return "", 0

    def _said_of_stop(self, stopped: Stopped) -> str:
        by = f" by {signal.Signals(self.received[0].number).name}" if self.received else ""
        held = f"checkpoint saved in {stopped.saved}" if stopped.saved else "no step was done, nothing to save"
        if stopped.overdue:
            held = "had not come to the end of its step in time, and was ended; the last checkpoint is as it was"
        elif not stopped.saved and self.job.spec.train.save_interval == 0:
            held = "nothing is saved, with train.save_interval=0"
        after = f" after step {stopped.step}" if stopped.step and not stopped.overdue else ""
        return f"dslpar launch: stopped{by}{after}: {held}; to be requeued with --resume (status {stopped.status})\n"

    def _all_ended(self) -> bool:
        """On other hosts: as far as their guards could tell."""
        born = len(self.watch.born())
        return self.watch.all_ended(self.plan.ranks) or (self.plan.elsewhere and not born)


def _receiver(plan: Plan, folder: Path) -> Receiver:
    """At those of our addresses from which the ranks' hosts can be reached."""
    found: dict[str, None] = {}
    for name in [host.address for host in plan.hosts] or [socket.gethostname()]:
        with contextlib.suppress(OSError):  # what has no address here may have one there, and another is enough
            found[network.source_towards(name)] = None
    return Receiver(folder, sorted(found, key=lambda address: address.startswith("127.")))


def _adopt_orphans() -> None:
    """From now on, orphans among our descendants are ours: DeepSpeed's runner, for one, leaves its ranks behind."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _living() -> list[int]:
    """Our descendants; those that have ended are put to rest."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    return descendants(os.getpid())


def descendants(root: int) -> list[int]:
    """The living processes below `root`, in sessions of their own too (torchrun's ranks)."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        fields = processes.stat(int(entry.name)) if entry.name.isdecimal() else []
        if fields and fields[0] not in "ZX":
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    found = list(children.get(root, ()))
    for pid in found:  # grows while it runs
        found += children.get(pid, ())
    return found


def _kill(pids: list[int]) -> None:
    for pid in pids:
        _send(pid, signal.SIGKILL)


def _send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def signal_of(code: int) -> int | None:
    """The signal that an exit status tells of: mpirun's 128 + n, DeepSpeed's 256 - n, or a launcher's own end by it.

    >>> signal_of(137), signal_of(247), signal_of(-9), signal_of(1)
    (9, 9, 9, None)
    """
    number = -code if code < 0 else code - 128 if 128 < code <= 192 else 256 - code if code > 192 else 0
    return number if number in set(signal.Signals) else None


def _when(output_dir: Path, began: float) -> str:
    """After which step, as rank 0 wrote it down; nothing if this run has written none."""
    metrics = output_dir / run_dir.METRICS
    if not metrics.exists() or metrics.stat().st_mtime < began:
        return ""
    text = metrics.read_text(encoding="utf-8", errors="replace")
    lines = text.rpartition("\n")[0].splitlines()  # without half a last one: a full disk
    with contextlib.suppress(ValueError, KeyError, TypeError):  # nor what a file system that broke has left
        return f", after step {json.loads(lines[-1])['step']}" if lines else ", in the first step"
    return ""
