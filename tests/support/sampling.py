"""Which rows of a long table `make test` runs; `make prove` runs all of them.

@pytest.mark.parametrize("layout", sampled(LAYOUTS, {"1d-2", "2d-4"}))
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from typing import Any

import pytest


def sampled(
    rows: Iterable[Any], each_time: Container[Any] | Callable[[Any], bool], *, named: Callable[[Any], str] | None = None
) -> list[Any]:
    """Rows as parameters: those in `each_time`, or for which it holds, run each time, the others with `make prove`.

    A row that is a tuple has a value for each argument of the test. `named` gives a row's id; without, pytest does.
    """
    chosen = each_time if callable(each_time) else each_time.__contains__
    return [
        pytest.param(
            *(row if type(row) is tuple else (row,)),
            marks=[] if chosen(row) else [pytest.mark.prove],
            id=named(row) if named else None,
        )
        for row in rows
    ]
