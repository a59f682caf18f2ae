"""`python -m tests.properties.invariance [--compiled | --overlap] [WORD...]`: runs every layout whose name holds all
words; prints how far each is off. `--compiled`, `--overlap`: those that can, with what the field of a Layout says.
"""

from __future__ import annotations

import os
import sys
import time

from dslpar.models.gpt.section import GPT
from tests.properties.invariance.layouts import LAYOUTS, MODELS, Layout, bound_of


def can(layout: Layout, options: set[str]) -> bool:
    """Whether a row may run so: overlapped where there is something to overlap; compiled, but not at ZeRO 3."""
    own = isinstance(MODELS[layout.model](layout.tied), GPT)
    group = layout.parallel.get("tensor")
    if "overlap" in options and (group is None or group.mode == "sequence"):
        return False
    return "compiled" not in options or (own and layout.zero < 3)


def main(words: list[str]) -> int:
    """Prints the table; 1 if a row is out of its bound."""
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    from tests.properties.invariance.measure import deviation, run

    print(f"{'layout':48} {'ranks':>5} {'loss':>8} {'norm':>8} {'weights':>8} {'s':>5}")
    wrong = 0
    options = {word.removeprefix("--") for word in words if word.startswith("--")}
    for name, layout in LAYOUTS.items():
        if not all(word in name for word in words if not word.startswith("--")) or not can(layout, options):
            continue
        layout = layout._replace(**dict.fromkeys(options, True))
        began = time.monotonic()
        off, bound = deviation(layout, run(layout)), bound_of(layout)
        bad = not all(value <= most for value, most in zip(off, bound, strict=True))
        wrong += bad
        shown = " ".join(f"{value:8.1e}" for value in off)
        print(f"{name:48} {layout.world:5} {shown} {time.monotonic() - began:5.1f}{'  OUT' * bad}", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
