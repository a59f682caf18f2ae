"""Job watch: in `dslpar launch`, find the rank that failed first.

A *mark* is a file in which a rank or its guard writes how the rank ended (marks.py). A *guard* is the process beside
each rank that watches it (guard.py). `JobWatch` reads the marks, and watches the ranks' processes for ends without a
mark.

    watch = JobWatch(folder)                # the folder that DSLPAR_REPORTS names, or that a Receiver fills
    watch.poll()                            # often, while the launcher runs: whether a rank has failed
    failure = watch.first_failure(None)     # at the end: the first, or None

There are three kinds of failures. If failures of several kinds are known, the earliest one of the first kind counts:

1. A rank's own error, a guard's verdict on a rank, or the end of a process without a mark.
2. An abort (SIGABRT), or a SIGKILL after another rank's abort (`Failure.weak`). NCCL's watchdog aborts ranks that have
   lost a peer, and launchers kill the other ranks after an abort. So these may be consequences of another failure.
   `poll` reports them only after guards have had time to find a better cause.
3. A lost peer: a rank reports that it lost another rank. `poll` does not report these.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from textwrap import indent
from typing import NamedTuple

from dslpar.core.visible import visible, visible_lines
from dslpar.watchdog import marks, verdicts
from dslpar.watchdog.marks import Mark, Rank, Report, Result, Stopped, Verdict
from dslpar.watchdog.peers import HELD_BACK_S
from dslpar.watchdog.processes import stat
from dslpar.watchdog.rank_process import STOPS
from dslpar.watchdog.status_page import StatusPage, join_location

_TIE_S = 0.1
"""Ends of processes that are seen within this time cannot be ordered. `dslpar launch` looks every 0.05 s."""


class Failure(NamedTuple):
    """A rank that did not end in order."""

    who: Rank
    time_s: float
    how: str
    """How the rank failed: "failed first", "crashed first", "was the first to end, by SIGKILL", ..."""
    note: str = ""
    """An addition to `how`."""
    trace: str = ""
    """The traceback or stack; may be empty."""
    signal: int = 0
    """The signal that ended the rank, if known; otherwise 0."""
    at: str = ""
    """The rank's stage and step, as far as they are known."""
    weak: bool = False
    """Whether this may be the consequence of another failure: it is an abort, or it followed an abort."""

    def describe(self, when: str) -> str:
        """Describe the rank, its stage and step, and how it failed; then the traceback, if there is one.

        `when`: the job's progress, for a rank whose step is unknown.
        """
        note = f" ({self.note})" if self.note else ""
        who = f"{join_location(self.who, self.at)}, {self.how}" if self.at else f"{self.who} {self.how}{when}"
        # Indent the traceback, so that no line of an exception's text can look like a line of dslpar's report.
        trace = indent(visible_lines(self.trace.rstrip()), "  ")
        return visible(f"{who}{note}") + (f":\n{trace}\n" if trace else "\n")


class _End(NamedTuple):
    """The observed end of a process."""

    time_s: float
    status: int | None
    """The process's wait status; None if it could not be read any more."""
    after_abort: bool
    """Whether an abort of another rank was known before. Launchers kill the other ranks after an abort."""


