"""Rank monitor: in each rank, end the process if it fails or is orphaned, and write marks that show how it ended.

`bootstrap` calls `monitor_rank`. From then on an uncaught exception ends the rank at once. The rank also ends when its
launcher is gone: in order and with a checkpoint if the rank handles SIGTERM that way, otherwise at once.
failure_reports.py separates causes from consequences. A rank that fails because a peer is gone prints nothing while it
waits to be ended, so that the traceback of the rank that failed first stays visible. The rank's guard (guard.py) does
what a rank cannot do when it hangs or is killed. If the guard is killed, the rank starts another one.

Each rank writes its marks (small files, marks.py) to a folder. For a job on one host, `dslpar launch` names a folder
for all ranks in DSLPAR_REPORTS. Otherwise each rank has a folder of its own, and its guard sends the marks to the
receiver in DSLPAR_REPORTS, if there is one (receiver.py). A failure that is a cause is also written to torchrun's
TORCHELASTIC_ERROR_FILE, in torchrun's JSON format.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import FrameType, TracebackType
from typing import NoReturn, TextIO

from dslpar.core.visible import visible_lines
from dslpar.watchdog import authentication, failure_reports, flight_recorder, guard, marks, receiver
from dslpar.watchdog.marks import Kind, Rank, Report, Result, Stopped
from dslpar.watchdog.peers import HELD_BACK_S
from dslpar.watchdog.processes import launchers_above, parent
from dslpar.watchdog.rank_process import STACKS, STOPS, Settings
from dslpar.watchdog.status_page import Ending, StatusPage, join_location

REPORTS = "DSLPAR_REPORTS"
"""The environment variable with the folder for marks, or with the receiver's address."""
_PATIENCE_S = 5.0
"""Time for which a rank that lost a peer waits to be ended. Launchers check at least once per second."""
_STOPPING_PATIENCE_S = 3.0
"""The same after SIGTERM. torchrun may have sent SIGTERM after the first failure, so the guard's order is under way."""
_ABORT_PATIENCE_S = HELD_BACK_S + 2.0
"""The same after a rank has aborted: guards wait HELD_BACK_S for a better cause before they end the job."""
_JOB_FAILED_PATIENCE_S = 1.0
"""Delay of a rank that ends because another one has failed, so that the launcher sees the failed rank's status first.
"""
_POLL_S = 0.2
_LAUNCHER_CHECK_S = 1.0
_GUARD_S = 30.0
"""Time for a guard to start on a busy machine."""
_MAX_GUARDS = 4
"""The most guards that a rank starts, one after the other."""


