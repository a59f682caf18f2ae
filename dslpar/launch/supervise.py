"""Supervisor: run a job's launchers until they and all processes they started have ended; report the first failure.

    status = supervise.run(launch, job)

"This process" is `dslpar launch`. Each launcher runs in a session of its own, so that a signal from a terminal or from
`kill` reaches it only once. Processes that a dead launcher leaves behind become children of this process (Linux's
"subreaper"), so that none of them outlives this process on this host. On other hosts, each rank's guard
(dslpar/watchdog) ends its rank, at the latest when it loses the connection to this process.

SIGINT is sent to the launchers, as a terminal would do, or to the ranks if the launcher would answer with a traceback.
SIGTERM, SIGHUP and SIGUSR1 are sent directly to the ranks, which save a checkpoint and exit. These signals bypass the
launchers, because each launcher would end its ranks too soon, in its own way. A second signal ends everything at once,
with two exceptions. A repetition within _REPEAT_S does not count, because a scheduler may send a signal that a shell
passes on as well. The SIGTERM that follows a SIGUSR1, its warning, counts as the first signal.
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

from dslpar.cluster import launcher_env, network, ssh
from dslpar.cluster.command import LOCALHOST
from dslpar.cluster.launchers import LAUNCHERS
from dslpar.cluster.request import Launch
from dslpar.core.errors import DslparError
from dslpar.core.visible import visible
from dslpar.launch import commands as launch_commands
from dslpar.launch import host_findings, preflight
from dslpar.layout.resolve import Job
from dslpar.reporting import run_dir
from dslpar.reporting.resume_hint import resume_hint
from dslpar.watchdog import marks, rank_monitor
from dslpar.watchdog.job_watch import JobWatch
from dslpar.watchdog.marks import Stopped
from dslpar.watchdog.processes import descendants
from dslpar.watchdog.receiver import Receiver

_POLL_S = 0.05
_PATIENCE_S = 5.0
"""Time for ranks and launchers to end after a failure or SIGINT, before they are killed."""
_LAUNCHER_S = 1.5
"""Time for a launcher to end when no guard is connected any more. Otherwise ssh would wait long for a lost host."""
_STOP_PATIENCE_S = 3.0
"""Time for ranks and launchers to end after SIGTERM, in addition to `train.term_grace`."""
_REMOTE_PATIENCE_S = 3.0
"""Time for guards on other hosts to exit when the launchers are gone."""
_PR_SET_CHILD_SUBREAPER = 36
_STOPS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""Signals after which ranks save a checkpoint and exit."""
_HANDLED = (signal.SIGINT, *_STOPS)
_REPEAT_S = 2.0
"""If a second signal to stop comes sooner than this, it counts as a repetition of the first."""


class ReceivedSignal(NamedTuple):
    """A signal to this process."""

    number: int
    time_s: float
    """Since the epoch."""


def run(launch: Launch, job: Job) -> int:
    """Run a job and return its exit status.

    The status is 0 if every rank ended in order, 1 if a rank failed, and `train.requeue_status` if the ranks stopped on
    request. It is 128 + n if signal n ended a rank, or if this process got signal n and the ranks did not stop in
    order. Otherwise it is the result that the ranks have reported, or the launcher's own status.

    Raises:
        DslparError: the output folder is not writable, so the job cannot start.
    """
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dslpar_reports_")))
        stack.callback(os.close, marks.lock_folder(folder))
        receiver = stack.enter_context(_receiver(launch, job, folder)) if launch.remote else None
        received = stack.enter_context(_collect_signals())
        try:
            supervised = _Supervised(launch, job, folder, receiver, received)
            supervised.wait()
        except BaseException:  # a bug in dslpar must not leave a job that nobody supervises
            _send(descendants(os.getpid()), signal.SIGKILL)
            raise
        message, status = supervised.conclude()
        sys.stderr.write(message)
        if supervised.level:
            run_dir.append_to_log(Path(job.output_dir), supervised.level, message, supervised.start_s)
        return status


