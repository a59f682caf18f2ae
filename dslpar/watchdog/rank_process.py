"""Rank process: a guard's view of its rank, with the process, status page, marks, deadlines and hangs.

The rank writes its progress to a status page in shared memory (status_page.py), and its start and end to files called
marks (marks.py).
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from dslpar.watchdog import marks
from dslpar.watchdog.marks import Rank
from dslpar.watchdog.processes import stat
from dslpar.watchdog.status_page import Ending, StatusPage

STACKS = signal.SIGRTMIN + 8
"""The signal that makes a rank write the stacks of all its threads (faulthandler)."""
STOPS = (signal.SIGTERM, signal.SIGUSR1)
"""Signals that make a rank save a checkpoint and exit, if it handles them."""
_NEVER = float("inf")
_KILL_S = 2.5
"""Time until a rank that was ordered to end is killed."""
_REPEAT_S = 2.0
"""A second SIGTERM that comes sooner does not count: for example, two nested launchers each send one."""
_STACKS_S = 1.0
"""Time for the rank to write its stacks and its flight record."""
_UNENDING = ("verifying", "building", "loading", "step", "evaluating", "saving")
"""Phases in which no rank exits, unless something is wrong."""


class Settings(NamedTuple):
    """Settings that a rank passes to its guard."""

    rank: int
    world_size: int
    host: str
    pid: int
    folder: str
    """The folder for the rank's marks."""
    private: bool
    """Whether the folder belongs to this rank alone, and is deleted with it."""
    page: int
    """File descriptor of the status page. It stays valid if a cleaner of /tmp deletes the folder."""
    launch: str
    """addresses:port of `dslpar launch`; empty if `dslpar launch` reads the folder itself, or does not run."""
    secret: str
    """The job's secret, which guards and `dslpar launch` use to authenticate each other."""
    signals: int
    """File descriptor of a pipe that gets one byte, the signal's number, per signal that the rank handles."""
    loopback: bool
    """Whether ranks connect at a loopback address, so that all of them are on this host."""
    supervised: bool
    """Whether `dslpar launch` reports to the user, so that the guard prints no verdict itself."""