class RankMonitor:
    """Controls this rank's end: its guard, its marks, its status page, and whether it was requested to stop.

    `environ`: the environment, of which DSLPAR_REPORTS and TORCHELASTIC_ERROR_FILE are read. `loopback`: whether ranks
    connect at a loopback address.
    """

    def __init__(self, who: Rank, environ: Mapping[str, str], *, loopback: bool = True) -> None:
        destination = environ.get(REPORTS, "")
        remote = receiver.read_variable(destination)
        self.who = who
        self.shares_folder = remote is None and bool(destination) and Path(destination).is_dir()
        self.folder = Path(destination) if self.shares_folder else Path(tempfile.mkdtemp(prefix="dslpar_rank_"))
        marks.lock_folder(self.folder)  # as long as this process lives
        self.page = StatusPage(self.path("board"), make=True)
        self.stop_requested = False
        """Whether this rank was requested to stop, by SIGTERM, by SIGUSR1, or by the loss of its launcher."""
        self._elastic = environ.get("TORCHELASTIC_ERROR_FILE")
        launch, secret = remote or ("", "")
        self.shares_secret = bool(secret)
        """Whether `dslpar launch` has given the job's ranks a secret."""
        self.secret = secret or authentication.new_secret()
        """The job's secret, with which guards authenticate each other. Without `dslpar launch`, rank 0's counts."""
        self._register()
        self._signal_pipe = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        supervised = self.shares_folder or bool(launch)
        page = os.open(self.path("board"), os.O_RDWR | os.O_CLOEXEC)
        folder, private, signals = str(self.folder), not self.shares_folder, self._signal_pipe[0]
        self._settings = Settings(*who, folder, private, page, launch, self.secret, signals, loopback, supervised)
        self._environ = dict(environ)
        self._num_guards = 1
        self._guard: subprocess.Popen[bytes] | None = self._start_guard()

    @property
    def is_supervised(self) -> bool:
        """Return whether `dslpar launch` reports the job's end to the user."""
        return self._settings.supervised

    @property
    def location(self) -> str:
        """This rank's name and progress: rank 2 of 4 on host1, stage 1 (pipe 1, data 0, tensor 0), step 12."""
        return join_location(self.who, self.page.progress().describe())

    def path(self, name: str) -> Path:
        """Return the path of one of this rank's marks."""
        return self.folder / f"{self.who.rank}.{name}"

    def mark(self, name: str, text: str = "") -> None:
        """Write a mark. If the shared folder is gone, so is the launcher that would read the mark."""
        with contextlib.suppress(OSError):
            if not self.shares_folder:
                self.folder.mkdir(mode=0o700, exist_ok=True)
            marks.write(self.folder, f"{self.who.rank}.{name}", text)

    def _register(self) -> None:
        """Write the marks of a living rank, and make signals write stacks.

        Python's C level writes the stacks, and needs no lock for that.
        """
        stack: TextIO = open(self.path("stack"), "w", encoding="utf-8")  # noqa: SIM115  # open as long as this process
        stacks: TextIO = open(self.path("stacks"), "w", encoding="utf-8")  # noqa: SIM115
        faulthandler.enable(stack)
        # chain=True: after that, SIGTERM ends the process as usual.
        faulthandler.register(signal.SIGTERM, stack, all_threads=False, chain=True)
        faulthandler.register(STACKS, stacks, all_threads=True)
        self.mark("born", json.dumps(self.who))
        atexit.register(self.mark, "ended")

    def _start_guard(self) -> subprocess.Popen[bytes]:
        # Without site-packages (-S): their .pth files may import packages, which would slow and enlarge each guard.
        code = f"import sys; sys.path.append({str(Path(__file__).parents[2])!r}); from dslpar.watchdog import guard; "
        code += "guard.main()"
        with _blocked(guard.IGNORED):  # these signals must not end the guard before it has begun to ignore them
            return subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", code],
                env={**self._environ, guard.SETTINGS: json.dumps(self._settings._asdict())},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(self._settings.signals, self._settings.page),
            )

    def _replace_guard(self) -> None:
        """Start another guard if this rank's guard is gone. For example, the out-of-memory killer may kill it."""
        if self._guard is None or (status := self._guard.poll()) is None or self.page.ending:
            return
        how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"has ended with status {status}"
        self._num_guards += 1
        if self._num_guards <= _MAX_GUARDS:
            _write(f"[{self.location}] its guard {how}; another one is started\n")
            self._guard = self._start_guard()
        else:
            _write(f"[{self.location}] its guard {how}, as {_MAX_GUARDS - 1} before it; no other one is started\n")
            self._guard = None

    def guard_port(self) -> int:
        """Return the port at which this rank's guard listens; 0 if it does not start in time. For rank 0 only."""
        deadline = time.monotonic() + _GUARD_S
        while not self.page.port and time.monotonic() < deadline:
            time.sleep(0.01)
        return self.page.port

    # ---- requests to stop ----

    @property
    def stops_on_signal(self) -> bool:
        """Return whether `stop_on_signal` was called."""
        return bool(self.page.grace_s)

    @property
    def can_stop_on_signal(self) -> bool:
        """Return whether SIGTERM and SIGUSR1 may be handled here. A program's own handlers are kept."""
        in_main_thread = threading.current_thread() is threading.main_thread()
        free = all(signal.getsignal(number) is signal.SIG_DFL for number in STOPS)
        return self.stops_on_signal or (in_main_thread and free)

    def stop_on_signal(self, grace_s: float, status: int) -> None:
        """Make SIGTERM and SIGUSR1 set `stop_requested` from now on.

        `grace_s`: time to stop after SIGTERM; after that the guard ends the rank. `status`: the exit status of a rank
        that has stopped.
        """
        self.page.set_grace(grace_s, status)
        # Python's C level writes each signal to this pipe, so the guard sees it even if this process hangs.
        signal.set_wakeup_fd(self._signal_pipe[1], warn_on_full_buffer=False)

        def request_stop(number: int, frame: FrameType | None) -> None:
            self.stop_requested = True

        def restore_defaults() -> None:  # a forked process handles its own signals
            signal.set_wakeup_fd(-1)
            for number in STOPS:
                signal.signal(number, signal.SIG_DFL)

        for number in STOPS:
            signal.signal(number, request_stop)
        os.register_at_fork(after_in_child=restore_defaults)

    def enter_ending(self, limit_s: float) -> None:
        """Enter the phase `ending`, in which process groups are destroyed, monitors close, and threads are joined."""
        self.page.enter("ending", self.page.progress().step, limit_s)

    def mark_stopped(self, step: int, saved: str) -> int:
        """Write the mark of a rank that ends on request; return its exit status. `saved`: the checkpoint of `step`."""
        self.mark("stopped", json.dumps(Stopped(step, saved, self.page.status)))
        return self.page.status

    def mark_result(self, status: int) -> None:
        """Write the mark of a rank that ends in order with this exit status. Launchers may not pass the status on."""
        self.mark("result", json.dumps(Result(status)))

    def mark_failed(self, error: str, text: str) -> None:
        """Write the mark of a rank that has itself printed why it fails. The guards then end all ranks of the job."""
        report = Report(self.who, "cause", time.time(), error, text, self.page.progress().describe())
        self.mark("error", json.dumps(report))

    def wait_for_end(self) -> NoReturn:
        """Wait until the thread of `watch` ends this process, because the guard has ordered that."""
        while True:
            time.sleep(_POLL_S)

    def wait_for_rank_0(self, timeout_s: float) -> None:
        """Wait until rank 0 has left, at most `timeout_s`. Rank 0's guard reports it to this rank's guard."""
        deadline = time.monotonic() + timeout_s
        while not self.page.rank_0_left and time.monotonic() < deadline:
            time.sleep(0.02)

    # ---- the end ----

    def exit_with(self, report: Report, status: int = 1) -> NoReturn:
        """Write the report's mark, print the report, and exit.

        The exit skips atexit hooks and destructors, since some of them wait for peers, which wait for this rank. A rank
        that has lost a peer first waits for its guard to end it.
        """
        if report.kind != "overdue":
            self.mark("error", json.dumps(report))
        if report.kind == "cause" and self._elastic:
            with contextlib.suppress(OSError):
                Path(self._elastic).write_text(failure_reports.elastic(report), encoding="utf-8")
        if report.kind == "consequence":
            with contextlib.suppress(KeyboardInterrupt):
                self._wait_to_be_ended()
        _write(report.message())
        os._exit(status)

    def _wait_to_be_ended(self) -> None:
        """Wait, after the loss of a peer, until the thread of `watch` ends this process.

        Give up after the time that guards may take to report why the peer is gone.
        """
        began = time.monotonic()
        patience_s = _STOPPING_PATIENCE_S if self.stop_requested else _PATIENCE_S
        # Check `abort_seen` at each turn: the report of an abort may arrive a moment after the peer is lost.
        while time.monotonic() - began < (_ABORT_PATIENCE_S if self.page.abort_seen else patience_s):
            time.sleep(_POLL_S)

    def _report(self, kind: Kind) -> Report:
        return Report(self.who, kind, time.time(), "", "", self.page.progress().describe())

    def _end_as_told(self, reason: Ending) -> NoReturn:
        """End this process for the reason that the guard has written to the status page."""
        if reason is Ending.OVERDUE:
            if self.path("stopped").exists():  # the rank has stopped in order, but exits slowly
                os._exit(self.page.status)
            self.mark("stopped", json.dumps(Stopped(self.page.progress().step, "", self.page.status, overdue=True)))
            self.exit_with(self._report("overdue"), self.page.status)
        if reason is Ending.JOB_FAILED:
            time.sleep(_JOB_FAILED_PATIENCE_S)
        if self.path("error").exists():  # the rank has reported its failure, and waits to be ended
            os._exit(1)
        self.exit_with(self._report("told"))

    def watch(self) -> NoReturn:
        """End this rank when its guard orders that, or when a launcher above it is gone. Runs in a thread of its own.

        The thread also writes the flight record when the guard asks for it, and replaces a guard that is gone. Without
        it, ranks would train on after SIGKILL to `mpirun`, or after SIGTERM to only `deepspeed`.
        """
        ancestors = launchers_above(os.getpid())
        checked_s = -_LAUNCHER_CHECK_S
        while not (reason := self.page.ending):
            if self.page.flight_record_wanted:
                self.page.flight_record_wanted = False
                self.mark("flight", _flight_record())
            if time.monotonic() - checked_s > _LAUNCHER_CHECK_S:
                checked_s = time.monotonic()
                self._replace_guard()
                if not all(parent(pid) == above for pid, above in ancestors):
                    ancestors = []
                    self._end_orphan()
            time.sleep(_POLL_S)
        self._end_as_told(reason)

    def _end_orphan(self) -> None:
        """Stop this rank, whose launcher is gone, as if SIGTERM had come.

        Most often the launcher got SIGTERM and did not pass it on. The guard's grace period starts as well. A rank that
        does not handle SIGTERM exits at once.
        """
        report = self._report("orphan")
        if not self.page.grace_s:
            self.exit_with(report)
        if not self.stop_requested:
            _write(report.message())  # first, because setting `stop_requested` may end the process at once
            self.stop_requested = True
            with contextlib.suppress(OSError):
                os.write(self._signal_pipe[1], bytes([signal.SIGTERM]))


