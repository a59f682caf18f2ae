"""Lint's speed: milliseconds per file, at most linear in its length. `make bench` has the figures.

The bounds are wide, and on CPU time, so that they catch a slow linter and not a slow machine.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from statistics import median

import pytest

from benchmarks.lint_many import LONG, MOST_MS, WORLDS, config, cost_s, costs_of_lengths, exponent
from dslpar.core.errors import has_errors
from dslpar.linter import check

FILES = 200


def test_a_file_takes_milliseconds() -> None:
    rng = random.Random(1)
    texts = [(config(rng), rng.choice(WORLDS)) for _ in range(FILES)]
    cost_s(*texts[0])  # imports modules that are needed on first use
    costs = [1e3 * cost_s(text, world) for text, world in texts]
    assert median(costs) < 2 * MOST_MS, "typically 2 ms"
    # Try again: a garbage collection of other tests' objects may fall into a file's time.
    slow = [1e3 * cost_s(*text) for text, ms in zip(texts, costs, strict=True) if ms > 40 * MOST_MS]
    assert max(slow, default=0) < 40 * MOST_MS, "no file is slow"


def test_the_files_are_of_all_kinds() -> None:
    """Otherwise their time would mean little."""
    rng = random.Random(1)
    found = [check.lint(check.load_text(config(rng), "cfg.py"), rng.choice(WORLDS)) for _ in range(FILES)]
    assert FILES / 4 < sum(map(has_errors, found)) < 3 * FILES / 4
    assert len({finding.code for findings in found for finding in findings}) > 20


@pytest.mark.parametrize(
    "long_file",
    [
        pytest.param(file, id=name, marks=[] if name == "mistakes" else [pytest.mark.prove])
        for name, file in LONG.items()
    ],
)
def test_cost_grows_with_the_length_of_a_file(long_file: Callable[[int], str]) -> None:
    """1 is linear, 2 quadratic; a busy machine adds some."""
    costs = costs_of_lengths(long_file, times=3)
    assert exponent({lines: each * lines for lines, each in costs.items()}) < 1.5
    first, *_, last = costs.values()
    assert last < 4 * first


def test_a_cost_that_grows_faster_would_be_seen() -> None:
    assert exponent({n: 1e-6 * n * n for n in (64, 128, 256)}) == pytest.approx(2)
    assert exponent({n: 3e-4 * n for n in (64, 128, 256)}) == pytest.approx(1)
