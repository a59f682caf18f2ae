"""How a rank dies, and what it leaves to say who was first.

A rank (`monitor_rank`, called by `bootstrap`) ends at once at an exception that nobody catches. When the launcher that
started it is gone it ends too: in order, with a checkpoint, where it has promised to stop so. It tells causes from
consequences (reports.py): a rank that fails because a peer is gone says nothing while it is ended, so that the
first rank's traceback stays in sight. Beside it runs its guard (guard.py), for all that a rank cannot do or say
when it hangs or is killed.

Each rank leaves its marks in a folder: the one that DSLPAR_REPORTS names (`dslpar launch` sets it, for a job on its own
host), or one of its own, from which its guard takes them to where DSLPAR_REPORTS says: tcp://addresses:port/token.

    3.born     JSON: rank, world_size, host, pid
    3.board    where the rank is (board.py)
    3.stack    what the C level of Python wrote at a deadly signal: empty after SIGKILL, which nothing can catch
    3.stacks   those of all threads, when its guard asks for them
    3.error    JSON of a Report
    3.verdict  JSON of a Verdict: what a guard found out about this rank
    3.stopped  JSON of Stopped: it ended since it was told to
    3.ended    the rank came to its end in order

deaths.py reads them. torchrun's TORCHELASTIC_ERROR_FILE is written too, by causes alone, in torchrun's own
JSON format.
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

from dslpar.watchdog import guard, reports
from dslpar.watchdog.processes import launchers_above, parent
from dslpar.watchdog.reports import Kind, Rank, Report, Stopped
from dslpar.watchdog.status_page import OVERDUE, TOLD, StatusPage, join_location

REPORTS = "DSLPAR_REPORTS"
TCP = "tcp://"

_PATIENCE_S = 5.0
"""How long a rank that lost a peer waits to be ended. Launchers look once a second, at the longest."""
_STOPPING_PATIENCE_S = 3.0
"""The same after SIGTERM, which may be torchrun's answer to the rank that was first: its guard's word is on its way."""
_TOLD_PATIENCE_S = 1.0
"""How long a rank that is told to end stays, so that the launcher sees the first one's status first."""
_LOOK_S = 0.2
_LAUNCHER_CHECK_S = 1.0
_GUARD_S = 30.0
"""How long a guard may take to start, on a machine that is busy."""


