"""Sampling of long tables: `make test` runs a sample of the rows, `make prove` all of them.

@pytest.mark.parametrize("layout", sampled(LAYOUTS, {"1d-2", "2d-4"}))

`tests.support.coverage_by_test` lists the rows that reach nothing that other tests do not reach: `rows_of_prove`.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Container, Hashable, Iterable, Mapping
from collections.abc import Set as AbstractSet
from typing import Any, TypeVar

import pytest

from tests.support.paths import TABLES

ROWS_OF_PROVE = TABLES / "rows_of_prove.txt"
Row = TypeVar("Row")


def rows_of_prove() -> frozenset[str]:
    """Return the node ids of the rows that `make test` leaves to `make prove`."""
    return frozenset(line for line in ROWS_OF_PROVE.read_text().splitlines() if not line.startswith("#"))


def sampled(
    rows: Iterable[Any], each_time: Container[Any] | Callable[[Any], bool], *, named: Callable[[Any], str] | None = None
) -> list[Any]:
    """Return rows as pytest parameters. Rows in `each_time`, or for which it holds, always run, others in `make prove`.

    A tuple row has a value per test argument. `named` returns a row's id, by default pytest's.
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


def greedy_cover(seen: Mapping[Row, AbstractSet[Hashable]], cost: Callable[[Row], float]) -> list[Row]:
    """Return rows that together see everything any row sees, each time the row with the most new per cost.

    Ties go to the first. The number of new items in a row only falls, so a row is counted again only when it leads by
    its old number (Minoux, "Accelerated greedy algorithms for maximizing submodular set functions", 1978).
    """
    rows, left = list(seen), set[Hashable]().union(*seen.values())
    leading = [(-len(seen[row]) / cost(row), number) for number, row in enumerate(rows)]
    heapq.heapify(leading)
    chosen = list[Row]()
    while left:
        before, number = heapq.heappop(leading)
        row = rows[number]
        now = -len(seen[row] & left) / cost(row)
        if now > before:
            heapq.heappush(leading, (now, number))
        else:
            left -= seen[row]
            chosen.append(row)
    return chosen
