"""Runs a job's launchers to their end, and the end of everything that they started; then says who failed first.

    status = supervise.run(launch, job)

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
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from dslpar.cluster import network, ssh
from dslpar.cluster.command import LOCALHOST
from dslpar.cluster.request import Launch
from dslpar.core.errors import DslparError
from dslpar.core.visible import visible
from dslpar.launch import commands as launch_commands
from dslpar.launch import host_findings, preflight
from dslpar.layout.resolve import Job
from dslpar.reporting import run_dir
from dslpar.watchdog import marks, rank_monitor
from dslpar.watchdog.first_failure import JobWatch
from dslpar.watchdog.marks import Stopped
from dslpar.watchdog.processes import descendants
from dslpar.watchdog.receiver import Receiver

_POLL_S = 0.05
_PATIENCE_S = 5.0
"""How long ranks and launchers may take to end after a failure or SIGINT, before they are killed."""
_LAUNCHER_S = 1.5
"""How long a launcher may take when no rank is left: ssh waits long for a host that is gone."""
_STOP_PATIENCE_S = 3.0
"""And how much longer than `train.term_grace` after SIGTERM."""
_REMOTE_PATIENCE_S = 3.0
"""How long the guards on other hosts may take to leave when the launchers are gone."""
_PR_SET_CHILD_SUBREAPER = 36
_STOPS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
_HANDLED = (signal.SIGINT, *_STOPS)
_REPEAT_S = 2.0
"""A second signal to stop that comes sooner is the same one."""


class ReceivedSignal(NamedTuple):
    """A signal to this process."""

    number: int
    time_s: float
    """Since the epoch."""


def run(launch: Launch, job: Job) -> int:
    """Run a job and return the exit status: 0 if every rank ended in order, 1 if one failed, `train.requeue_status` if
    they were stopped, 128 + n if one was ended by signal n, or if this process was told to end by signal n.

    Raises:
        DslparError: the job cannot start: its output folder cannot be written to.
    """
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dslpar_reports_")))
        stack.callback(os.close, marks.lock_folder(folder))
        receiver = stack.enter_context(_receiver(launch, job, folder)) if launch.remote else None
        received = stack.enter_context(_collect_signals())
        try:
            supervised = _Supervised(launch, job, folder, receiver, received)
            supervised.wait()
        except BaseException:  # a bug of ours must not leave a job that nobody supervises
            _send(descendants(os.getpid()), signal.SIGKILL)
            raise
        message, status = supervised.conclude()
        sys.stderr.write(message)
        if supervised.failed:
            run_dir.append_error(Path(job.output_dir), message, supervised.start_s)
        return status


@contextlib.contextmanager
def _collect_signals() -> Iterator[list[ReceivedSignal]]:
    """Collect the signals that come meanwhile, in order. One that is ignored (nohup) stays ignored."""
    received: list[ReceivedSignal] = []

    def note(number: int, frame: FrameType | None) -> None:
        received.append(ReceivedSignal(number, time.time()))

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
    """One job, from its launchers' start to its last message; a class, since it holds what has happened so far."""

    def __init__(
        self, launch: Launch, job: Job, folder: Path, receiver: Receiver | None, received: list[ReceivedSignal]
    ) -> None:
        self.launch, self.job, self.receiver, self.received = launch, job, receiver, received
        self.start_s = time.time()
        self.failed = False
        """Whether `conclude` has named the rank that failed first."""
        # Orphans among our descendants become our children: DeepSpeed's runner, for one, leaves its ranks behind.
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self.watch = JobWatch(folder, local=not launch.remote)
        variable = self.receiver.variable if self.receiver else str(folder)
        launch = launch_commands.with_environ(launch, {rank_monitor.REPORTS: variable})
        self.launchers = []
        for command in (command.with_files_in(folder) for command in launch.commands):
            environ = {**os.environ, **command.environ}
            # In a session of its own: a terminal's SIGINT would reach it twice, from the terminal and from here.
            process = subprocess.Popen(command.argv, env=environ, stdin=subprocess.DEVNULL, start_new_session=True)
            self.launchers.append(process)
        self.signalled: set[tuple[int, int]] = set()
        """(process, signal) of what was sent to ranks."""
        self.stop_signal = 0
        """The signal that ranks are to have; 0: none."""

    # ---- while it runs ----

    def wait(self) -> None:
        """Wait until all is over. After a failure or a signal there is a time to end; a second signal ends it."""
        num_handled, deadline = 0, float("inf")
        while [launcher for launcher in self.launchers if launcher.poll() is None]:
            if self._poll_ranks() or any(launcher.returncode for launcher in self.launchers):
                # Ranks on other hosts are there as far as their guards tell.
                guarded = self.receiver is None or self.receiver.connected
                patience_s = _PATIENCE_S + self._held_back_s() if guarded else _LAUNCHER_S
                deadline = min(deadline, time.monotonic() + patience_s)
            while num_handled < len(self.received):
                deadline = min(deadline, time.monotonic() + self._handle_signal(num_handled))
                num_handled += 1
            self._signal_local_ranks()
            if time.monotonic() > deadline:  # and again at each turn: some may just be starting others
                _send(descendants(os.getpid()), signal.SIGKILL)
        self._end_all()
        self._poll_ranks()

    def _poll_ranks(self) -> bool:
        """Take what ranks and guards report for a moment; whether a rank has failed."""
        if self.receiver is not None:
            self.receiver.poll(_POLL_S)
        else:
            time.sleep(_POLL_S)
        return self.watch.poll()

    def _held_back_s(self) -> float:
        """For how long guards may still wait for a better cause than an abort; nobody waits after a signal."""
        return 0.0 if self.received else self.watch.held_back_s()

    def _handle_signal(self, index: int) -> float:
        """Handle one of the signals that came; return the seconds that all have to end."""
        number, time_s = self.received[index]
        before = [received for received in self.received[:index] if received.number != signal.SIGUSR1]
        if index and number == signal.SIGUSR1:
            return float("inf")
        if before:
            same = number in _STOPS and before[0].number in _STOPS and time_s - before[0].time_s < _REPEAT_S
            return float("inf") if same else -1.0
        return self._pass_on(number)

    def _pass_on(self, number: int) -> float:
        """Pass a signal to those whom it is for; return the seconds that they have."""
        # Whether there are ranks that it can be passed to, by their guards or by ssh.
        reachable = self.receiver.connected > 0 or self.launch.hosts if self.receiver else self.watch.started()
        if number in _STOPS and reachable:
            self.stop_signal = signal.SIGUSR1 if number == signal.SIGUSR1 else signal.SIGTERM
            if self.receiver is not None:
                self.receiver.send_stop(self.stop_signal)
                if len(self.receiver.met) < len(self.launch.ranks):  # behind a firewall, or late
                    self._signal_by_ssh(signal.SIGTERM)
            warning = number == signal.SIGUSR1  # no clock runs
            return float("inf") if warning else self.job.spec.train.term_grace + _STOP_PATIENCE_S
        if self.launch.remote:  # no signal to DeepSpeed's launcher: it would end all jobs of its kind on all hosts
            _send(descendants(os.getpid()), signal.SIGKILL)
        for launcher in self.launchers:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(launcher.pid, signal.SIGINT if number == signal.SIGINT else signal.SIGTERM)
        return _PATIENCE_S

    def _signal_by_ssh(self, number: int) -> None:
        """Signal the whole job, where guards that are missing cannot pass it on."""
        preflight.signal_job([host.name for host in self.launch.hosts], self.launch.facts.job_id, number)

    def _signal_local_ranks(self) -> None:
        """Send the stop signal to each rank here, once; ranks may start late."""
        if self.stop_signal and self.receiver is None:
            for pid, number in {(rank.pid, self.stop_signal) for rank in self.watch.started()} - self.signalled:
                self.signalled.add((pid, number))
                _send([pid], number)

    def _end_all(self) -> None:
        """End, at last by SIGKILL, whatever the launchers left, here and on other hosts."""
        deadline = time.monotonic() + _PATIENCE_S + self._held_back_s()
        _send(_living(), signal.SIGTERM)
        while left := _living():
            self._poll_ranks()
            if time.monotonic() > deadline:
                _send(left, signal.SIGKILL)
        if (receiver := self.receiver) is None:
            return
        deadline = time.monotonic() + _REMOTE_PATIENCE_S + self._held_back_s()
        self._poll_ranks()
        while receiver.connected and time.monotonic() < deadline:
            self._poll_ranks()
        failed = any(launcher.returncode for launcher in self.launchers)
        if receiver.connected or (failed and len(receiver.met) < len(self.launch.ranks)):
            self._signal_by_ssh(signal.SIGKILL)

    # ---- the last message ----

    def conclude(self) -> tuple[str, int]:
        """Return what to print, and the exit status."""
        code = next((launcher.returncode for launcher in self.launchers if launcher.returncode), 0)
        number, when = signal_of(code), _last_step(Path(self.job.output_dir), self.start_s)
        before_s = self.received[0].time_s if self.received else float("inf")
        stopped, failure = self.watch.stopped(), self.watch.first_failure(number, before_s)
        if stopped is not None and failure is None:
            return self._describe_stop(stopped), stopped.status
        if failure is None and (result := self.watch.result()) is not None and not self.received:
            return "", result.status  # which the ranks have reported
        if failure is not None:
            self.failed = True
            return f"dslpar launch: {failure.describe(when)}", 128 + failure.signal if failure.signal else 1
        if self.received:
            number = self.received[0].number
            by, kept = signal.Signals(number).name, _last_checkpoint(Path(self.job.output_dir))
            return f"dslpar launch: stopped by {by}{when}{kept}; no process is left\n", 128 + number
        if code:
            how = f"was ended by {signal.Signals(number).name}" if number else f"ended with status {code}"
            if self.launch.remote and code == ssh.FAILED:
                how += ", which is ssh's own where a connection was lost, or never made"
            message = f"dslpar launch: the launcher {how}{when}; what it and the ranks said stands above\n"
            return message, 128 + number if number else code
        # Of ranks on other hosts nothing is known where no guard has connected.
        unknown = self.launch.remote and not self.watch.started()
        if not (self.watch.all_ended(self.launch.ranks) or unknown):
            return f"dslpar launch: the launcher ended with status 0, and not every rank had ended{when}\n", 1
        return "", 0

    def _describe_stop(self, stopped: Stopped) -> str:
        by = f" by {signal.Signals(self.received[0].number).name}" if self.received else ""
        saved = "no step was done, nothing to save"
        if stopped.saved:
            saved = f"checkpoint saved in {visible(stopped.saved)}"
        if stopped.overdue:
            saved = "what a rank was doing took too long, and was ended; the last checkpoint is as it was"
        elif not stopped.saved and self.job.spec.train.save_interval == 0:
            saved = "nothing is saved, with train.save_interval=0"
        after = f" after step {stopped.step}" if stopped.step and not stopped.overdue else ""
        return f"dslpar launch: stopped{by}{after}: {saved}; to be requeued with --resume (status {stopped.status})\n"