@contextlib.contextmanager
def _collect_signals() -> Iterator[list[ReceivedSignal]]:
    """Yield a list to which this process's signals are added as they come. Ignored signals (nohup) stay ignored."""
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
    """One job, from the start of its launchers to its last message.

    The order of the calls: the constructor starts the launchers, `wait` runs them to their end, and `conclude` returns
    the last message and the exit status. `folder`: the folder for the ranks' marks (dslpar/watchdog/marks.py), which
    `receiver` fills if ranks are on other hosts. `received`: this process's signals so far.
    """

    def __init__(
        self, launch: Launch, job: Job, folder: Path, receiver: Receiver | None, received: list[ReceivedSignal]
    ) -> None:
        self.launch, self.job, self.receiver, self.received = launch, job, receiver, received
        self.start_s = time.time()
        self.level: run_dir.Level | None = None
        """The level at which log.txt gets the last message; None: a rank has logged the run's end itself."""
        # Orphaned descendants become our children: for example, DeepSpeed's runner leaves its ranks behind.
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self.watch = JobWatch(folder, local=not launch.remote)
        variable = self.receiver.variable if self.receiver else str(folder)
        launch = launch_commands.with_environ(launch, {rank_monitor.REPORTS: variable})
        self.launchers = []
        for command in (command.with_files_in(folder) for command in launch.commands):
            environ = {**launcher_env.without_ranks(os.environ), **command.environ}
            # In a session of its own: otherwise SIGINT would reach it twice, from the terminal and from here.
            process = subprocess.Popen(command.argv, env=environ, stdin=subprocess.DEVNULL, start_new_session=True)
            self.launchers.append(process)
        self.signalled: set[tuple[int, int]] = set()
        """Pairs (process, signal) that were sent to ranks."""
        self.stop_signal = 0
        """The signal to send to the ranks on this host; 0: none."""

    # ---- while it runs ----

    def wait(self) -> None:
        """Wait until all processes of the job have ended.

        A failure or a signal sets a deadline, after which the processes on this host are killed. A second signal sets
        the deadline to now.
        """
        num_handled, deadline = 0, float("inf")
        while [launcher for launcher in self.launchers if launcher.poll() is None]:
            if self._poll_ranks() or any(launcher.returncode for launcher in self.launchers):
                # Ranks on other hosts are known only through their guards.
                guarded = self.receiver is None or self.receiver.connected
                patience_s = _PATIENCE_S + self._held_back_s() if guarded else _LAUNCHER_S
                deadline = min(deadline, time.monotonic() + patience_s)
            while num_handled < len(self.received):
                deadline = min(deadline, time.monotonic() + self._handle_signal(num_handled))
                num_handled += 1
            self._signal_local_ranks()
            if self.stop_signal == signal.SIGINT and self.watch.all_gone():
                deadline = 0.0  # only launchers are left, which were stopped
            if time.monotonic() > deadline:  # repeat this at each turn: a process may just be starting others
                _send(descendants(os.getpid()), signal.SIGKILL)
        self._end_all()
        self._poll_ranks()

    def _poll_ranks(self) -> bool:
        """Collect reports of ranks and guards for _POLL_S. Return whether a rank has failed."""
        if self.receiver is not None:
            self.receiver.poll(_POLL_S)
        else:
            time.sleep(_POLL_S)
        return self.watch.poll()

    def _held_back_s(self) -> float:
        """Return how long guards may still wait for a better cause than a rank's abort; 0 after a signal."""
        return 0.0 if self.received else self.watch.held_back_s()

    def _handle_signal(self, index: int) -> float:
        """Handle the received signal number `index`. Return the seconds until everything must have ended.

        Return infinity for a signal that sets no deadline, and a negative number for a second signal.
        """
        number, time_s = self.received[index]
        before = [received for received in self.received[:index] if received.number != signal.SIGUSR1]
        if index and number == signal.SIGUSR1:
            return float("inf")
        if before:
            same = number in _STOPS and before[0].number in _STOPS and time_s - before[0].time_s < _REPEAT_S
            return float("inf") if same else -1.0
        return self._pass_on(number)

    def _pass_on(self, number: int) -> float:
        """Pass a signal to the ranks or launchers. Return the seconds that they have to end."""
        # Truthy if ranks can be reached: directly on this host, through their guards, or over ssh.
        reachable = self.receiver.connected > 0 or self.launch.hosts if self.receiver else self.watch.started()
        if number in _STOPS and reachable:
            self.stop_signal = signal.SIGUSR1 if number == signal.SIGUSR1 else signal.SIGTERM
            if self.receiver is not None:
                self.receiver.send_stop(self.stop_signal)
                if len(self.receiver.met) < len(self.launch.ranks):  # some guards are behind a firewall, or late
                    self._signal_by_ssh(signal.SIGTERM)
            warning = number == signal.SIGUSR1  # schedulers send it some time before SIGTERM: it sets no deadline
            return float("inf") if warning else self.job.spec.train.term_grace + _STOP_PATIENCE_S
        is_python = LAUNCHERS[self.launch.request.launcher].of_this_python
        if number == signal.SIGINT and is_python and not self.launch.remote:
            return self._interrupt_ranks()
        if self.launch.remote:  # DeepSpeed's launcher would react to a signal by ending all DeepSpeed jobs on all hosts
            _send(descendants(os.getpid()), signal.SIGKILL)
        for launcher in self.launchers:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(launcher.pid, signal.SIGINT if number == signal.SIGINT else signal.SIGTERM)
        return _PATIENCE_S

    def _interrupt_ranks(self) -> float:
        """Interrupt the ranks on this host, and stop launchers until they are killed after the ranks' end.

        As Python programs, they would print a traceback for an interrupt, and another one for a rank that ends by it.
        """
        self.stop_signal = signal.SIGINT
        ranks = {rank.pid for rank in self.watch.started()}
        _send({process.pid for process in self.launchers} - ranks, signal.SIGSTOP)
        return _PATIENCE_S

    def _signal_by_ssh(self, number: int) -> None:
        """Send a signal to all processes of the job over ssh, because missing guards cannot pass it on."""
        preflight.signal_job([host.name for host in self.launch.hosts], self.launch.facts.job_id, number)

    def _signal_local_ranks(self) -> None:
        """Send the stop signal once to each rank on this host, including ranks that start late."""
        if self.stop_signal and self.receiver is None:
            for pid, number in {(rank.pid, self.stop_signal) for rank in self.watch.started()} - self.signalled:
                self.signalled.add((pid, number))
                _send([pid], number)

    def _end_all(self) -> None:
        """End all processes that the launchers have left, on this host and on other hosts, in the end by SIGKILL."""
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
        """Return the message to print, and the exit status."""
        code = next((launcher.returncode for launcher in self.launchers if launcher.returncode), 0)
        number, when = signal_of(code), _last_step(Path(self.job.output_dir), self.start_s)
        before_s = self.received[0].time_s if self.received else float("inf")
        stopped, failure = self.watch.stopped(), self.watch.first_failure(number, before_s)
        if stopped is not None and failure is None:
            self.level = "INFO" if stopped.overdue else None
            return self._describe_stop(stopped), stopped.status
        if failure is None and (result := self.watch.result()) is not None and not self.received:
            return "", result.status  # the ranks have printed the result
        if failure is not None:
            self.level = "ERROR"
            return f"dslpar launch: {failure.describe(when)}", 128 + failure.signal if failure.signal else 1
        if self.received:
            self.level = "INFO"
            number = self.received[0].number
            by, hint = signal.Signals(number).name, resume_hint(self.job)
            return f"dslpar launch: stopped by {by}{when}{hint}; no process is left\n", 128 + number
        if code:
            how = f"was ended by {signal.Signals(number).name}" if number else f"ended with status {code}"
            if self.launch.remote and code == ssh.FAILED:
                how += ", which is ssh's own status if a connection was lost, or never made"
            message = f"dslpar launch: the launcher {how}{when}; its messages and those of the ranks are above\n"
            return message, 128 + number if number else code
        # Nothing is known of ranks on other hosts if no guard has connected.
        unknown = self.launch.remote and not self.watch.started()
        if not (self.watch.all_ended(self.launch.ranks) or unknown):
            return f"dslpar launch: the launcher ended with status 0, but not every rank had ended{when}\n", 1
        return "", 0

    def _describe_stop(self, stopped: Stopped) -> str:
        by = f" by {signal.Signals(self.received[0].number).name}" if self.received else ""
        saved = "no step was done, nothing to save"
        if stopped.saved:
            saved = f"checkpoint saved in {visible(stopped.saved)}"
        if stopped.overdue:
            saved = f"a rank did not stop in time, and was ended{resume_hint(self.job)}"
        elif not stopped.saved and self.job.spec.train.save_interval == 0:
            saved = "nothing is saved, with train.save_interval=0"
        after = f" after step {stopped.step}" if stopped.step and not stopped.overdue else ""
        return f"dslpar launch: stopped{by}{after}: {saved}; to be requeued with --resume (status {stopped.status})\n"


