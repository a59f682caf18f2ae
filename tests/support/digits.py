"""scikit-learn's digits, read from its file: importing scikit-learn takes two seconds per process."""

from __future__ import annotations

from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Digits(NamedTuple):
    """1,797 scans of handwritten digits, as in `sklearn.datasets.load_digits`."""

    images: NDArray[np.float64]
    """[samples, 8, 8], from 0 to 16."""
    target: NDArray[np.int64]
    """[samples], from 0 to 9."""


@lru_cache
def load_digits() -> Digits:
    """Return all digits in their order."""
    rows = np.loadtxt(folder() / "datasets" / "data" / "digits.csv.gz", delimiter=",")
    return Digits(rows[:, :-1].reshape(-1, 8, 8), rows[:, -1].astype(np.int64))


def folder() -> Path:
    """Return the folder of the package sklearn."""
    spec = find_spec("sklearn")
    assert spec is not None, "scikit-learn is not installed"
    assert spec.origin is not None
    return Path(spec.origin).parent
