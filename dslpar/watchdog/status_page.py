"""What a rank shows while it works: a page of memory that it shares with its guard (guard.py), and reads too.

    page = StatusPage(path, make=True)                          # in the rank
    page.enter("step", step=12, allowed_s=600.0)            # two stores; no system call, no lock
    StatusPage(path).progress()                                    # in the guard: where the rank is, and since when

Times are of the host's monotonic clock, in seconds. It needs no torch, and of dslpar nothing: guards load it by itself.
"""

from __future__ import annotations

import mmap
import struct
import time
from pathlib import Path
from typing import Any, NamedTuple

_SIZE = mmap.PAGESIZE
_MOVES, _STEP, _SINCE, _ALLOWED, _GRACE, _ENDING, _PORT, _STATUS, _FIRST = (
    ("<Q", 0), ("<q", 8), ("<d", 16), ("<d", 24), ("<d", 32), ("<I", 40), ("<I", 44), ("<I", 48), ("<I", 52)
)  # fmt: skip
_PHASE, _WHERE, _HUB = ("64s", 64), ("192s", 128), ("512s", 512)

TOLD, OVERDUE, ORPHAN = 1, 2, 3
"""Why a guard ends its rank: another one's fault, too long after SIGTERM, or nobody is left to launch it."""
TOO_LATE = "was told to end, and is ended now: its step, or its checkpoint, took too long"
"""What is said of a rank that was OVERDUE, by itself or by its guard."""


def join_location(who: object, *where: str) -> str:
    """Who and where, as every report has it; what is not known yet is left out.

    >>> join_location("rank 2 of 4 on host1", "stage 1 (pipe 1, data 0, tensor 0)", "step 12")
    'rank 2 of 4 on host1, stage 1 (pipe 1, data 0, tensor 0), step 12'
    """
    return ", ".join(filter(None, (str(who), *where)))


def rank_name(rank: int, world_size: int, host: str) -> str:
    """rank 2 of 4 on host1"""
    return f"rank {rank} of {world_size} on {host}"


def stage_name(stage: int, data: int, tensor: int) -> str:
    """stage 1 (pipe 1, data 0, tensor 0)"""
    return f"stage {stage} (pipe {stage}, data {data}, tensor {tensor})"


class Progress(NamedTuple):
    """Where a rank is in its run."""

    where: str = ""
    """stage 1 (pipe 1, data 0, tensor 1); empty until the mesh is made."""
    phase: str = ""
    """building, loading, step, evaluating, saving, ...; empty before all of them."""
    step: int = 0
    """The one under way, or the last one done where there is none."""
    since_s: float = 0.0
    """When it came there."""
    allowed_s: float = 0.0
    """How long it may stay there; 0: as long as it likes."""
    moves: int = 0
    """How often it has moved."""

    def words(self) -> str:
        """stage 1 (pipe 1, data 0, tensor 1), step 12"""
        told = {"step": f"step {self.step}", "saving": f"saving step {self.step}", "": ""}
        after = f"{self.phase} after step {self.step}" if self.step else self.phase
        return join_location(self.where, told.get(self.phase, after))


class StatusPage:
    """One rank's page. The rank moves; its guard writes `ending`, `port` and `first_left`, and reads the rest."""

    def __init__(self, path: Path, *, make: bool = False) -> None:
        if make:
            path.write_bytes(bytes(_SIZE))
        with open(path, "r+b") as file:
            self._page = mmap.mmap(file.fileno(), _SIZE)

    # ---- the rank's part ----

    def enter(self, phase: str, step: int = 0, allowed_s: float | None = None) -> None:
        """The rank has come somewhere new."""
        self._write(_SINCE, time.monotonic())  # the first: a long stay without a bound must not be held against it
        self._write(_ALLOWED, allowed_s or 0.0)
        self._write(_STEP, step)
        self._write(_PHASE, phase.encode())
        self._write(_MOVES, self._read(_MOVES) + 1)

    def set_location(self, where: str) -> None:
        """Where the rank stands in the mesh."""
        self._write(_WHERE, where.encode())

    def set_hub(self, hub: str) -> None:
        """`address:port:token` of rank 0's guard."""
        self._write(_HUB, hub.encode())

    def set_grace(self, grace_s: float, status: int) -> None:
        """From now on SIGTERM ends the rank in order: after at most `grace_s`, with that status."""
        self._write(_STATUS, status)
        self._write(_GRACE, grace_s)

    # ---- either's ----

    def progress(self) -> Progress:
        """Where the rank is; read again if it moves meanwhile."""
        while True:
            moves = self._read(_MOVES)
            seen = Progress(
                self._text(_WHERE), self._text(_PHASE), self._read(_STEP), self._read(_SINCE), self._read(_ALLOWED)
            )
            if moves == self._read(_MOVES):
                return seen._replace(moves=moves)

    @property
    def hub(self) -> str:
        """What `set_hub` said; empty before."""
        return self._text(_HUB)

    @property
    def grace_s(self) -> float:
        """What `set_grace` said; 0 before."""
        return float(self._read(_GRACE))

    @property
    def status(self) -> int:
        """What `set_grace` said."""
        return int(self._read(_STATUS))

    # ---- the guard's part ----

    @property
    def port(self) -> int:
        """Where the guard listens; 0 before it does."""
        return int(self._read(_PORT))

    @port.setter
    def port(self, number: int) -> None:
        self._write(_PORT, number)

    @property
    def first_left(self) -> bool:
        """Whether rank 0 has left."""
        return bool(self._read(_FIRST))

    @first_left.setter
    def first_left(self, left: bool) -> None:
        self._write(_FIRST, int(left))

    @property
    def ending(self) -> int:
        """Why the rank is to end at once: TOLD, OVERDUE, ORPHAN; 0: it is not."""
        return int(self._read(_ENDING))

    @ending.setter
    def ending(self, why: int) -> None:
        self._write(_ENDING, why)

    def _read(self, field: tuple[str, int]) -> Any:
        return struct.unpack_from(field[0], self._page, field[1])[0]

    def _write(self, field: tuple[str, int], value: object) -> None:
        struct.pack_into(field[0], self._page, field[1], value)

    def _text(self, field: tuple[str, int]) -> str:
        return str(self._read(field).rstrip(b"\0").decode(errors="replace"))
