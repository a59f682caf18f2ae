"""Rank monitor: how a rank ends, and what it leaves to tell who was first.

A rank (`monitor_rank`, called by `bootstrap`) ends at once at an exception that nobody catches. When the launcher that
started it is gone it ends too: in order, with a checkpoint, where it handles SIGTERM so. It tells causes from
consequences (reports.py): a rank that fails because a peer is gone says nothing while it is ended, so that the first
rank's traceback stays in sight. Beside it runs its guard (guard.py), for all that a rank cannot do or say when it hangs
or is killed. Should the guard be killed, another one takes its place.

Each rank leaves its marks (marks.py) in a folder: the one that DSLPAR_REPORTS names (`dslpar launch` sets it, for a job
on its own host), or one of its own, from which its guard takes them to where DSLPAR_REPORTS says (receiver.py).
torchrun's TORCHELASTIC_ERROR_FILE is written too, by causes alone, in its JSON format.
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
from dslpar.watchdog import authentication, flight_recorder, guard, marks, receiver, reports
from dslpar.watchdog.marks import Kind, Rank, Report, Result, Stopped
from dslpar.watchdog.peers import HELD_BACK_S
from dslpar.watchdog.processes import launchers_above, parent
from dslpar.watchdog.rank_process import STACKS, STOPS, Settings
from dslpar.watchdog.status_page import Ending, StatusPage, join_location

REPORTS = "DSLPAR_REPORTS"

_PATIENCE_S = 5.0
"""How long a rank that lost a peer waits to be ended. Launchers look once a second, at the longest."""
_STOPPING_PATIENCE_S = 3.0
"""The same after SIGTERM, which may be torchrun's answer to the rank that was first: its guard's word is on its way."""
_ABORT_PATIENCE_S = HELD_BACK_S + 2.0
"""The same where a rank has aborted, which guards hold back."""
_JOB_FAILED_PATIENCE_S = 1.0
"""How long a rank stays that is to end for another's failure: the launcher sees the first one's status first."""
_POLL_S = 0.2
_LAUNCHER_CHECK_S = 1.0
_GUARD_S = 30.0
"""How long a guard may take to start, on a machine that is busy."""
_MAX_GUARDS = 4
"""How many guards a rank may have, one after the other."""


class RankMonitor:
    """How this rank is to end. A class, since it holds state: the rank's marks, its status page, whether to stop.

    `loopback`: whether ranks meet at a loopback address.
    """

    def __init__(self, who: Rank, environ: Mapping[str, str], *, loopback: bool = True) -> None:
        destination = environ.get(REPORTS, "")
        remote = receiver.read_variable(destination)
        self.who = who
        self.shares_folder = remote is None and bool(destination) and Path(destination).is_dir()
        self.folder = Path(destination) if self.shares_folder else Path(tempfile.mkdtemp(prefix="dslpar_rank_"))
        marks.lock_folder(self.folder)  # for as long as we live
        self.page = StatusPage(self.path("board"), make=True)
        self.stop_requested = False
        """Whether this rank was told to stop."""
        self._elastic = environ.get("TORCHELASTIC_ERROR_FILE")
        launch, secret = remote or ("", "")
        self.shares_secret = bool(secret)
        """Whether `dslpar launch` has given the job's ranks a secret."""
        self.secret = secret or authentication.new_secret()
        """By which guards know each other."""
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
    def location(self) -> str:
        """rank 2 of 4 on host1, stage 1 (pipe 1, data 0, tensor 0), step 12: where this rank is."""
        return join_location(self.who, self.page.progress().describe())

    def path(self, name: str) -> Path:
        """Return the path of a mark of this rank."""
        return self.folder / f"{self.who.rank}.{name}"

    def mark(self, name: str, text: str = "") -> None:
        """Leave a mark. A shared folder that is gone is a launcher that is gone: nobody would read it."""
        with contextlib.suppress(OSError):
            if not self.shares_folder:
                self.folder.mkdir(mode=0o700, exist_ok=True)
            marks.write(self.folder, f"{self.who.rank}.{name}", text)

    def _register(self) -> None:
        """Leave the marks of a living rank; Python's C level writes stacks at signals, without Python's lock."""
        stack: TextIO = open(self.path("stack"), "w", encoding="utf-8")  # noqa: SIM115  # for as long as we live
        stacks: TextIO = open(self.path("stacks"), "w", encoding="utf-8")  # noqa: SIM115
        faulthandler.enable(stack)
        faulthandler.register(signal.SIGTERM, stack, all_threads=False, chain=True)  # chain: it ends us, as ever
        faulthandler.register(STACKS, stacks, all_threads=True)
        self.mark("born", json.dumps(self.who))
        atexit.register(self.mark, "ended")

    def _start_guard(self) -> subprocess.Popen[bytes]:
        # Without site-packages: what they load at start (-S skips it) would delay and enlarge a process for each rank.
        code = f"import sys; sys.path.append({str(Path(__file__).parents[2])!r}); from dslpar.watchdog import guard; "
        code += "guard.main()"
        with _blocked(guard.IGNORED):  # what the guard ignores must not end it before it says so
            return subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", code],
                env={**self._environ, guard.SETTINGS: json.dumps(self._settings._asdict())},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(self._settings.signals, self._settings.page),
            )

    def _replace_guard(self) -> None:
        """Start another guard if this rank's is gone: the out-of-memory killer takes one as well as a rank."""
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
        """Return the port at which the guard of rank 0 listens; 0: it does not."""
        deadline = time.monotonic() + _GUARD_S
        while not self.page.port and time.monotonic() < deadline:
            time.sleep(0.01)
        return self.page.port

    # ---- told to stop ----

    @property
    def stops_on_signal(self) -> bool:
        """Whether `stop_on_signal` was called."""
        return bool(self.page.grace_s)

    @property
    def can_stop_on_signal(self) -> bool:
        """Whether SIGTERM and SIGUSR1 are nobody else's: a program's own handlers stay as they are."""
        in_main_thread = threading.current_thread() is threading.main_thread()
        free = all(signal.getsignal(number) is signal.SIG_DFL for number in STOPS)
        return self.stops_on_signal or (in_main_thread and free)

    def stop_on_signal(self, grace_s: float, status: int) -> None:
        """Have SIGTERM and SIGUSR1 set `stop_requested` from now on; `grace_s` after SIGTERM the rank is ended.

        `status`: the exit status of a rank that stopped.
        """
        self.page.set_grace(grace_s, status)
        signal.set_wakeup_fd(self._signal_pipe[1], warn_on_full_buffer=False)  # the guard knows at once, whatever we do

        def request_stop(number: int, frame: FrameType | None) -> None:
            self.stop_requested = True

        def restore_defaults() -> None:  # in a process that forks from this one: its signals are its own
            signal.set_wakeup_fd(-1)
            for number in STOPS:
                signal.signal(number, signal.SIG_DFL)

        for number in STOPS:
            signal.signal(number, request_stop)
        os.register_at_fork(after_in_child=restore_defaults)

    def enter_ending(self, limit_s: float) -> None:
        """Note that this rank leaves: process groups are destroyed, monitors close, threads are joined."""
        self.page.enter("ending", self.page.progress().step, limit_s)

    def mark_stopped(self, step: int, saved: str) -> int:
        """Leave the mark of a rank that ends because it was told to; return its exit status."""
        self.mark("stopped", json.dumps(Stopped(step, saved, self.page.status)))
        return self.page.status

    def mark_result(self, status: int) -> None:
        """Leave the mark of a rank that ends in order with this exit status: launchers may tell of another one."""
        self.mark("result", json.dumps(Result(status)))

    def mark_failed(self, error: str, text: str) -> None:
        """Leave the mark of a rank that has said why it fails: its guard then ends the others, and this one."""
        report = Report(self.who, "cause", time.time(), error, text, self.page.progress().describe())
        self.mark("error", json.dumps(report))

    def wait_for_end(self) -> NoReturn:
        """Wait for `watch` to end this process, as its guard has ordered."""
        while True:
            time.sleep(_POLL_S)

    def wait_for_rank_0(self, timeout_s: float) -> None:
        """Wait until rank 0 has left, as its guard tells ours; at most so long."""
        deadline = time.monotonic() + timeout_s
        while not self.page.rank_0_left and time.monotonic() < deadline:
            time.sleep(0.02)

    # ---- the end ----

    def exit_with(self, report: Report, status: int = 1) -> NoReturn:
        """Exit at once: without atexit hooks and destructors, some of which wait for peers that wait for us."""
        if report.kind != "overdue":
            self.mark("error", json.dumps(report))
        if report.kind == "cause" and self._elastic:
            with contextlib.suppress(OSError):
                Path(self._elastic).write_text(reports.elastic(report), encoding="utf-8")
        if report.kind == "consequence":
            with contextlib.suppress(KeyboardInterrupt):
                self._wait_to_be_ended()
        _write(report.message())
        os._exit(status)

    def _wait_to_be_ended(self) -> None:
        """Wait for `watch` to end this process, since a peer is lost: as long as guards may take to tell why."""
        began = time.monotonic()
        patience_s = _STOPPING_PATIENCE_S if self.stop_requested else _PATIENCE_S
        # An abort may be heard of a moment after the peer is lost.
        while time.monotonic() - began < (_ABORT_PATIENCE_S if self.page.abort_seen else patience_s):
            time.sleep(_POLL_S)

    def _report(self, kind: Kind) -> Report:
        return Report(self.who, kind, time.time(), "", "", self.page.progress().describe())

    def _end_as_told(self, reason: Ending) -> NoReturn:
        """End for the reason that the guard gives."""
        if reason is Ending.OVERDUE:
            if self.path("stopped").exists():  # it had stopped in order, and was slow to leave
                os._exit(self.page.status)
            self.mark("stopped", json.dumps(Stopped(self.page.progress().step, "", self.page.status, overdue=True)))
            self.exit_with(self._report("overdue"), self.page.status)
        if reason is Ending.JOB_FAILED:
            time.sleep(_JOB_FAILED_PATIENCE_S)
        if self.path("error").exists():  # it fails, and only waits to be ended
            os._exit(1)
        self.exit_with(self._report("told"))

    def watch(self) -> NoReturn:
        """End this rank when its guard says so, or when a launcher above it is gone: SIGKILL of `mpirun`, or SIGTERM to
        `deepspeed` alone, would leave ranks that train on with nobody to end them.
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
        """Stop as if told to, which the launcher most often was and did not pass on; at once where SIGTERM is not
        handled. The guard's clock starts as well.
        """
        report = self._report("orphan")
        if not self.page.grace_s:
            self.exit_with(report)
        if not self.stop_requested:
            _write(report.message())  # first: the main thread may stop, and with it the process, at once
            self.stop_requested = True
            with contextlib.suppress(OSError):
                os.write(self._signal_pipe[1], bytes([signal.SIGTERM]))


def monitor_rank(who: Rank, environ: Mapping[str, str], *, loopback: bool = True) -> RankMonitor:
    """From now on, have an exception that nobody catches end the process at once, and with it the job."""
    monitor = RankMonitor(who, environ, loopback=loopback)

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> NoReturn:
        with contextlib.suppress(OSError):
            sys.stdout.flush()  # os._exit, by which this rank ends, flushes nothing
        report = reports.make_report(who, monitor.page.progress().describe(), error, trace)
        monitor.exit_with(report, 130 if report.kind == "interrupt" else 1)

    sys.excepthook = hook
    with _blocked(STOPS):  # the main thread's: this one could take them before Python knows it, and write no stack
        threading.Thread(target=monitor.watch, name="watch", daemon=True).start()
    return monitor


def _flight_record() -> str:
    """Return the rank's flight record; what torch raises must not take the thread along that ends this rank."""
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
    """Not by sys.stderr: torch.distributed puts a buffer in its place while a hook runs, to print it afterwards."""
    with contextlib.suppress(OSError):  # a launcher that is gone has closed the pipe
        os.write(2, visible_lines(text).encode())
