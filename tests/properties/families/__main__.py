"""`python -m tests.properties.families [--left] [--part 1/2] [WORD...]`: run every row whose name has all words, print
its deviation, and write it into the record. `--left`: only rows that are missing in the record.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.properties.families.table import Row


def main(argv: list[str]) -> int:
    """Print the table. Return 1 if a row fails, or exceeds its bound."""
    parser = argparse.ArgumentParser(prog="python -m tests.properties.families")
    parser.add_argument("--left", action="store_true", help="only rows that the record does not have")
    parser.add_argument("--part", default="1/1", help="every so many-th row, such as 2/3")
    parser.add_argument("words", nargs="*", help="in the names of the rows")
    asked = parser.parse_args(argv)
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    from tests.properties.families import record
    from tests.properties.families.measure import BOUND, deviation, run
    from tests.properties.families.table import ROWS
    from tests.support.ranks import RankError

    part, parts = map(int, asked.part.split("/"))
    done = record.read() if asked.left else {}
    names = [name for name in _in_turn(ROWS) if all(word in name for word in asked.words) and name not in done]
    print(f"{'row':90} {'ranks':>5} {'loss':>8} {'norm':>8} {'weights':>8} {'s':>5}")
    wrong = 0
    for name in names[part - 1 :: parts]:
        began, row = time.monotonic(), ROWS[name]
        try:
            off = deviation(row, run(row))
        except (RankError, AssertionError) as error:
            print(f"{name:90} {row.world:5} FAILS {error}", flush=True)
            wrong += 1
            continue
        bad = not all(value <= most for value, most in zip(off, BOUND, strict=True))
        wrong += bad
        if not bad:
            record.add(name, off._asdict())
        shown = " ".join(f"{value:8.1e}" for value in off)
        print(f"{name:90} {row.world:5} {shown} {time.monotonic() - began:5.1f}{'  OUT' * bad}", flush=True)
    return int(wrong > 0)


def _in_turn(rows: Mapping[str, Row]) -> list[str]:
    """Return the first row of each family, then the second of each, so that an error in a family shows early."""
    seen = Counter[str]()
    turns = {}
    for name, row in rows.items():
        turns[name] = seen[row.family]
        seen[row.family] += 1
    return sorted(rows, key=turns.__getitem__)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
