"""Step time over gloo equals the simulation's if each action takes a known time."""

from __future__ import annotations

import pytest

from benchmarks import bubble


@pytest.mark.prove  # a minute each
@pytest.mark.parametrize(
    ("schedule", "chunks", "least", "most"), [("1f1b", 1, 0.2727, 0.287), ("zero_bubble", 2, 0.0588, 0.0826)]
)
def test_the_bubble_is_the_simulated_one(schedule: str, chunks: int, least: float, most: float) -> None:
    """The limit is 2 % of the makespan above the ideal for 1F1B, and the promised bubble for zero bubble.

    The smallest of up to three runs counts: other work on the cores only adds to a step's time.
    """
    found: list[float] = []
    while len(found) < 3 and min(found, default=most + 1) > most:
        found.append(bubble.measured_bubble(schedule, chunks))
    assert least <= min(found) <= most, found
