"""What a rank says when it fails: causes told from consequences, and what helps where that is known."""

from __future__ import annotations

import json
import re
import time
import traceback
from types import TracebackType
from typing import Literal, NamedTuple

from dslpar.watchdog.status_page import TOO_LATE, join_location, rank_name

Kind = Literal["cause", "consequence", "interrupt", "orphan", "told", "overdue"]


class Rank(NamedTuple):
    """Who: a rank, and where it runs."""

    rank: int
    world_size: int
    host: str
    pid: int

    def __str__(self) -> str:
        return rank_name(self.rank, self.world_size, self.host)


class Report(NamedTuple):
    """What a rank that failed has to say."""

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

    def spoken(self) -> str:
        """What goes to the terminal: a cause whole, anything else in one line; nothing, where others say it."""
        where = f"[{join_location(self.who, self.at)}]"
        if self.kind == "cause":
            return f"{where} {self.text}"
        message = {
            "consequence": f"ends because a peer is gone ({self.error})",
            "interrupt": "interrupted",
            "orphan": "ends because its launcher is gone",
            "overdue": TOO_LATE,
        }
        return f"{where} {message[self.kind]}\n" if self.kind in message else ""


class Verdict(NamedTuple):
    """What a guard found out about a rank that could not say it: killed, hanging, or gone with its host."""

    who: Rank
    time_s: float
    how: str
    text: str
    at: str
    signal: int = 0
    """That ended it, if it is known."""


class Stopped(NamedTuple):
    """How a rank ended that was told to."""

    step: int
    """The last one that was done."""
    saved: str
    """The checkpoint that holds it; empty: there is none."""
    status: int
    """With which it left."""
    overdue: bool = False
    """Whether it had to be ended."""


def report(who: Rank, at: str, error: BaseException, trace: TracebackType | None) -> Report:
    """Of an exception that nobody caught."""
    kind: Kind = "consequence" if lost_a_peer(error) else "cause"
    if isinstance(error, KeyboardInterrupt):  # it may have come while a peer went, for the same reason
        kind = "interrupt"
    line = f"{type(error).__name__}: {error}".strip().partition("\n")[0]
    text = "".join(traceback.format_exception(type(error), error, trace))
    return Report(who, kind, time.time(), line, text + advice(error), at)


# ---- a peer that is gone ----

_LOST = re.compile(
    r"Connection (closed|reset|refused)|Broken pipe|Read error|Write error|Socket Timeout|Timed out|timed out"
    r"|wait timeout|connectFullMesh|Application timeout|recv, got 0 bytes|remote process (has )?exited"
    r"|ncclRemoteError|failed to connect|peer (closed|rank)"
)
_GLOO = re.compile(r"\[[^\]]*gloo/|Gloo ")


def lost_a_peer(error: BaseException) -> bool:
    """Whether torch.distributed raised it because a peer went away; what it was raised from counts as well.

    By the words, since gloo's errors are plain RuntimeErrors; and by who says them, since a data set on a network may
    say the same.
    """
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        if _of_distributed(link) and _LOST.search(str(link)):
            return True
        link = link.__cause__ or link.__context__
    return False


def _of_distributed(error: BaseException) -> bool:
    """torch.distributed's own errors (DistBackendError, DistNetworkError, ...), and gloo's."""
    names = {kind.__name__ for kind in type(error).__mro__ if kind.__module__.startswith("torch")}
    return "DistError" in names or (type(error) is RuntimeError and bool(_GLOO.search(str(error))))


def elastic(report: Report) -> str:
    """What torchrun reads to name the root cause."""
    extra = {"py_callstack": report.text, "timestamp": str(int(report.time_s))}
    return json.dumps({"message": {"message": report.text, "extraInfo": extra}})


# ---- what helps ----

_NO_MEMORY = re.compile(r"out of memory|can't allocate memory|not enough memory", re.IGNORECASE)
_MEMORY = (
    *("HST230", "out-of-memory", "this rank asked for more memory than there is"),
    "a smaller batch.micro_size (a larger batch.accumulation keeps the global batch), activation_checkpoint=1,\n"
    "      zero.stage=1 to 3 over data ranks, precision='bf16', or more ranks in parallel.tensor or parallel.pipeline",
)
_DISK = (
    *("CKP230", "disk-full", "a file could not be written"),
    "room on that file system, or another folder: train.output_dir=...; --resume goes on from the last checkpoint",
)
_NO_ROOM = (28, 122)
"""ENOSPC and EDQUOT."""


def advice(error: BaseException) -> str:
    """What to change, for errors whose traceback does not say it; else nothing."""
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and _NO_MEMORY.search(str(error))):
        return _said(*_MEMORY)
    return _said(*_DISK) if isinstance(error, OSError) and error.errno in _NO_ROOM else ""


def _said(code: str, name: str, message: str, hint: str) -> str:
    return f"{code} {name}: {message}\nhelp: {hint}\n"
