"""`python -m tests.properties.invariance [WORD...]`: run every layout whose name has all words, and print its
deviation.
"""

from __future__ import annotations

import os
import sys
import time

from tests.properties.invariance.layouts import LAYOUTS, bound_of


def main(words: list[str]) -> int:
    """Print the table. Return 1 if a row exceeds its bound."""
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    from tests.properties.invariance.run_and_reference import deviation, run

    print(f"{'layout':48} {'ranks':>5} {'loss':>8} {'norm':>8} {'weights':>8} {'s':>5}")
    wrong = 0
    for name, layout in LAYOUTS.items():
        if not all(word in name for word in words):
            continue
        began = time.monotonic()
        off, bound = deviation(layout, run(layout)), bound_of(layout)
        bad = not all(value <= most for value, most in zip(off, bound, strict=True))
        wrong += bad
        shown = " ".join(f"{value:8.1e}" for value in off)
        print(f"{name:48} {layout.world:5} {shown} {time.monotonic() - began:5.1f}{'  OUT' * bad}", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
