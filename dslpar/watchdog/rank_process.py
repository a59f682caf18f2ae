"""The rank that a guard stands beside: its process, its status page, its marks, and the clocks that run against it."""

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
"""Makes a rank write down the stacks of all its threads (faulthandler)."""
STOPS = (signal.SIGTERM, signal.SIGUSR1)
_NEVER = float("inf")
_KILL_S = 2.5
"""After which a rank that was to end is killed."""
_REPEAT_S = 2.0
"""A second SIGTERM that comes sooner is the same one: a launcher's and its own launcher's."""
_STACKS_S = 1.0
_UNENDING = ("verifying", "building", "loading", "step", "evaluating", "saving")
"""Phases that no rank leaves by itself, unless something is wrong."""


class Settings(NamedTuple):
    """What a guard is told by its rank."""

    rank: int
    world_size: int
    host: str
    pid: int
    folder: str
    """Where the rank leaves its marks."""
    private: bool
    """Whether the folder is this rank's own, and goes with it."""
    page: int
    """File descriptor of the status page: it stays when the folder is deleted, as by a cleaner of /tmp."""
    launch: str
    """addresses:port of `dslpar launch`; empty: it reads the folder, or there is none."""
    secret: str
    """The job's, by which guards and `dslpar launch` know each other; of rank 0's guard, what the hub asks for."""
    signals: int
    """File descriptor that gets a byte at each signal that the rank handles."""
    loopback: bool
    """Whether ranks meet at a loopback address, so that all are on this host."""
    supervised: bool
    """Whether somebody else tells the user what happened."""


class RankProcess:
    """One rank, as its guard sees it, and the two clocks against it: until it is to end, and until it is killed."""

    def __init__(self, settings: Settings) -> None:
        self.who = Rank(settings.rank, settings.world_size, settings.host, settings.pid)
        self.folder = Path(settings.folder)
        self.page = StatusPage(settings.page)
        self.stop_deadline_s = self.kill_deadline_s = self._first_sigterm_s = _NEVER
        self._marks: set[str] = set()
        """The names of marks that were seen, or left for the rank."""
        self._overdue_entry = self._paused_entry = -1
        self._paused_s = 0.0
        """How long this machine paused while the rank was where it is now."""
        self._stuck = False

    # ---- the process ----

    def is_gone(self) -> bool:
        """Whether the guard is no longer its child."""
        return os.getppid() != self.who.pid

    def send_signal(self, number: int) -> None:
        if not self.is_gone():
            os.kill(self.who.pid, number)

    def wait_status(self) -> int | None:
        """Return its wait status when it has just ended, if nobody has taken it yet."""
        fields = stat(self.who.pid)
        return int(fields[-1]) if fields and fields[0] == "Z" else None

    def stacks(self) -> str:
        """Have Python's C level write the stacks of all its threads, and a thread of its own its flight record.

        Empty: it is stopped, or deep in the kernel. Of a rank that holds Python's lock there are stacks alone.
        """
        path, flight = (self.folder / f"{self.who.rank}.{name}" for name in ("stacks", "flight"))
        flight.unlink(missing_ok=True)
        self.page.flight_record_wanted = True
        self.send_signal(STACKS)
        deadline, size = time.monotonic() + _STACKS_S, -1
        while time.monotonic() < deadline:
            time.sleep(0.05)
            now = path.stat().st_size if path.exists() else 0
            if now == size > 0 and flight.exists():  # it grows no more
                break
            size = now
        return self.read("flight") + self.read("stacks")  # in this order: of long stacks the end is cut off

    # ---- its marks ----

    def read(self, name: str) -> str:
        """Return the text of one of its marks; empty where there is none."""
        return marks.read(self.folder, f"{self.who.rank}.{name}")

    def new_marks(self) -> Iterator[tuple[str, str]]:
        """Return the marks that it has left since the last call, with their texts."""
        for name in ("born", "error", "result", "ended", "stopped"):
            if not self.has_marked(name) and (self.folder / f"{self.who.rank}.{name}").exists():
                text = self.read(name)
                self._marks.add(name)
                yield name, text

    def has_marked(self, name: str) -> bool:
        """Whether a mark has been seen, or left for it."""
        return name in self._marks

    def leave_stopped(self, text: str) -> None:
        """Leave the mark `stopped` in its place."""
        self._marks.add("stopped")
        with contextlib.suppress(OSError):
            marks.write(self.folder, f"{self.who.rank}.stopped", text)

    def ended_in_order(self) -> bool:
        """Whether it came to its end by itself, well or after a signal."""
        left = self.has_marked("ended") and self.page.progress().phase not in _UNENDING
        return left or self.has_marked("stopped")

    # ---- the clocks ----

    def end(self, reason: Ending, now: float) -> None:
        """Have it end by its own hand if it can, else by SIGKILL, soon."""
        self.page.ending = reason
        self.kill_deadline_s = min(self.kill_deadline_s, now + _KILL_S)

    def start_grace(self, now: float) -> None:
        """Start the clock at the first SIGTERM; one that comes again, and not from the same hand, ends it.

        Not when the rank has stopped in order and only leaves: the second is then a launcher's haste.
        """
        again = now - self._first_sigterm_s > _REPEAT_S and not self.ended_in_order()
        self._first_sigterm_s = min(self._first_sigterm_s, now)
        self.stop_deadline_s = min(self.stop_deadline_s, now if again else now + self.page.grace_s)

    def end_overdue(self, now: float) -> None:
        """End it for not stopping in time."""
        self.stop_deadline_s = _NEVER
        self.end(Ending.OVERDUE, now)

    def kill(self, now: float) -> None:
        """Kill it, and again if it is still there some time later."""
        self.kill_deadline_s = now + _KILL_S
        self.send_signal(signal.SIGKILL)

    # ---- hangs ----

    def stuck(self, now: float) -> str:
        """Say that it stays in one place longer than it may, once for each place; else empty."""
        progress = self.page.progress()
        paused_s = self._paused_s if progress.num_entries == self._paused_entry else 0
        overdue = 0 < progress.limit_s < now - progress.since_s - paused_s
        # Twice, since the page is not locked: the rank might have moved on meanwhile.
        seen_twice = progress.num_entries == self._overdue_entry
        tells = overdue and seen_twice and not self._stuck
        self._overdue_entry = progress.num_entries if overdue else -1
        self._stuck = overdue and (tells or self._stuck)
        return f"{progress.describe()} takes longer than {progress.limit_s:g} s" if tells else ""

    def forgive(self, paused_s: float) -> None:
        """Take a pause of this machine off the time that the rank has been where it is: it may have paused as well."""
        entry = self.page.progress().num_entries
        self._paused_s = paused_s + (self._paused_s if entry == self._paused_entry else 0)
        self._paused_entry = entry
