"""`python -m tests.properties.schedules [WORD...]`: run the rows whose names have all words, and print deviations."""

from __future__ import annotations

import os
import sys
import time


def main(words: list[str]) -> int:
    """Print the table. Return 1 if a row fails, or exceeds its bound."""
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    from tests.properties.schedules.measure import BOUND, run
    from tests.properties.schedules.table import ROWS, worlds
    from tests.support.ranks import RankError

    wrong = 0
    print(f"{'row':110} {'loss':>8} {'norm':>8} {'gradient':>8}", flush=True)
    for world, rows in worlds(name for name in ROWS if all(word in name for word in words)).items():
        began = time.monotonic()
        try:
            deviations = run(rows)
        except (RankError, AssertionError) as error:
            print(f"{world}: FAILS {error}", flush=True)
            wrong += 1
            continue
        for row, off in zip(rows, deviations, strict=True):
            bad = not all(value <= most for value, most in zip(off, BOUND, strict=True))
            wrong += bad
            shown = " ".join(f"{value:8.1e}" for value in off)
            print(f"{row.name:110} {shown}{'  OUT' * bad}")
        print(f"{world}: {len(rows)} rows on {rows[0].world} ranks, {time.monotonic() - began:.0f} s", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
