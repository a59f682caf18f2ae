"""Schedules and 1F1B are one maths: equal losses, and norm and every gradient within the rounding of sums."""

from __future__ import annotations

import pytest

from tests.properties.schedules.measure import BOUND, TIMEOUT_S, run
from tests.properties.schedules.table import ROWS, SAMPLE, grid, seen, worlds
from tests.support.sampling import sampled

SAMPLED = worlds(SAMPLE)


def agree(world: str, names: list[str]) -> None:
    """Run rows on one set of ranks."""
    rows = worlds(names)[world]
    for row, off in zip(rows, run(rows), strict=True):
        assert all(value <= most for value, most in zip(off, BOUND, strict=True)), f"{row.name}: {off}"


@pytest.mark.parametrize("world", SAMPLED)
def test_a_schedule_is_1f1b_in_another_order(world: str) -> None:
    agree(world, list(SAMPLE))


@pytest.mark.timeout(TIMEOUT_S + 60)  # of 32 ranks, on few cores
@pytest.mark.parametrize("world", sampled(worlds(ROWS), set()))
def test_all_of_the_table(world: str) -> None:
    agree(world, list(ROWS))


def test_the_sample_has_every_pair_that_the_grid_has() -> None:
    wanted = set().union(*(seen(row) for row in grid() if row.world <= 8))
    assert set().union(*(seen(ROWS[name]) for name in SAMPLE)) == wanted
    assert len(list(grid())) == 8 * 3 * 2 * 2 * 2 * 2, "modes, schedules, pipelines, ZeRO, ties, recomputation"