def _receiver(launch: Launch, job: Job, folder: Path) -> Receiver:
    """Listen at those of our addresses from which the ranks' hosts can be reached; the secret is in the output folder,
    which all hosts share. On this host alone where all of them are this one, started without ssh.

    Raises:
        DslparError: the output folder cannot be written to.
    """
    if launch.hosts and all(host.name in launch.facts.local_hosts for host in launch.hosts):
        return Receiver(folder, launch.ranks, (LOCALHOST,), folder / "secret", loopback=True)
    addresses: dict[str, None] = {}
    for name in [host.address for host in launch.hosts] or [socket.gethostname()]:
        with contextlib.suppress(OSError):  # what has no address here may have one there, and another is enough
            addresses[network.source_towards(name)] = None
    # In the order of the hosts, loopback last: guards try one after the other, and each try may take seconds.
    ordered = sorted(addresses, key=lambda address: address.startswith("127."))
    try:
        Path(job.output_dir).mkdir(parents=True, exist_ok=True)
        return Receiver(folder, launch.ranks, ordered, Path(job.output_dir, f".secret_{launch.facts.job_id}"))
    except OSError as error:
        raise DslparError([host_findings.output_not_writable(job.output_dir, str(error))]) from None


def _living() -> list[int]:
    """Return our living descendants; reap those that have ended."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    return descendants(os.getpid())


def _send(pids: Iterable[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def signal_of(code: int) -> int | None:
    """Return the signal behind an exit status: mpirun's 128 + n, DeepSpeed's 256 - n, or a launcher's own end by it.

    255 is none, though DeepSpeed's of SIGHUP would be the same: it is ssh's, and what C's exit makes of -1.

    >>> signal_of(137), signal_of(247), signal_of(-9), signal_of(1), signal_of(255)
    (9, 9, 9, None, None)
    """
    if code == ssh.FAILED:
        return None
    number = -code if code < 0 else code - 128 if 128 < code <= 192 else 256 - code if code > 192 else 0
    return number if number in set(signal.Signals) else None


def _last_checkpoint(output_dir: Path) -> str:
    """Say where a run goes on that was stopped without a checkpoint of its own; empty: nowhere."""
    from dslpar.reporting import run_list  # for this line alone

    name = run_list.read_run(output_dir).checkpoint if output_dir.is_dir() else ""
    return visible(f"; that saves nothing: --resume goes on from {name}") if name else ""


def _last_step(output_dir: Path, start_s: float) -> str:
    """Return after which step it was, as rank 0 wrote it down; empty if this run has written none."""
    metrics = output_dir / run_dir.METRICS
    if not metrics.exists() or metrics.stat().st_mtime < start_s:
        return ""
    text = metrics.read_text(encoding="utf-8", errors="replace")
    lines = text.rpartition("\n")[0].splitlines()  # without half a last line: a full disk
    with contextlib.suppress(ValueError, KeyError, TypeError):  # nor what a broken file system has left
        return visible(f", after step {json.loads(lines[-1])['step']}") if lines else ", in the first step"
    return ""
