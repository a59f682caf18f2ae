"""Schedules against 1F1B: equal losses, and norms and gradients within the rounding of sums."""

from __future__ import annotations

import pytest

from tests.properties.schedules.measure import BOUND, run
from tests.properties.schedules.table import ROWS, SAMPLE, SCHEDULES, worlds
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


@pytest.mark.minutes(10)  # 32 ranks on few cores
@pytest.mark.parametrize("world", sampled(worlds(ROWS), set()))
def test_all_of_the_table(world: str) -> None:
    agree(world, list(ROWS))


def test_the_sample_has_masks_and_uneven_stages() -> None:
    rows = [ROWS[name] for name in SAMPLE]
    assert {bool(row.dropout) for row in rows} == {bool(row.cut) for row in rows} == {True, False}
    assert {row.schedule for row in ROWS.values()} >= set(SCHEDULES)
