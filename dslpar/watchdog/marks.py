"""Marks: files that a rank and its guard write to a folder, from which `dslpar launch` learns how each rank ended.

A mark's name is the rank's number and the kind of the mark. For rank 3:

    3.born     JSON of Rank: rank, world_size, host, pid
    3.board    the rank's status page: shared memory with its phase and step (status_page.py)
    3.stack    the stack that Python's C level wrote at a fatal signal: empty after SIGKILL, which nothing can catch
    3.stacks   the stacks of all threads, written when the guard asks for them
    3.flight   the rank's flight record (flight_recorder.py), written when the guard asks for it
    3.error    JSON of Report: the rank failed
    3.verdict  JSON of Verdict: a guard's finding about this rank
    3.stopped  JSON of Stopped: the rank ended on request
    3.result   JSON of Result: the rank completed its work, and its exit status has the result
    3.ended    the rank ended in order

Guards load this module and start in milliseconds, so it and its imports use only the standard library.
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
"""Kinds of reports: an error of the rank's own, a lost peer, KeyboardInterrupt, a lost launcher, an end that the guard
ordered, and a stop on request that took too long.
"""
_MAX_NUMBER = 1 << 62


class Rank(NamedTuple):
    """A rank, with its host and process id."""

    rank: int
    world_size: int
    host: str
    pid: int

    def __str__(self) -> str:
        return rank_name(self.rank, self.world_size, self.host)


class Report(NamedTuple):
    """A failed rank's own report."""

    who: Rank
    kind: Kind
    time_s: float
    """Since the epoch."""
    error: str
    """The exception, in one line."""
    text: str
    """Its traceback, and advice for known errors."""
    at: str = ""
    """Its stage and step."""

    def message(self) -> str:
        """Return the text for the terminal: a cause in full, other kinds in one line, `told` not at all."""
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
    """A guard's finding about a rank that cannot report, because it was killed, hangs, or is lost with its host."""

    who: Rank
    time_s: float
    """Since the epoch."""
    how: str
    """How the rank failed, such as "crashed first" or "hangs (...)"."""
    text: str
    """The stack or stacks; may be empty."""
    at: str
    """The rank's stage and step, as far as they are known."""
    signal: int = 0
    """The signal that ended the rank, if known; otherwise 0."""
    weak: bool = False
    """Whether the rank's end may be the consequence of a failure that is reported later, as for an abort. The job's
    report then names any other cause first.
    """

    def message(self, note: str = "") -> str:
        """Return the text for the terminal. `note`: an addition to `how`."""
        how = visible(f"[{join_location(self.who, self.at)}] {self.how}" + (f" ({note})" if note else ""))
        return how + (f":\n{self.text}\n" if self.text else "\n")


class Stopped(NamedTuple):
    """The end of a rank that was requested to stop."""

    step: int
    """The last completed step."""
    saved: str
    """The checkpoint of that step; empty: none was saved."""
    status: int
    """The rank's exit status."""
    overdue: bool = False
    """Whether the rank did not stop in time, and was ended."""


class Result(NamedTuple):
    """The nonzero result of a rank that ended in order, such as a difference that `dslpar prove` found."""

    status: int
    """The rank's exit status. The mark exists because launchers may not pass the status on."""


class Ended(NamedTuple):
    """The mark of a rank that ended in order. It has no details."""


Mark = Rank | Report | Verdict | Stopped | Result | Ended


def parse(kind: str, text: str) -> Mark | None:
    """Parse a mark's text; None if it is not a valid mark of this kind."""
    if kind == "ended":
        return Ended()
    try:
        return _PARSERS[kind](json.loads(text))
    except (KeyError, ValueError, RecursionError, MemoryError):
        return None


def rank_of(mark: Mark) -> int | None:
    """Return the rank that a mark is about; None if the mark does not contain one."""
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
    """Return a list's items after checking their types. Numbers must be finite and at least 0.

    Raises:
        ValueError: `fields` is not a list of that many items, or an item has another type or range.
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
"""The kinds of marks that `parse` reads. A mark's kind is the suffix of its file name."""


def write(folder: Path, name: str, text: str) -> None:
    """Write a mark atomically: a reader sees all of it or nothing.

    Raises:
        OSError: the mark cannot be written, for example because the folder is gone.
    """
    part = folder / f"{name}.part"
    part.write_text(text, encoding="utf-8")
    part.replace(folder / name)


def lock_folder(folder: Path) -> int:
    """Lock a folder until the returned descriptor is closed. systemd's cleaner of /tmp spares locked folders."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    with contextlib.suppress(OSError):  # a file system without locks
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    return descriptor


def read(folder: Path, name: str) -> str:
    """Return a mark's text; empty if there is none."""
    path = folder / name
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
