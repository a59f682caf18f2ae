"""Status page: where a rank is in its run, in a page of memory that it shares with its guard.

    page = StatusPage(path, make=True)                      # in the rank
    page.enter("step", step=12, limit_s=600.0)              # a few stores; no system call, no lock
    StatusPage(path).progress()                             # in the guard: where the rank is, and since when

Times are of the host's monotonic clock, in seconds. It imports the standard library alone: guards load it.
"""

from __future__ import annotations

import mmap
import struct
import time
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple

_SIZE = mmap.PAGESIZE
_ENTRIES, _STEP, _SINCE, _LIMIT, _GRACE, _ENDING, _PORT, _STATUS, _RANK_0_LEFT = (
    ("<Q", 0), ("<q", 8), ("<d", 16), ("<d", 24), ("<d", 32), ("<I", 40), ("<I", 44), ("<I", 48), ("<I", 52)
)  # fmt: skip
_PHASE, _LOCATION, _HUB = ("64s", 64), ("192s", 128), ("512s", 512)
"""Format and offset of each field."""


class Ending(IntEnum):
    """Why a guard ends its rank."""

    NO = 0
    JOB_FAILED = 1
    """Some rank has failed, and the job with it."""
    OVERDUE = 2
    """It did not stop in time after SIGTERM."""
    ORPHANED = 3
    """Its launcher is gone."""


TOO_LATE = "was told to end, and is ended now: its step, or its checkpoint, took too long"
"""The message about a rank that was OVERDUE, by itself or by its guard."""


def join_location(who: object, *where: str) -> str:
    """Return who and where, as every report has it; what is not known yet is left out.

    >>> join_location("rank 2 of 4 on host1", "stage 1 (pipe 1, data 0, tensor 0)", "step 12")
    'rank 2 of 4 on host1, stage 1 (pipe 1, data 0, tensor 0), step 12'
    """
    return ", ".join(filter(None, (str(who), *where)))


def rank_name(rank: int, world_size: int, host: str) -> str:
    """Return "rank 2 of 4 on host1"."""
    return f"rank {rank} of {world_size} on {host}"


def stage_name(stage: int, data: int, tensor: int) -> str:
    """Return "stage 1 (pipe 1, data 0, tensor 0)"."""
    return f"stage {stage} (pipe {stage}, data {data}, tensor {tensor})"


class Progress(NamedTuple):
    """Where a rank is in its run."""

    location: str = ""
    """stage 1 (pipe 1, data 0, tensor 1); empty until the mesh is made."""
    phase: str = ""
    """building, loading, step, evaluating, saving, ...; empty before all of them."""
    step: int = 0
    """The one under way, or the last one done where there is none."""
    since_s: float = 0.0
    """When it came there."""
    limit_s: float = 0.0
    """How long it may stay there; 0: as long as it likes."""
    num_entries: int = 0
    """How many phases it has entered so far: tells one place from another."""

    def describe(self) -> str:
        """Return "stage 1 (pipe 1, data 0, tensor 1), step 12"."""
        phases = {"step": f"step {self.step}", "saving": f"saving step {self.step}", "": ""}
        after = f"{self.phase} after step {self.step}" if self.step else self.phase
        return join_location(self.location, phases.get(self.phase, after))


class StatusPage:
    """One rank's page. Its guard writes `ending`, `port` and `rank_0_left`, and reads what the rank writes."""

    def __init__(self, path: Path, *, make: bool = False) -> None:
        if make:
            path.write_bytes(bytes(_SIZE))
        with open(path, "r+b") as file:
            self._page = mmap.mmap(file.fileno(), _SIZE)

    # ---- written by the rank ----

    def enter(self, phase: str, step: int = 0, limit_s: float | None = None) -> None:
        """Enter another phase, or step, of the run."""
        self._write(_SINCE, time.monotonic())  # first: a long stay without a limit must not count against the next one
        self._write(_LIMIT, limit_s or 0.0)
        self._write(_STEP, step)
        self._write(_PHASE, phase.encode())
        self._write(_ENTRIES, self._read(_ENTRIES) + 1)

    def set_location(self, location: str) -> None:
        """Set the rank's place in the mesh: its stage and coordinates."""
        self._write(_LOCATION, location.encode())

    def set_hub(self, hub: str) -> None:
        """Set the `address:port:token` of rank 0's guard."""
        self._write(_HUB, hub.encode())

    def set_grace(self, grace_s: float, status: int) -> None:
        """Declare that SIGTERM ends the rank in order: after at most `grace_s`, with that status."""
        self._write(_STATUS, status)
        self._write(_GRACE, grace_s)

    # ---- read by either ----

    def progress(self) -> Progress:
        """Return where the rank is; read again if it enters another phase meanwhile."""
        while True:
            entries = self._read(_ENTRIES)
            seen = Progress(
                self._text(_LOCATION), self._text(_PHASE), self._read(_STEP), self._read(_SINCE), self._read(_LIMIT)
            )
            if entries == self._read(_ENTRIES):
                return seen._replace(num_entries=entries)

    @property
    def hub(self) -> str:
        """What `set_hub` was given; empty before."""
        return self._text(_HUB)

    @property
    def grace_s(self) -> float:
        """What `set_grace` was given; 0 before."""
        return float(self._read(_GRACE))

    @property
    def status(self) -> int:
        """What `set_grace` was given."""
        return int(self._read(_STATUS))

    # ---- written by the guard ----

    @property
    def port(self) -> int:
        """Where the guard listens; 0 before it does."""
        return int(self._read(_PORT))

    @port.setter
    def port(self, number: int) -> None:
        self._write(_PORT, number)

    @property
    def rank_0_left(self) -> bool:
        """Whether rank 0 has left."""
        return bool(self._read(_RANK_0_LEFT))

    @rank_0_left.setter
    def rank_0_left(self, left: bool) -> None:
        self._write(_RANK_0_LEFT, int(left))

    @property
    def ending(self) -> Ending:
        """Why the rank is to end at once."""
        return Ending(self._read(_ENDING))

    @ending.setter
    def ending(self, reason: Ending) -> None:
        self._write(_ENDING, reason)

    def _read(self, field: tuple[str, int]) -> Any:
        return struct.unpack_from(field[0], self._page, field[1])[0]

    def _write(self, field: tuple[str, int], value: object) -> None:
        struct.pack_into(field[0], self._page, field[1], value)

    def _text(self, field: tuple[str, int]) -> str:
        return str(self._read(field).rstrip(b"\0").decode(errors="replace"))
