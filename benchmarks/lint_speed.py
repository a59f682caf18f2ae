"""Time of a `dslpar lint` process against a bare interpreter that imports the modules any linter needs.

Both run in this environment with compiled modules. If those could not be written, every start would compile them.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.measure import Costs, Ratio, in_turns, ratio

TARGET = 2.5
ROOT = Path(__file__).parents[1]
LINT = (str(Path(sys.executable).with_name("dslpar")), "lint", "configs/gpt_3d.py", "--world-size", "8")
BARE = (sys.executable, "-c", "import argparse, ast, dataclasses, difflib, json")


def ratios() -> Iterator[Ratio]:
    """Yield CPU time and wall time of the process."""
    process_cost(LINT), process_cost(BARE)
    cpu, wall = zip(*in_turns(lambda: process_cost(LINT), lambda: process_cost(BARE), pairs=41), strict=True)
    yield ratio("dslpar lint / python importing ast etc., CPU time", cpu, TARGET)
    yield ratio("dslpar lint / python importing ast etc., wall time", wall, TARGET)


def process_cost(command: tuple[str, ...], may_end_with: tuple[int, ...] = (0,)) -> Costs:
    """Return CPU and wall seconds of one process, from start to end."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    with open(os.devnull, "w") as silent:
        actions = [(os.POSIX_SPAWN_DUP2, silent.fileno(), number) for number in (1, 2)]
        os.chdir(ROOT)
        began = time.perf_counter()
        process = os.posix_spawn(command[0], command, env, file_actions=actions)
        _, status, used = os.wait4(process, 0)
        wall = time.perf_counter() - began
    code = os.waitstatus_to_exitcode(status)
    assert code in may_end_with, f"{' '.join(command)} ended with {code}"
    return used.ru_utime + used.ru_stime, wall
