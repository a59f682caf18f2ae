"""Marks: the files that a rank and its guard leave in a folder, by which `dslpar launch` learns how each rank ended.

    3.born     JSON of Rank: rank, world_size, host, pid
    3.board    where the rank is in its run (status_page.py)
    3.stack    what the C level of Python wrote at a deadly signal: empty after SIGKILL, which nothing can catch
    3.stacks   the stacks of all threads, written when its guard asks for them
    3.error    JSON of Report
    3.verdict  JSON of Verdict: what a guard found out about this rank
    3.stopped  JSON of Stopped: it ended because it was told to
    3.ended    the rank came to its end in order

It imports the standard library alone: guards load it, and start in milliseconds.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, NamedTuple

from dslpar.watchdog.status_page import TOO_LATE, join_location, rank_name

Kind = Literal["cause", "consequence", "interrupt", "orphan", "told", "overdue"]


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
            "consequence": f"ends because a peer is gone ({self.error})",
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

    def message(self) -> str:
        """What goes to the terminal."""
        return f"[{join_location(self.who, self.at)}] {self.how}" + (f":\n{self.text}\n" if self.text else "\n")


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


def write(folder: Path, name: str, text: str) -> None:
    """Write a mark atomically: a reader sees all of it or none.

    Raises:
        OSError: the folder is gone, say.
    """
    part = folder / f"{name}.part"
    part.write_text(text, encoding="utf-8")
    part.replace(folder / name)


def read(folder: Path, name: str) -> str:
    """Return a mark's text; empty where there is none."""
    path = folder / name
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