class JobWatch:
    """Watches a job's marks, and the processes of its ranks, which show when a rank is gone without a mark.

    Marks stay known once they are read, because a cleaner of /tmp may delete the folder of a job that runs for weeks.
    Then the folder is made again for new marks. `local`: whether the ranks are processes of this host. Otherwise the
    ranks' guards report how they ended.
    """

    def __init__(self, folder: Path, *, local: bool = True) -> None:
        self.folder, self.local = folder, local
        self._marks: dict[str, Mark] = {}
        """Marks by file name."""
        self._passed_over: set[str] = set()
        """Names of files that are not valid marks."""
        self._gone: dict[int, _End] = {}
        """Ended processes by rank."""
        self._weak_since_s = 0.0
        """Time of the first weak failure that was seen, by this host's monotonic clock; 0: none."""

    def poll(self) -> bool:
        """Note which processes are gone. Return whether a rank has failed; a lost peer alone does not count as failure.

        A weak failure counts only HELD_BACK_S after it was seen, so that guards have time to find a better cause.
        """
        for who in self.started() if self.local else ():
            if who.rank not in self._gone and (status := _wait_status(who.pid)) is not None:
                self._gone[who.rank] = _End(time.time(), status if status >= 0 else None, bool(self._weak_since_s))
        self._read_marks()
        marked = any(name.endswith((".error", ".verdict")) for name in self._marks)
        causes = self._causes(None) if marked or self._gone else []
        if not self._weak_since_s and any(failure.weak for failure in causes):
            self._weak_since_s = time.monotonic()
        return any(not failure.weak or not self.held_back_s() for failure in causes)

    def held_back_s(self) -> float:
        """Return for how long a weak failure that was seen does not count yet; 0 if none was seen."""
        since_s = time.monotonic() - self._weak_since_s
        return max(0.0, HELD_BACK_S - since_s) if self._weak_since_s else 0.0

    def started(self) -> list[Rank]:
        """Return the ranks that have written their mark `born`."""
        self._read_marks()
        return [mark for _, mark in sorted(self._marks.items()) if isinstance(mark, Rank)]

    def all_gone(self) -> bool:
        """Return whether the processes of all ranks that have started are gone."""
        return all(who.rank in self._gone for who in self.started())

    def all_ended(self, ranks: range) -> bool:
        """Return whether all ranks in `ranks` ended in order."""
        self._read_marks()
        return all(f"{rank}.ended" in self._marks for rank in ranks)

    def stopped(self) -> Stopped | None:
        """Return the most informative mark of the ranks that stopped on request; None if no rank stopped on request.

        A mark with a checkpoint is preferred, then one of a rank that stopped in time, then the latest step.
        """
        self._read_marks()
        ends = [mark for mark in self._marks.values() if isinstance(mark, Stopped)]
        return max(ends, key=lambda end: (end.saved != "", not end.overdue, end.step), default=None)

    def result(self) -> Result | None:
        """Return the nonzero result of a rank that ended in order; None if there is no such mark."""
        self._read_marks()
        return next((mark for mark in self._marks.values() if isinstance(mark, Result)), None)

    def first_failure(self, launcher_signal: int | None, before_s: float = float("inf")) -> Failure | None:
        """Return the first failure; None if no rank failed.

        Which one counts is in the module's docstring.

        `launcher_signal`: the signal in the launcher's exit status, for a rank whose own status is unknown. `before_s`:
        the time, since the epoch, of a signal to end the job. Later failures are consequences of that signal, and are
        left out.
        """
        self._read_marks()
        failures = self._causes(launcher_signal) or self._consequences()
        failures = [failure for failure in failures if failure.time_s < before_s]
        first = min(failures, key=lambda failure: (failure.weak, failure.time_s), default=None)
        if first is None:
            return None
        if not first.weak:
            aborts = [failure for failure in failures if failure.weak and failure.time_s < first.time_s]
            if not aborts:
                return _without_order(first, failures)
            earlier = min(aborts, key=lambda failure: failure.time_s)
            note = f"{earlier.who} had aborted {first.time_s - earlier.time_s:.1f} s before"
            return first._replace(note=f"{first.note}; {note}" if first.note else note)
        held_s = time.monotonic() - self._weak_since_s if self._weak_since_s else 0.0
        return first._replace(note=verdicts.held_note(held_s))

    def _read_marks(self) -> None:
        """Read new marks. One listing of the folder per call, since a job may have 1,000 ranks."""
        try:
            names = os.listdir(self.folder)
        except FileNotFoundError:
            with contextlib.suppress(OSError):
                self.folder.mkdir(mode=0o700)
                _write(f"{self.folder} was deleted while the job runs, and is made again: exclude it from cleaners")
            return
        for name in sorted(set(names) - self._marks.keys() - self._passed_over):
            number, _, kind = name.partition(".")
            if not number.isdecimal() or kind not in marks.KINDS:
                continue
            mark = marks.parse(kind, marks.read(self.folder, name))
            if mark is not None and marks.rank_of(mark) in (int(number), None):
                self._marks[name] = mark
            else:
                self._passed_over.add(name)
                _write(f"{self.folder / name} is not a valid mark of a rank, and is ignored")

    def _causes(self, launcher_signal: int | None) -> list[Failure]:
        found = [mark for mark in self._marks.values() if isinstance(mark, Verdict)]
        judged = {verdict.who.rank for verdict in found}
        failures = [Failure(v.who, v.time_s, v.how, "", v.text, v.signal, v.at, v.weak) for v in found]
        ranks = [mark for mark in self._marks.values() if isinstance(mark, Rank)]
        others = [who for who in ranks if who.rank not in judged or self._report(who)]
        return failures + [failure for who in others for failure in self._cause_of(who, launcher_signal)]

    def _cause_of(self, who: Rank, launcher_signal: int | None) -> Iterator[Failure]:
        report, fatal_stack = self._report(who), marks.read(self.folder, f"{who.rank}.stack")
        if report is not None:
            if report.kind == "cause":
                yield Failure(who, report.time_s, "failed first", trace=report.text, at=report.at)
        elif who.rank in self._gone:
            end = self._gone[who.rank]
            page = self.folder / f"{who.rank}.board"
            at = StatusPage(page).progress().describe() if page.exists() else ""
            in_order = bool({f"{who.rank}.ended", f"{who.rank}.stopped"} & self._marks.keys())
            others_may_be_cause = who.world_size > 1 and not in_order
            if others_may_be_cause and verdicts.is_abort(end.status, fatal_stack):
                how = verdicts.describe_abort(fatal_stack)
                yield Failure(who, end.time_s, how, trace=fatal_stack, signal=signal.SIGABRT, at=at, weak=True)
            elif verdicts.FATAL in fatal_stack:
                yield Failure(who, end.time_s, "crashed first", trace=fatal_stack, at=at)
            elif not fatal_stack and not in_order and end.status not in STOPS:  # STOPS: ended on purpose, from outside
                weak = others_may_be_cause and end.after_abort and verdicts.is_kill(end.status)
                yield _silent_failure(Failure(who, end.time_s, "ended", at=at, weak=weak), end.status, launcher_signal)

    def _consequences(self) -> list[Failure]:
        reports = [mark for mark in self._marks.values() if isinstance(mark, Report) and mark.kind == "consequence"]
        return [Failure(r.who, r.time_s, "lost a peer", trace=r.text, at=r.at) for r in reports]

    def _report(self, who: Rank) -> Report | None:
        report = self._marks.get(f"{who.rank}.error")
        return report if isinstance(report, Report) else None


