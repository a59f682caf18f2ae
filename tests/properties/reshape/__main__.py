"""`python -m tests.properties.reshape [WORD...]`: run every pair whose names have all words, and print its deviation
from one run.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from functools import cache
from pathlib import Path
from typing import Any

from tests.properties.invariance.layouts import bound_of
from tests.properties.reshape.layouts import LAYOUTS, PAIRS


def main(words: list[str]) -> int:
    """Print the table. Return 1 if a pair exceeds its bound, or a tensor differs from the saved one."""
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    from tests.properties.reshape.save_and_resume import deviation, resumed_under, saved_under

    @cache
    def save(name: str) -> Any:
        return saved_under(LAYOUTS[name], folder_of(name))

    def folder_of(name: str) -> Path:
        return Path(made, str(list(LAYOUTS).index(name)))

    wrong = 0
    print(f"{'saved under':40} {'resumed under':40} {'tensors':>7} {'loss':>8} {'norm':>8} {'s':>5}")
    with tempfile.TemporaryDirectory() as made:
        for source, target in PAIRS:
            if not all(word in f"{source} -> {target}" for word in words):
                continue
            began = time.monotonic()
            before, after = save(source), resumed_under(LAYOUTS[target], folder_of(source))
            differ, loss, norm = deviation(LAYOUTS[target], before, after)
            bound = bound_of(LAYOUTS[target])
            bad = bool(differ) or not (loss <= bound.loss and norm <= bound.grad_norm)
            wrong += bad
            same = "equal" if not differ else str(len(differ))
            took = time.monotonic() - began
            print(f"{source:40} {target:40} {same:>7} {loss:8.1e} {norm:8.1e} {took:5.1f}{'  OUT' * bad}", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
