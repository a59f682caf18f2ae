"""Who died first: reads the marks that ranks leave (dslpar/faults.py), and looks at their processes.

watch = Watch(folder)        # the folder that DSLPAR_REPORTS names
watch.look()                 # often, while the launcher runs: whether a rank has died
death = watch.first(None)    # at the end: the first, or none
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from dslpar.faults import Rank, Report, stat


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

    def told(self, when: str) -> str:
        """Who, how and when, then the traceback, if there is one."""
        note = f" ({self.note})" if self.note else ""
        return f"{self.who} {self.how}{when}{note}" + (f":\n{self.trace.rstrip()}\n" if self.trace else "\n")


class Watch:
    """Looks at the marks of a job's ranks, and at their processes, which say when one is gone without a mark."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._gone: dict[int, tuple[float, int | None]] = {}

    def look(self) -> bool:
        """Notes what is gone; whether a rank has died, other than by losing a peer."""
        for who in self.born():
            if who.rank not in self._gone and (status := _gone(who.pid)) is not None:
                self._gone[who.rank] = (time.time(), status if status >= 0 else None)
        return any(True for _ in self._first_hand(None))

    def born(self) -> list[Rank]:
        """The ranks that came to life."""
        return [Rank(*json.loads(path.read_text(encoding="utf-8"))) for path in self.folder.glob("*.born")]

    def all_ended(self, world_size: int) -> bool:
        """Whether every rank of the world came to its end in order."""
        return all((self.folder / f"{rank}.ended").exists() for rank in range(world_size))

    def first(self, launcher_signal: int | None) -> Death | None:
        """The death that was first, and none if nobody died. Consequences count where there is nothing else.

        `launcher_signal`: the signal that the launcher's own exit status tells of, for who was not seen to die of one.
        """
        return min(
            self._first_hand(launcher_signal) or self._consequences(), key=lambda death: death.time_s, default=None
        )

    def _first_hand(self, launcher_signal: int | None) -> list[Death]:
        return [death for who in self.born() for death in self._death(who, launcher_signal)]

    def _death(self, who: Rank, launcher_signal: int | None) -> Iterator[Death]:
        report, stack = self._report(who), self._stack(who)
        if report is not None:
            if report.kind == "cause":
                yield Death(who, report.time_s, "failed first", trace=report.text)
        elif who.rank in self._gone:
            time_s, status = self._gone[who.rank]
            ended = (self.folder / f"{who.rank}.ended").exists()
            if "Fatal Python error" in stack:
                yield Death(who, time_s, "crashed first", trace=stack)
            elif not ended and not stack:
                yield _silent(Death(who, time_s, "ended"), status, launcher_signal)

    def _consequences(self) -> list[Death]:
        reports = [report for who in self.born() if (report := self._report(who)) and report.kind == "consequence"]
        return [Death(one.who, one.time_s, "lost a peer", trace=one.text) for one in reports]

    def _report(self, who: Rank) -> Report | None:
        path = self.folder / f"{who.rank}.error"
        if not path.exists():
            return None
        who_fields, *rest = json.loads(path.read_text(encoding="utf-8"))
        return Report(Rank(*who_fields), *rest)

    def _stack(self, who: Rank) -> str:
        path = self.folder / f"{who.rank}.stack"
        return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""


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
