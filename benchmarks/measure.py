"""Measure two things in turns, so that both meet the same machine: the median of the ratios, and its interval.

The interval contains the true median with at least 95 % confidence for any distribution. It runs from one order
statistic to another, by the sign test (Conover, Practical Nonparametric Statistics, 3.2). A line is PASS if the median
is at most the target, NEAR if the median is above it but the interval reaches it (the turns do not decide), and FAIL
otherwise. The exit status is 1 for a FAIL, and for a NEAR of a `strict` line.

    >>> median_of([1.0, 1.2, 1.1, 0.9, 1.3, 1.0])
    (1.05, 0.9, 1.3)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import comb
from statistics import median
from typing import NamedTuple

PAIRS = 21
HEADER = f"{'measured against a reference, in turns':58} ratio   95 % interval   at most"


class Ratio(NamedTuple):
    """Cost of something, as a multiple of the reference's cost."""

    name: str
    ratio: float
    low: float
    high: float
    target: float
    """The most that the ratio should be."""
    strict: bool = False
    """Whether the median itself must be within the target."""

    @property
    def passed(self) -> bool:
        """Return whether the target is met: by the median if `strict`, else by the lower end of the interval."""
        return (self.ratio if self.strict else self.low) <= self.target

    @property
    def verdict(self) -> str:
        """The line's verdict on the target."""
        return "PASS" if self.ratio <= self.target else "NEAR" if self.low <= self.target else "FAIL"

    def __str__(self) -> str:
        interval = f"[{self.low:5.3f}, {self.high:5.3f}]"
        return f"{self.name:58} {self.ratio:5.3f}  {interval}   {self.target:5.2f}  {self.verdict}"


Costs = tuple[float, ...]
"""Seconds of one run, by what is counted: (CPU,) or (CPU, wall)."""


def in_turns(
    ours: Callable[[], Costs], reference: Callable[[], Costs], pairs: int = PAIRS
) -> Iterator[tuple[float, ...]]:
    """The ratios of `pairs` pairs of runs, each kind of cost by itself; which of the two goes first alternates."""
    assert pairs >= 15, "too few for an interval"
    for pair in range(pairs):
        order = (ours, reference) if pair % 2 else (reference, ours)
        costs = {run: run() for run in order}
        yield tuple(mine / theirs for mine, theirs in zip(costs[ours], costs[reference], strict=True))


def median_of(ratios: Sequence[float]) -> tuple[float, float, float]:
    """The median, and the ends of its 95 % interval."""
    ordered, n = sorted(ratios), len(ratios)
    below, outside = 0, 1 / 2**n  # outside: P(at most `below` of n values lie below the true median)
    while below + 1 < n // 2 and outside + comb(n, below + 1) / 2**n <= 0.025:
        below += 1
        outside += comb(n, below) / 2**n
    return median(ordered), ordered[below], ordered[n - 1 - below]


def ratio(name: str, ratios: Sequence[float], target: float, *, strict: bool = False) -> Ratio:
    """Their median with its interval, against a target."""
    return Ratio(name, *median_of(ratios), target, strict)