def _without_order(first: Failure, failures: Sequence[Failure]) -> Failure:
    """Return the first failure; if others cannot be told from it by time, leave open which was first.

    Only ends without a traceback are meant: ranks that leave together are found gone at one look.
    """
    silent = [failure for failure in failures if not (failure.weak or failure.trace) and failure is not first]
    tied = [failure for failure in silent if failure.time_s - first.time_s < _TIE_S]
    if first.trace or not tied:
        return first
    count = f"{len(tied)} other rank{'s' if tied[1:] else ''} ended within {_TIE_S:g} s of it"
    note = f"{count}, and {verdicts.ORDER_UNKNOWN}"
    return first._replace(how=verdicts.without_order(first.how), note=f"{first.note}; {note}" if first.note else note)


def _wait_status(pid: int) -> int | None:
    """Return the wait status of a process that has ended; None if it runs. -1: its parent has already read the status.

    psutil knows the status only of child processes.
    """
    fields = stat(pid)
    if not fields or fields[0] == "X":
        return -1
    return int(fields[-1]) if fields[0] == "Z" else None


def _silent_failure(failure: Failure, status: int | None, launcher_signal: int | None) -> Failure:
    """Complete the failure of a rank that left no mark.

    Either a signal that nothing can catch ended the rank, or it exited without Python's exit hooks (os._exit).
    """
    number = (launcher_signal or 0) if status is None else status & 0x7F
    if status is not None and not number:
        how, note = f"left first, with status {status >> 8}", "by os._exit or C's exit: no traceback"
        return failure._replace(how=how, note=note)
    name = signal.Signals(number).name if number else "a signal that it could not catch"
    killed = "SIGKILL comes most often from the kernel's out-of-memory killer"
    note = killed if number in (0, signal.SIGKILL) else ""
    return failure._replace(how=f"was the first to end, by {name}", note=note, signal=number)


def _write(text: str) -> None:
    sys.stderr.write(visible(f"dslpar launch: {text}") + "\n")