class RankMonitor:
    """What a rank knows of its own end; a class, since that is its state: its marks, its board, whether to stop.

    `loopback`: whether ranks meet at a loopback address.
    """

    def __init__(self, who: Rank, environ: Mapping[str, str], *, loopback: bool = True) -> None:
        asked = environ.get(REPORTS, "")
        self.who = who
        self.is_asked = not asked.startswith(TCP) and bool(asked) and Path(asked).is_dir()
        self.folder = Path(asked) if self.is_asked else Path(tempfile.mkdtemp(prefix="dslpar_rank_"))
        self.page = StatusPage(self.path("board"), make=True)
        self.token = secrets.token_hex(16)
        self.stop_requested = False
        """Whether this rank was told to stop."""
        self._elastic = environ.get("TORCHELASTIC_ERROR_FILE")
        self._enrol()
        self._boss = asked.removeprefix(TCP).replace("/", ":") if asked.startswith(TCP) else ""
        self._signals = self._start_guard(environ, loopback)

    @property
    def location(self) -> str:
        """rank 2 of 4 on host1, stage 1 (pipe 1, data 0, tensor 0), step 12: where this rank is."""
        return join_location(self.who, self.page.progress().words())

    def path(self, name: str) -> Path:
        """Of a mark of this rank."""
        return self.folder / f"{self.who.rank}.{name}"

    def mark(self, name: str, text: str = "") -> None:
        """Leaves a mark, whole or not at all. A folder that is gone is a launcher that is gone: nobody reads it."""
        part = self.path(f"{name}.part")
        with contextlib.suppress(OSError):
            part.write_text(text, encoding="utf-8")
            part.replace(self.path(name))

    def _enrol(self) -> None:
        """The marks of a living rank; Python's C level writes stacks at signals, without waiting for Python's lock."""
        stack: TextIO = open(self.path("stack"), "w", encoding="utf-8")  # noqa: SIM115  # for as long as we live
        stacks: TextIO = open(self.path("stacks"), "w", encoding="utf-8")  # noqa: SIM115
        faulthandler.enable(stack)
        faulthandler.register(signal.SIGTERM, stack, all_threads=False, chain=True)  # chain: it ends us, as ever
        faulthandler.register(guard.STACKS, stacks, all_threads=True)
        self.mark("born", json.dumps(self.who))
        atexit.register(self.mark, "ended")

    def _start_guard(self, environ: Mapping[str, str], loopback: bool) -> int:
        """Starts it; where to write the numbers of signals for it."""
        theirs, ours = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        supervised = self.is_asked or bool(self._boss)
        settings = guard.Settings(
            *self.who, str(self.folder), not self.is_asked, self._boss, self.token, theirs, loopback, supervised
        )
        code = f"import sys; sys.path.append({str(Path(__file__).parents[2])!r}); from dslpar.watchdog import guard; "
        code += "guard.main()"
        with _blocked(guard.IGNORED):  # what the guard ignores must not end it before it says so
            subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", code],
                env={**environ, guard.SETTINGS: json.dumps(settings._asdict())},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(theirs,),
            )
        os.close(theirs)
        return ours

    def guard_port(self) -> int:
        """Where the guard of rank 0 listens; 0: it does not."""
        ends = time.monotonic() + _GUARD_S
        while not self.page.port and time.monotonic() < ends:
            time.sleep(0.01)
        return self.page.port

    # ---- told to stop ----

    def stop_on_signal(self, grace_s: float, status: int) -> None:
        """From now on SIGTERM and SIGUSR1 set `stop_requested`; what is not over `grace_s` after SIGTERM is ended.

        `status`: with which a rank that stopped leaves.
        """
        self.page.set_grace(grace_s, status)
        signal.set_wakeup_fd(self._signals, warn_on_full_buffer=False)  # the guard knows at once, whatever we do
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, self._stop)
        os.register_at_fork(after_in_child=_default_signals)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self.stop_requested = True

    def mark_stopped(self, step: int, saved: str) -> int:
        """Leaves the mark of a rank that ends since it was told to; the status to leave with."""
        self.mark("stopped", json.dumps(Stopped(step, saved, self.page.status)))
        return self.page.status

    def wait_for_rank_0(self, seconds: float) -> None:
        """Waits until rank 0 has left, as its guard tells ours; no longer than so."""
        ends = time.monotonic() + seconds
        while not self.page.first_left and time.monotonic() < ends:
            time.sleep(0.02)

    # ---- the end ----

    def exit_with(self, report: Report, status: int = 1) -> NoReturn:
        """At once: without atexit hooks and destructors, some of which wait for peers that wait for us."""
        if report.kind != "overdue":
            self.mark("error", json.dumps(report))
        if report.kind == "cause" and self._elastic:
            with contextlib.suppress(OSError):
                Path(self._elastic).write_text(reports.elastic(report), encoding="utf-8")
        if report.kind == "consequence":
            with contextlib.suppress(KeyboardInterrupt):
                time.sleep(_STOPPING_PATIENCE_S if self.stop_requested else _PATIENCE_S)
        # Not by sys.stderr: torch.distributed puts a buffer in its place while this runs, to print it afterwards.
        with contextlib.suppress(OSError):  # a launcher that is gone has closed the pipe
            os.write(2, report.spoken().encode())
        os._exit(status)

    def _brief(self, kind: Kind) -> Report:
        return Report(self.who, kind, time.time(), "", "", self.page.progress().words())

    def _obey(self, why: int) -> NoReturn:
        """What the guard wants."""
        if why == OVERDUE:
            if self.path("stopped").exists():  # it had stopped in order, and was slow to leave
                os._exit(self.page.status)
            moment = self.page.progress()
            self.mark("stopped", json.dumps(Stopped(moment.step, "", self.page.status, overdue=True)))
            self.exit_with(self._brief("overdue"), self.page.status)
        if why == TOLD:
            time.sleep(_TOLD_PATIENCE_S)
        if self.path("error").exists():  # it fails, and only waits to be ended
            os._exit(1)
        self.exit_with(self._brief("told"))

    def _watch(self) -> NoReturn:
        """Ends this rank when its guard says so, or when a launcher above it is gone: SIGKILL of `mpirun`, or SIGTERM
        to `deepspeed` alone, would leave ranks that train on with nobody to end them.
        """
        chain = launchers_above(os.getpid())
        checked_s = -_LAUNCHER_CHECK_S
        while not (why := self.page.ending):
            if time.monotonic() - checked_s > _LAUNCHER_CHECK_S:
                checked_s = time.monotonic()
                if not all(parent(pid) == above for pid, above in chain):
                    chain = []
                    self._launcher_is_gone()
            time.sleep(_LOOK_S)
        self._obey(why)

    def _launcher_is_gone(self) -> None:
        """As if told to stop, which a launcher most often was, and had not told us; at once where nothing was promised.

        The guard's clock starts as well.
        """
        report = self._brief("orphan")
        if not self.page.grace_s:
            self.exit_with(report)
        if not self.stop_requested:
            self.stop_requested = True
            with contextlib.suppress(OSError):
                os.write(self._signals, bytes([signal.SIGTERM]))
            with contextlib.suppress(OSError):
                os.write(2, report.spoken().encode())


def monitor_rank(who: Rank, environ: Mapping[str, str], *, loopback: bool = True) -> RankMonitor:
    """From now on an exception that nobody catches ends the process at once, and with it the job."""
    monitor = RankMonitor(who, environ, loopback=loopback)

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> NoReturn:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        report = reports.report(who, monitor.page.progress().words(), error, trace)
        monitor.exit_with(report, 130 if report.kind == "interrupt" else 1)

    sys.excepthook = hook
    threading.Thread(target=monitor._watch, name="watch", daemon=True).start()
    return monitor


@contextlib.contextmanager
def _blocked(numbers: Iterable[int]) -> Iterator[None]:
    """No such signal for this thread, nor for a process that it starts, until later."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _default_signals() -> None:
    """In a process that forks from a rank: its signals are its own."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)