def monitor_rank(who: Rank, environ: Mapping[str, str], *, loopback: bool = True) -> RankMonitor:
    """Start this rank's monitor and guard. From now on an uncaught exception ends the process at once, and the job."""
    monitor = RankMonitor(who, environ, loopback=loopback)

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> NoReturn:
        with contextlib.suppress(OSError):
            sys.stdout.flush()  # this rank ends by os._exit, which flushes nothing
        report = failure_reports.make_report(who, monitor.page.progress().describe(), error, trace)
        monitor.exit_with(report, 130 if report.kind == "interrupt" else 1)

    sys.excepthook = hook
    # The new thread must not receive these signals: before Python knows the thread, faulthandler would write no stack.
    with _blocked(STOPS):
        threading.Thread(target=monitor.watch, name="watch", daemon=True).start()
    return monitor


def _flight_record() -> str:
    """Return the rank's flight record. An error in torch must not end this thread, which ends the rank."""
    try:
        return flight_recorder.record()
    except Exception as error:  # noqa: BLE001
        return f"{flight_recorder.HEADER} none, {error!r}\n\n"


@contextlib.contextmanager
def _blocked(numbers: Iterable[int]) -> Iterator[None]:
    """Block signals for this thread, and for a process that it starts."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _write(text: str) -> None:
    """Write to file descriptor 2: torch.distributed replaces sys.stderr by a buffer while an excepthook runs."""
    with contextlib.suppress(OSError):  # a launcher that is gone has closed the pipe
        os.write(2, visible_lines(text).encode())
