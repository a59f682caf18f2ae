"""Random layouts from a seed."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

from tests.support.layout_factors import FACTORS, MODES, PLAIN, Row, describe, findings_of, job_of

OF_THE_RUN = ("family", "tied", "adapters", "optimizer", "clip")
"""Factors that a resume must not change."""
MOST_RANKS, RARE_RANKS, RARE = 16, 64, 0.02
SHARE_PLAIN = 0.5
"""Probability that a factor keeps its plainest level; otherwise few rows would be legal."""


class Drawn(NamedTuple):
    """The layouts of a seed."""

    seed: int
    row: Row
    resumes: Row | None
    """The layout that resumes, or None if the run is not interrupted."""

    def __str__(self) -> str:
        more = "" if self.resumes is None else f" | resumed under: {describe(self.resumes)}"
        return f"seed {self.seed}: {describe(self.row)}{more}"


def draw(seed: int) -> Drawn:
    """Draw a row, and in half of the cases another layout of the same run."""
    rng = random.Random(seed)
    most = RARE_RANKS if rng.random() < RARE else MOST_RANKS
    row = _legal(rng, {}, most)
    resumes = _legal(rng, {name: row[name] for name in OF_THE_RUN}, most) if seed % 2 else None
    return Drawn(seed, row, resumes)


def _legal(rng: random.Random, fixed: Row, most_ranks: int) -> Row:
    """Draw a row that passes lint."""
    while True:
        row: dict[str, Any] = {
            name: levels[0] if rng.random() < SHARE_PLAIN else rng.choice(levels) for name, levels in FACTORS.items()
        }
        row |= {"family": rng.choice(FACTORS["family"]), "mode": rng.choice(tuple(MODES))} | dict(fixed)
        free = [name for name in FACTORS if name not in (*fixed, "family") and row[name] != PLAIN[name]]
        rng.shuffle(free)
        free.sort(key=lambda name: name in ("mode", "pipe"))  # the layout itself is given up last
        while findings_of(row) and free:
            name = free.pop(0)
            row[name] = PLAIN[name]
        job = job_of(row)
        if job is not None and job.mesh.world_size <= most_ranks:
            return row