class RankProcess:
    """One rank, as its guard sees it.

    Until `stop_deadline_s` the rank may stop in order after SIGTERM. After `kill_deadline_s` a rank that was ordered to
    end is killed.
    """

    def __init__(self, settings: Settings) -> None:
        self.who = Rank(settings.rank, settings.world_size, settings.host, settings.pid)
        self.folder = Path(settings.folder)
        self.page = StatusPage(settings.page)
        self.stop_deadline_s = self.kill_deadline_s = self._first_sigterm_s = _NEVER
        self._marks: set[str] = set()
        """Names of the marks that were read, or written in the rank's place."""
        self._overdue_entry = self._paused_entry = -1
        """Numbers of the phases (`num_entries`) in which the rank was seen overdue, and in which the machine paused."""
        self._paused_s = 0.0
        """Time for which this machine paused in the rank's current phase."""
        self._stuck = False
        """Whether `stuck` has reported the current phase."""

    # ---- the process ----

    def is_gone(self) -> bool:
        """Return whether the rank has ended, so that the guard (this process) is no longer the rank's child."""
        return os.getppid() != self.who.pid

    def send_signal(self, number: int) -> None:
        if not self.is_gone():
            os.kill(self.who.pid, number)

    def wait_status(self) -> int | None:
        """Return the wait status of a rank that has just ended; None if the rank runs or its parent took the status."""
        fields = stat(self.who.pid)
        return int(fields[-1]) if fields and fields[0] == "Z" else None

    def stacks(self) -> str:
        """Ask the rank for its flight record (flight_recorder.py) and the stacks of all its threads; return both.

        Python's C level writes the stacks, and a thread of the rank writes the flight record. A rank that holds
        Python's lock writes only stacks. A rank that is stopped or deep in the kernel writes nothing. Then the result
        is empty.
        """
        path, flight = (self.folder / f"{self.who.rank}.{name}" for name in ("stacks", "flight"))
        flight.unlink(missing_ok=True)
        self.page.flight_record_wanted = True
        self.send_signal(STACKS)
        deadline, size = time.monotonic() + _STACKS_S, -1
        while time.monotonic() < deadline:
            time.sleep(0.05)
            now = path.stat().st_size if path.exists() else 0
            if now == size > 0 and flight.exists():  # the file of stacks has stopped growing
                break
            size = now
        return self.read("flight") + self.read("stacks")  # the record first: the end of a long text is cut off

    # ---- its marks ----

    def read(self, name: str) -> str:
        """Return the text of one of the rank's marks; empty if the rank has not written that mark."""
        return marks.read(self.folder, f"{self.who.rank}.{name}")

    def new_marks(self) -> Iterator[tuple[str, str]]:
        """Yield the names and texts of marks that the rank has written since the last call."""
        for name in ("born", "error", "result", "ended", "stopped"):
            if not self.has_marked(name) and (self.folder / f"{self.who.rank}.{name}").exists():
                text = self.read(name)
                self._marks.add(name)
                yield name, text

    def has_marked(self, name: str) -> bool:
        """Return whether a mark was read by `new_marks`, or written by `leave_stopped`."""
        return name in self._marks

    def leave_stopped(self, text: str) -> None:
        """Write the mark `stopped` in the rank's place."""
        self._marks.add("stopped")
        with contextlib.suppress(OSError):
            marks.write(self.folder, f"{self.who.rank}.stopped", text)

    def ended_in_order(self) -> bool:
        """Return whether the rank ended in order, by itself or after a signal."""
        left = self.has_marked("ended") and self.page.progress().phase not in _UNENDING
        return left or self.has_marked("stopped")

    # ---- the clocks ----

    def end(self, reason: Ending, now: float) -> None:
        """Order the rank to end by itself, and set the deadline after which it is killed."""
        self.page.ending = reason
        self.kill_deadline_s = min(self.kill_deadline_s, now + _KILL_S)

    def start_grace(self, now: float) -> None:
        """Start the grace period at the first SIGTERM. A later SIGTERM ends the grace period at once.

        Two kinds of SIGTERM have no effect: one that comes within _REPEAT_S of the first, and one that an impatient
        launcher sends when the rank has already stopped in order and is exiting.
        """
        again = now - self._first_sigterm_s > _REPEAT_S and not self.ended_in_order()
        self._first_sigterm_s = min(self._first_sigterm_s, now)
        self.stop_deadline_s = min(self.stop_deadline_s, now if again else now + self.page.grace_s)

    def end_overdue(self, now: float) -> None:
        """End a rank that has not stopped in time."""
        self.stop_deadline_s = _NEVER
        self.end(Ending.OVERDUE, now)

    def kill(self, now: float) -> None:
        """Kill the rank, and set the time to kill it again if it still exists."""
        self.kill_deadline_s = now + _KILL_S
        self.send_signal(signal.SIGKILL)

    # ---- hangs ----

    def stuck(self, now: float) -> str:
        """Return a message if the rank has exceeded the time limit of its phase; otherwise an empty string.

        Each phase, such as a step, is reported once.
        """
        progress = self.page.progress()
        paused_s = self._paused_s if progress.num_entries == self._paused_entry else 0
        overdue = 0 < progress.limit_s < now - progress.since_s - paused_s
        # The rank must be seen overdue twice in the same phase: the page has no lock, and may change while it is read.
        seen_twice = progress.num_entries == self._overdue_entry
        tells = overdue and seen_twice and not self._stuck
        self._overdue_entry = progress.num_entries if overdue else -1
        self._stuck = overdue and (tells or self._stuck)
        return f"{progress.describe()} takes longer than {progress.limit_s:g} s" if tells else ""

    def forgive(self, paused_s: float) -> None:
        """Subtract a pause of this machine from the rank's time in its phase: the rank may have paused as well."""
        entry = self.page.progress().num_entries
        self._paused_s = paused_s + (self._paused_s if entry == self._paused_entry else 0)
        self._paused_entry = entry
