"""Which rows of a long table `make test` runs; `make prove` runs all of them.

@pytest.mark.parametrize("layout", sampled(LAYOUTS, {"1d-2", "2d-4"}))
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Container, Hashable, Iterable, Mapping
from collections.abc import Set as AbstractSet
from typing import Any, TypeVar

import pytest

Row = TypeVar("Row")


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


def greedy_cover(seen: Mapping[Row, AbstractSet[Hashable]], cost: Callable[[Row], float]) -> list[Row]:
    """Rows in which all is seen that is seen in any: each time the one with the most that is new for its cost.

    Of equals it is the first. What is new in a row only falls, so a row is counted again only when it leads by what was
    new before (Minoux, "Accelerated greedy algorithms for maximizing submodular set functions", 1978).
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
