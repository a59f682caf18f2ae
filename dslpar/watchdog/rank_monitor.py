"""Rank monitor: how a rank ends, and what it leaves to tell who was first.

A rank (`monitor_rank`, called by `bootstrap`) ends at once at an exception that nobody catches. When the launcher that
started it is gone it ends too: in order, with a checkpoint, where it handles SIGTERM so. It tells causes from
consequences (reports.py): a rank that fails because a peer is gone says nothing while it is ended, so that the first
rank's traceback stays in sight. Beside it runs its guard (guard.py), for all that a rank cannot do or say when it hangs
or is killed.

Each rank leaves its marks (marks.py) in a folder: the one that DSLPAR_REPORTS names (`dslpar launch` sets it, for a job
on its own host), or one of its own, from which its guard takes them to where DSLPAR_REPORTS says:
tcp://addresses:port/token. torchrun's TORCHELASTIC_ERROR_FILE is written too, by causes alone, in its JSON format.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import json
import os
import secrets
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

from dslpar.watchdog import guard, marks, reports
from dslpar.watchdog.marks import Kind, Rank, Report, Stopped
from dslpar.watchdog.processes import launchers_above, parent
from dslpar.watchdog.rank_process import STACKS, STOPS, Settings
from dslpar.watchdog.status_page import Ending, StatusPage, join_location

REPORTS = "DSLPAR_REPORTS"
TCP = "tcp://"

_PATIENCE_S = 5.0
"""How long a rank that lost a peer waits to be ended. Launchers look once a second, at the longest."""
_STOPPING_PATIENCE_S = 3.0
"""The same after SIGTERM, which may be torchrun's answer to the rank that was first: its guard's word is on its way."""
_JOB_FAILED_PATIENCE_S = 1.0
"""How long a rank stays that is to end for another's failure: the launcher sees the first one's status first."""
_POLL_S = 0.2
_LAUNCHER_CHECK_S = 1.0
_GUARD_S = 30.0
"""How long a guard may take to start, on a machine that is busy."""


class RankMonitor:
    """How this rank is to end. A class, since it holds state: the rank's marks, its status page, whether to stop.

    `loopback`: whether ranks meet at a loopback address.
    """

    def __init__(self, who: Rank, environ: Mapping[str, str], *, loopback: bool = True) -> None:
        destination = environ.get(REPORTS, "")
        remote = destination.startswith(TCP)
        self.who = who
        self.shares_folder = not remote and bool(destination) and Path(destination).is_dir()
        self.folder = Path(destination) if self.shares_folder else Path(tempfile.mkdtemp(prefix="dslpar_rank_"))
        self.page = StatusPage(self.path("board"), make=True)
        self.token = secrets.token_hex(16)
        self.stop_requested = False
        """Whether this rank was told to stop."""
        self._elastic = environ.get("TORCHELASTIC_ERROR_FILE")
        self._launch = destination.removeprefix(TCP).replace("/", ":") if remote else ""
        self._register()
        self._signals = self._start_guard(environ, loopback)

    @property
    def location(self) -> str:
        """rank 2 of 4 on host1, stage 1 (pipe 1, data 0, tensor 0), step 12: where this rank is."""
        return join_location(self.who, self.page.progress().describe())

    def path(self, name: str) -> Path:
        """Return the path of a mark of this rank."""
        return self.folder / f"{self.who.rank}.{name}"

    def mark(self, name: str, text: str = "") -> None:
        """Leave a mark. A folder that is gone is a launcher that is gone: nobody would read it."""
        with contextlib.suppress(OSError):
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

    def _start_guard(self, environ: Mapping[str, str], loopback: bool) -> int:
        """Start the guard; return where to write the numbers of signals for it."""
        read_end, write_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        supervised = self.shares_folder or bool(self._launch)
        where = (str(self.folder), not self.shares_folder, self._launch)
        settings = Settings(*self.who, *where, self.token, read_end, loopback, supervised)
        # Without site-packages: what they load at start (-S skips it) would delay and enlarge a process for each rank.
        code = f"import sys; sys.path.append({str(Path(__file__).parents[2])!r}); from dslpar.watchdog import guard; "
        code += "guard.main()"
        with _blocked(guard.IGNORED):  # what the guard ignores must not end it before it says so
            subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", code],
                env={**environ, guard.SETTINGS: json.dumps(settings._asdict())},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(read_end,),
            )
        os.close(read_end)
        return write_end

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
        signal.set_wakeup_fd(self._signals, warn_on_full_buffer=False)  # the guard knows at once, whatever we do

        def request_stop(number: int, frame: FrameType | None) -> None:
            self.stop_requested = True

        def restore_defaults() -> None:  # in a process that forks from this one: its signals are its own
            signal.set_wakeup_fd(-1)
            for number in STOPS:
                signal.signal(number, signal.SIG_DFL)

        for number in STOPS:
            signal.signal(number, request_stop)
        os.register_at_fork(after_in_child=restore_defaults)

    def mark_stopped(self, step: int, saved: str) -> int:
        """Leave the mark of a rank that ends because it was told to; return its exit status."""
        self.mark("stopped", json.dumps(Stopped(step, saved, self.page.status)))
        return self.page.status

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
                time.sleep(_STOPPING_PATIENCE_S if self.stop_requested else _PATIENCE_S)
        _write(report.message())
        os._exit(status)

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
            if time.monotonic() - checked_s > _LAUNCHER_CHECK_S:
                checked_s = time.monotonic()
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
            self.stop_requested = True
            with contextlib.suppress(OSError):
                os.write(self._signals, bytes([signal.SIGTERM]))
            _write(report.message())


def monitor_rank(who: Rank, environ: Mapping[str, str], *, loopback: bool = True) -> RankMonitor:
    """From now on, have an exception that nobody catches end the process at once, and with it the job."""
    monitor = RankMonitor(who, environ, loopback=loopback)

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> NoReturn:
        with contextlib.suppress(OSError):
            sys.stdout.flush()  # os._exit, by which this rank ends, flushes nothing
        report = reports.make_report(who, monitor.page.progress().describe(), error, trace)
        monitor.exit_with(report, 130 if report.kind == "interrupt" else 1)

    sys.excepthook = hook
    threading.Thread(target=monitor.watch, name="watch", daemon=True).start()
    return monitor


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
        os.write(2, text.encode())