def _receiver(launch: Launch, job: Job, folder: Path) -> Receiver:
    """Open the server for guards on other hosts, at this host's addresses towards them.

    The job's secret is written to the output folder, which all hosts share. If all hosts are this machine, the server
    listens at the loopback address, and the secret is written to `folder`.

    Raises:
        DslparError: the output folder is not writable.
    """
    if launch.hosts and all(host.name in launch.facts.local_hosts for host in launch.hosts):
        return Receiver(folder, launch.ranks, (LOCALHOST,), folder / "secret", loopback=True)
    addresses: dict[str, None] = {}
    for name in [host.address for host in launch.hosts] or [socket.gethostname()]:
        with contextlib.suppress(OSError):  # a host whose name is unknown here: the others are enough
            addresses[network.source_towards(name)] = None
    # Loopback addresses come last: guards try the addresses one by one, and each try may take seconds.
    ordered = sorted(addresses, key=lambda address: address.startswith("127."))
    try:
        Path(job.output_dir).mkdir(parents=True, exist_ok=True)
        return Receiver(folder, launch.ranks, ordered, Path(job.output_dir, f".secret_{launch.facts.job_id}"))
    except OSError as error:
        raise DslparError([host_findings.output_not_writable(job.output_dir, str(error))]) from None


def _living() -> list[int]:
    """Return this process's living descendants; collect the exit statuses of children that have ended."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    return descendants(os.getpid())


def _send(pids: Iterable[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def signal_of(code: int) -> int | None:
    """Return the signal in an exit status: mpirun's 128 + n, DeepSpeed's 256 - n, or -n if it ended the launcher.

    255 yields None, although it is also DeepSpeed's status for SIGHUP: ssh itself exits with 255 if a connection fails,
    and C programs that exit with -1 do so too.

    >>> signal_of(137), signal_of(247), signal_of(-9), signal_of(1), signal_of(255)
    (9, 9, 9, None, None)
    """
    if code == ssh.FAILED:
        return None
    if code < 0:
        number = -code
    elif code > 192:
        number = 256 - code
    else:
        number = code - 128
    return number if number in set(signal.Signals) else None


def _last_step(output_dir: Path, start_s: float) -> str:
    """Return ", after step N" with the last step in rank 0's metrics file; empty if this run has not written it."""
    metrics = output_dir / run_dir.METRICS
    if not metrics.exists() or metrics.stat().st_mtime < start_s:
        return ""
    text = metrics.read_text(encoding="utf-8", errors="replace")
    lines = text.rpartition("\n")[0].splitlines()  # without an incomplete last line, which a full disk leaves
    with contextlib.suppress(ValueError, KeyError, TypeError):  # a line that a broken file system has corrupted
        return visible(f", after step {json.loads(lines[-1])['step']}") if lines else ", in the first step"
    return ""
