"""Status page: a rank's progress, in a page of memory that the rank shares with its guard (guard.py).

    page = StatusPage(path, make=True)                      # in the rank
    page.enter("step", step=12, limit_s=600.0)              # a few stores; no system call, no lock
    StatusPage(path).progress()                             # in the guard: the rank's phase and step, and since when

The guard also writes orders for the rank to the page. Times are seconds of the host's monotonic clock. This module
imports only the standard library and dslpar.core.visible, because guards load it and start in milliseconds.
"""

from __future__ import annotations

import mmap
import struct
import time
from collections.abc import Callable, Sequence
from enum import IntEnum
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

from dslpar.core.visible import visible

T = TypeVar("T")
_SIZE = mmap.PAGESIZE
_MOST_STAGES = 4
"""The most stages of a rank that a report lists."""


class Ending(IntEnum):
    """Reasons for which a guard ends its rank."""

    NO = 0
    JOB_FAILED = 1
    """Some rank has failed, and with it the job."""
    OVERDUE = 2
    """The rank did not stop in time after SIGTERM."""
    ORPHANED = 3
    """`dslpar launch` is gone."""


TOO_LATE = "was requested to stop, did not stop in time, and is ended now"
"""The message about a rank that is ended as OVERDUE. The rank itself prints it, or else its guard."""


def join_location(who: object, *where: str) -> str:
    """Join a rank's name, place and progress for a report. Empty parts are left out.

    >>> join_location("rank 2 of 4 on host1", "stage 1 (pipe 1, data 0, tensor 0)", "step 12")
    'rank 2 of 4 on host1, stage 1 (pipe 1, data 0, tensor 0), step 12'
    """
    return visible(", ".join(filter(None, (str(who), *where))))


def rank_name(rank: int, world_size: int, host: str) -> str:
    """Return "rank 2 of 4 on host1"."""
    return f"rank {rank} of {world_size} on {host}"


def stages_name(stages: Sequence[int]) -> str:
    """Return "stage 1", or the name of several stages.

    >>> stages_name([1]), stages_name([1, 5, 9]), stages_name(range(1, 33, 4))
    ('stage 1', 'stages 1, 5 and 9', 'stages 1, 5, ..., 29')
    """
    names = [str(stage) for stage in stages]
    if len(names) > _MOST_STAGES:  # a page has little room
        return f"stages {names[0]}, {names[1]}, ..., {names[-1]}"
    return f"stages {', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else f"stage {names[0]}"


def place_name(stages: Sequence[int], pipe: int, data: int, tensor: int) -> str:
    """Return "stage 1 (pipe 1, data 0, tensor 0)"; for a rank with several stages "stages 1 and 5 (pipe 1, ...)"."""
    return f"{stages_name(stages)} (pipe {pipe}, data {data}, tensor {tensor})"


class Progress(NamedTuple):
    """A rank's progress in its run."""

    location: str = ""
    """Such as "stage 1 (pipe 1, data 0, tensor 1)"; empty until the mesh is made."""
    phase: str = ""
    """building, loading, step, evaluating, saving, ...; empty before the first phase."""
    step: int = 0
    """The current step; between steps, the last completed one."""
    since_s: float = 0.0
    """Time at which the rank entered the phase."""
    limit_s: float = 0.0
    """Time limit for the phase; 0: none."""
    num_entries: int = 0
    """Number of phases entered so far, which identifies the current phase. Each step is a phase of its own."""

    def describe(self) -> str:
        """Return "stage 1 (pipe 1, data 0, tensor 1), step 12"."""
        phases = {"step": f"step {self.step}", "saving": f"saving step {self.step}", "": ""}
        after = f"{self.phase} after step {self.step}" if self.step else self.phase
        return join_location(self.location, phases.get(self.phase, after))


class _Field(Generic[T]):
    """A field of the page, read and written as an attribute: its struct format, its offset, and its type."""

    def __init__(self, packed: str, offset: int, read_as: Callable[..., T]) -> None:
        self.packed, self.offset, self.read_as = packed, offset, read_as

    def __get__(self, page: StatusPage, owner: type[StatusPage]) -> T:
        return self.read_as(struct.unpack_from(self.packed, page.memory, self.offset)[0])

    def __set__(self, page: StatusPage, value: T) -> None:
        stored = value.encode() if isinstance(value, str) else value
        struct.pack_into(self.packed, page.memory, self.offset, stored)


def _text(stored: bytes) -> str:
    return stored.rstrip(b"\0").decode(errors="replace")


class StatusPage:
    """One rank's status page, in shared memory.

    The guard writes `ending`, `port`, `rank_0_left`, `flight_record_wanted` and `abort_seen`. The rank writes the other
    fields, and clears `flight_record_wanted`. `file`: the page's path, or a descriptor of the open file, which stays
    open. `make`: whether to create the file.
    """

    # Each number's offset is a multiple of its size, so that a single store writes it: readers see the old value or the
    # new one, never a mixture.
    num_entries = _Field("<Q", 0, int)
    step = _Field("<q", 8, int)
    since_s = _Field("<d", 16, float)
    limit_s = _Field("<d", 24, float)
    grace_s = _Field("<d", 32, float)
    """Time for the rank to end after SIGTERM; 0: it does not handle SIGTERM."""
    ending = _Field("<I", 40, Ending)
    """Order of the guard to end the rank at once, with the reason."""
    port = _Field("<I", 44, int)
    """The port at which the hub (rank 0's guard) listens; 0 before it listens, and on other ranks."""
    status = _Field("<I", 48, int)
    """The exit status of a rank that has stopped on request."""
    rank_0_left = _Field("<I", 52, bool)
    """Whether rank 0's guard has reported that it leaves in order."""
    flight_record_wanted = _Field("<I", 56, bool)
    """Whether the guard has asked for the flight record. The rank clears it before it writes the record."""
    abort_seen = _Field("<I", 60, bool)
    """Whether some rank has aborted, so that guards wait for a better cause before they end the job."""
    phase = _Field("64s", 64, _text)
    location = _Field("192s", 128, _text)
    """The rank's stages and coordinates in the mesh."""
    hub = _Field("512s", 512, _text)
    """The `address:port:secret` of rank 0's guard; empty until the rank knows it."""

    def __init__(self, file: Path | int, *, make: bool = False) -> None:
        if make and isinstance(file, Path):
            file.write_bytes(bytes(_SIZE))
        with open(file, "r+b", closefd=isinstance(file, Path)) as opened:
            self.memory = mmap.mmap(opened.fileno(), _SIZE)

    def enter(self, phase: str, step: int = 0, limit_s: float | None = None) -> None:
        """Enter a phase of the run, or its next step. `limit_s`: the time limit of this phase or step; None: none."""
        self.since_s = time.monotonic()  # first: the time of a long phase without a limit must not count in this one
        self.limit_s = limit_s or 0.0
        self.step = step
        self.phase = phase
        self.num_entries += 1  # last: a reader that sees it change reads all of the above again

    def set_grace(self, grace_s: float, status: int) -> None:
        """Declare that SIGTERM makes the rank stop in order, within `grace_s` and with this exit status."""
        self.status = status  # first: as soon as `grace_s` is above 0, the guard uses `status`
        self.grace_s = grace_s

    def progress(self) -> Progress:
        """Return the rank's progress. If the rank enters another phase meanwhile, read it again."""
        while True:
            entries = self.num_entries
            seen = Progress(self.location, self.phase, self.step, self.since_s, self.limit_s, entries)
            if entries == self.num_entries:
                return seen
