"""Schedules and 1F1B are one maths: equal losses, and norm and every gradient within the rounding of sums."""

from __future__ import annotations

from itertools import product

import pytest

from tests.properties.invariance.layouts import MODES
from tests.properties.schedules.measure import BOUND, run
from tests.properties.schedules.table import ROWS, SAMPLE, SCHEDULES, grid, seen, worlds
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


@pytest.mark.minutes(10)  # of 32 ranks, on few cores
@pytest.mark.parametrize("world", sampled(worlds(ROWS), set()))
def test_all_of_the_table(world: str) -> None:
    agree(world, list(ROWS))


def test_the_sample_has_every_pair_that_the_grid_has() -> None:
    wanted = set().union(*(seen(row) for row in grid() if row.world <= 8))
    assert set().union(*(seen(ROWS[name]) for name in SAMPLE)) == wanted


def test_the_grid_has_all_of_two_stages_and_every_pair_of_four() -> None:
    switches = list(product((0, 1), (True, False), (0, 1)))
    found: dict[tuple[str, int, tuple[str, int]], list[tuple[int, bool, int]]] = {}
    for row in grid():
        found.setdefault((row.mode, row.pipe, row.schedule), []).append((row.zero, row.tied, row.recompute))
    assert {key[1:] for key in found} == set(product((2, 4), SCHEDULES))
    assert {mode for mode, _, _ in found} == set(MODES)
    for (_, pipes, _), each in found.items():
        assert len(each) == len(set(each)) == (8 if pipes == 2 else 4)
        for one, other in ((0, 1), (0, 2), (1, 2)):
            assert len({(row[one], row[other]) for row in each}) == 4
    assert {row for key, each in found.items() if key[1] == 4 for row in each} == set(switches)
