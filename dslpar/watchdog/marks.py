"""Marks: the files that a rank and its guard leave in a folder, by which `dslpar launch` learns how each rank ended.

    3.born     JSON of Rank: rank, world_size, host, pid
    3.board    where the rank is in its run (status_page.py)
    3.stack    what the C level of Python wrote at a deadly signal: empty after SIGKILL, which nothing can catch
    3.stacks   the stacks of all threads, written when its guard asks for them
    3.flight   the rank's flight record (flight_recorder.py), written when its guard asks for it
    3.error    JSON of Report
    3.verdict  JSON of Verdict: what a guard found out about this rank
    3.stopped  JSON of Stopped: it ended because it was told to
    3.result   JSON of Result: it did all that it was to do, and what it found is told by its exit status
    3.ended    the rank came to its end in order

It imports the standard library alone: guards load it, and start in milliseconds.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from dslpar.core.visible import visible
from dslpar.watchdog.status_page import TOO_LATE, join_location, rank_name

Kind = Literal["cause", "consequence", "interrupt", "orphan", "told", "overdue"]
_MAX_NUMBER = 1 << 62


class Rank(NamedTuple):
    """A rank, and where it runs."""

    rank: int
    world_size: int
    host: str
    pid: int

    def __str__(self) -> str:
        return rank_name(self.rank, self.world_size, self.host)


class Report(NamedTuple):
    """What a rank that failed says about it."""

    who: Rank
    kind: Kind
    time_s: float
    """Since the epoch."""
    error: str
    """The exception, in one line."""
    text: str
    """Its traceback, and what helps where that is known."""
    at: str = ""
    """Its stage and step."""

    def message(self) -> str:
        """What goes to the terminal: a cause in full, anything else in one line; nothing, where others say it."""
        location = f"[{join_location(self.who, self.at)}]"
        if self.kind == "cause":
            return f"{location} {self.text}"
        messages = {
            "consequence": f"ends because a peer is gone ({visible(self.error)})",
            "interrupt": "interrupted",
            "orphan": "ends because its launcher is gone",
            "overdue": TOO_LATE,
        }
        return f"{location} {messages[self.kind]}\n" if self.kind in messages else ""


class Verdict(NamedTuple):
    """What a guard found out about a rank that could not say it: killed, hanging, or gone with its host."""

    who: Rank
    time_s: float
    how: str
    text: str
    at: str
    """Its stage and step, as far as they are known."""
    signal: int = 0
    """That ended it, if it is known."""
    weak: bool = False
    """Whether this may be the consequence of what is told later, as an abort may: another cause goes first."""

    def message(self, note: str = "") -> str:
        """What goes to the terminal. `note`: what is added to how it ended."""
        how = visible(f"[{join_location(self.who, self.at)}] {self.how}" + (f" ({note})" if note else ""))
        return how + (f":\n{self.text}\n" if self.text else "\n")


class Stopped(NamedTuple):
    """How a rank ended that was told to."""

    step: int
    """The last one that was done."""
    saved: str
    """The checkpoint that holds it; empty: there is none."""
    status: int
    """Its exit status."""
    overdue: bool = False
    """Whether it had to be ended."""


class Result(NamedTuple):
    """What a rank that came to its end in order found, where that is no success: no rank has failed."""

    status: int
    """Its exit status, which launchers may not pass on."""


class Ended(NamedTuple):
    """That a rank came to its end in order; no more is said of it."""


Mark = Rank | Report | Verdict | Stopped | Result | Ended


def parse(kind: str, text: str) -> Mark | None:
    """Return what a mark says, whatever its text holds; None: it is no mark of that kind."""
    if kind == "ended":
        return Ended()
    try:
        return _PARSERS[kind](json.loads(text))
    except (KeyError, ValueError, RecursionError, MemoryError):
        return None


def rank_of(mark: Mark) -> int | None:
    """Return the rank that a mark is about; None: it does not say."""
    if isinstance(mark, Rank):
        return mark.rank
    return mark.who.rank if isinstance(mark, Report | Verdict) else None


def _rank(fields: object) -> Rank:
    rank, world_size, host, pid = _typed(fields, int, int, str, int)
    return Rank(rank, world_size, host, pid)


def _report(fields: object) -> Report:
    who, kind, time_s, error, text, at = _typed(fields, list, str, float, str, str, str)
    if kind not in get_args(Kind):
        raise ValueError(kind)
    return Report(_rank(who), kind, time_s, error, text, at)


def _verdict(fields: object) -> Verdict:
    who, time_s, how, text, at, number, weak = _typed(fields, list, float, str, str, str, int, bool)
    if number and number not in set(signal.Signals):
        raise ValueError(number)
    return Verdict(_rank(who), time_s, how, text, at, number, weak)


def _stopped(fields: object) -> Stopped:
    step, saved, status, overdue = _typed(fields, int, str, int, bool)
    return Stopped(step, saved, status % 256, overdue)


def _result(fields: object) -> Result:
    (status,) = _typed(fields, int)
    return Result(status % 256)


def _typed(fields: object, *types: type) -> list[Any]:
    """Return a list's items, if they are of these types: numbers finite and not below 0.

    Raises:
        ValueError: they are not, or there are more or fewer.
    """
    if not isinstance(fields, list) or len(fields) != len(types):
        raise ValueError(fields)
    for item, wanted in zip(fields, types, strict=True):
        number = wanted in (int, float)
        right = type(item) is wanted or (wanted is float and type(item) is int)
        if not right or (number and not 0 <= item < _MAX_NUMBER):
            raise ValueError(item)
    return fields


_PARSERS: Mapping[str, Callable[[object], Mark]] = {
    "born": _rank,
    "error": _report,
    "verdict": _verdict,
    "stopped": _stopped,
    "result": _result,
}

KINDS = (*_PARSERS, "ended")
"""The marks that are read: their names' endings."""


def write(folder: Path, name: str, text: str) -> None:
    """Write a mark atomically: a reader sees all of it or none.

    Raises:
        OSError: the folder is gone, say.
    """
    part = folder / f"{name}.part"
    part.write_text(text, encoding="utf-8")
    part.replace(folder / name)


def lock_folder(folder: Path) -> int:
    """Lock a folder, which systemd's cleaner of /tmp then spares; until the descriptor that is returned is closed."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    with contextlib.suppress(OSError):  # a file system without locks
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    return descriptor


def read(folder: Path, name: str) -> str:
    """Return a mark's text; empty where there is none."""
    path = folder / name
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
