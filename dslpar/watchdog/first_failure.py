"""Who died first: reads the marks that ranks and their guards leave (faults.py), and looks at their processes.

watch = Watch(folder)        # the folder that DSLPAR_REPORTS names, or that a Receiver fills
watch.look()                 # often, while the launcher runs: whether a rank has died
death = watch.first(None)    # at the end: the first, or none
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from dslpar.watchdog.guard import FATAL
from dslpar.watchdog.processes import stat
from dslpar.watchdog.reports import Rank, Report, Stopped, Verdict
from dslpar.watchdog.status_page import StatusPage, join_location


class Death(NamedTuple):
    """A rank that did not end in order."""

    who: Rank
    time_s: float
    how: str
    """What happened: failed first, crashed first, was the first to end, by SIGKILL, ..."""
    note: str = ""
    trace: str = ""
    signal: int = 0
    """That ended it, if it is known."""
    at: str = ""
    """Its stage and step, as far as it had come."""

    def told(self, when: str) -> str:
        """Who, where in the run, how, then the traceback, if there is one. `when`: for who had come nowhere yet."""
        note = f" ({self.note})" if self.note else ""
        which = f"{join_location(self.who, self.at)}, {self.how}" if self.at else f"{self.who} {self.how}{when}"
        return f"{which}{note}" + (f":\n{self.trace.rstrip()}\n" if self.trace else "\n")


class Watch:
    """Looks at the marks of a job's ranks, and at their processes, which say when one is gone without a mark.

    `here`: whether the ranks are processes of this host; of others, their guards tell.
    """

    def __init__(self, folder: Path, *, here: bool = True) -> None:
        self.folder, self.here = folder, here
        self._gone: dict[int, tuple[float, int | None]] = {}

    def look(self) -> bool:
        """Notes what is gone; whether a rank has died, other than by losing a peer."""
        for who in self.born() if self.here else ():
            if who.rank not in self._gone and (status := _gone(who.pid)) is not None:
                self._gone[who.rank] = (time.time(), status if status >= 0 else None)
        message = any(
            name.endswith((".error", ".verdict")) for name in os.listdir(self.folder)
        )  # of 1,000 ranks, at once
        return (message or bool(self._gone)) and bool(self._first_hand(None))

    def born(self) -> list[Rank]:
        """The ranks that came to monitor."""
        return [Rank(*json.loads(path.read_text(encoding="utf-8"))) for path in self.folder.glob("*.born")]

    def all_ended(self, ranks: range) -> bool:
        """Whether every one of these ranks came to its end in order."""
        return all((self.folder / f"{rank}.ended").exists() for rank in ranks)

    def stopped(self) -> Stopped | None:
        """How ranks ended that were told to: the one that knows most; None if none was."""
        paths = sorted(self.folder.glob("*.stopped"))
        ends = [Stopped(*json.loads(path.read_text(encoding="utf-8"))) for path in paths]
        return max(ends, key=lambda one: (one.saved != "", not one.overdue, one.step), default=None)

    def first(self, launcher_signal: int | None) -> Death | None:
        """The death that was first, and none if nobody died. Consequences count where there is nothing else.

        `launcher_signal`: the signal that the launcher's own exit status tells of, for who was not seen to die of one.
        """
        return min(
            self._first_hand(launcher_signal) or self._consequences(), key=lambda death: death.time_s, default=None
        )

    def _first_hand(self, launcher_signal: int | None) -> list[Death]:
        verdicts = [Verdict(Rank(*who), *rest) for who, *rest in map(json.loads, self._texts("verdict"))]
        judged = {one.who.rank for one in verdicts}
        deaths = [Death(one.who, one.time_s, one.how, "", one.text, one.signal, one.at) for one in verdicts]
        born = [who for who in self.born() if who.rank not in judged or (self.folder / f"{who.rank}.error").exists()]
        return deaths + [death for who in born for death in self._death(who, launcher_signal)]

    def _death(self, who: Rank, launcher_signal: int | None) -> Iterator[Death]:
        report, stack = self._report(who), self._text(who, "stack")
        if report is not None:
            if report.kind == "cause":
                yield Death(who, report.time_s, "failed first", trace=report.text, at=report.at)
        elif who.rank in self._gone:
            time_s, status = self._gone[who.rank]
            ended = any((self.folder / f"{who.rank}.{name}").exists() for name in ("ended", "stopped"))
            if FATAL in stack:
                yield Death(who, time_s, "crashed first", trace=stack, at=self._at(who))
            elif not ended and not stack:
                yield _silent(Death(who, time_s, "ended", at=self._at(who)), status, launcher_signal)

    def _consequences(self) -> list[Death]:
        reports = [report for who in self.born() if (report := self._report(who)) and report.kind == "consequence"]
        return [Death(one.who, one.time_s, "lost a peer", trace=one.text, at=one.at) for one in reports]

    def _report(self, who: Rank) -> Report | None:
        text = self._text(who, "error")
        if not text:
            return None
        who_fields, *rest = json.loads(text)
        return Report(Rank(*who_fields), *rest)

    def _at(self, who: Rank) -> str:
        path = self.folder / f"{who.rank}.board"
        return StatusPage(path).progress().words() if path.exists() else ""

    def _text(self, who: Rank, name: str) -> str:
        path = self.folder / f"{who.rank}.{name}"
        return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""

    def _texts(self, name: str) -> list[str]:
        return [path.read_text(encoding="utf-8") for path in sorted(self.folder.glob(f"*.{name}"))]


def _gone(pid: int) -> int | None:
    """None: it lives. Else its wait status, or -1 where somebody has asked for that already."""
    fields = stat(pid)
    if not fields or fields[0] == "X":
        return -1
    return int(fields[-1]) if fields[0] == "Z" else None


def _silent(death: Death, status: int | None, launcher_signal: int | None) -> Death:
    """Of a rank that left no word: by a signal that nothing can catch, or by leaving without the interpreter."""
    number = (launcher_signal or 0) if status is None else status & 0x7F
    if status is not None and not number:
        return death._replace(
            how=f"left first, with status {status >> 8}", note="by os._exit or C's exit: no traceback"
        )
    name = signal.Signals(number).name if number else "a signal that it could not catch"
    note = (
        "" if number and number != signal.SIGKILL else "SIGKILL comes most often from the kernel's out-of-memory killer"
    )
    return death._replace(how=f"was the first to end, by {name}", note=note, signal=number)
