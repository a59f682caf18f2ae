"""Time of a `dslpar plan` process: CPU time against its limit, and against a bare interpreter's.

The limits in seconds are for an idle machine with about 4 billion instructions per second. The ratio to an interpreter
that imports what any such tool needs also holds on other machines. The plans are one of 64 devices, one of 1,024, and
the slowest example, whose long sequences can be split in many ways. tests/unit/forecast/test_search.py counts the
layouts that a search examines.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

from benchmarks.lint_speed import BARE, process_cost
from benchmarks.measure import Costs, Ratio, in_turns, ratio

DSLPAR = str(Path(sys.executable).with_name("dslpar"))


class Line(NamedTuple):
    """A plan and its limits."""

    config: str
    world_size: int
    most_s: float | None
    """CPU seconds with start-up; None: no limit."""
    most_of_bare: float
    """CPU time over a bare interpreter's."""


LINES = (
    Line("llama_7b_64_h100", 64, 0.3, 5.5),
    Line("gpt3_175b_1024_a100", 1024, 0.6, 8.5),
    Line("long_sequence_64_h100", 64, None, 15.0),
)


def ratios() -> Iterator[Ratio]:
    """Yield the CPU time of each plan."""
    for line in LINES:
        command = (DSLPAR, "plan", f"examples/plans/{line.config}.py", "--world-size", str(line.world_size))
        name = f"dslpar plan {line.config}"

        plan = partial(process_cost, command, (0, 1))  # status 1: the config does not fit unchanged
        plan(), process_cost(BARE)
        if line.most_s is not None:
            most: Costs = (line.most_s, line.most_s)
            of_seconds = in_turns(plan, partial(tuple, most))
            yield ratio(f"{name} / {line.most_s} s of CPU", [cpu for cpu, _ in of_seconds], 1.0)
        of_bare = in_turns(plan, partial(process_cost, BARE))
        yield ratio(f"{name} / python, CPU time", [cpu for cpu, _ in of_bare], line.most_of_bare)
