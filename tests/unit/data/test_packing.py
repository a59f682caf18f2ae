"""Packing by brute force: nothing is lost or doubled, no row is too long, and rows are few."""

from __future__ import annotations

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from dslpar.data.packing import best_fit_decreasing

SIZE = 12
LENGTHS = st.lists(st.integers(1, SIZE), max_size=60)


def by_search(lengths: list[int], size: int) -> list[list[int]]:
    """Pack by best fit, longest first, with a search over every row."""
    rows: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        fitting = [row for row in rows if sum(lengths[each] for each in row) + lengths[index] <= size]
        if fitting:
            max(fitting, key=lambda row: sum(lengths[each] for each in row)).append(index)
        else:
            rows.append([index])
    return rows


def fewest(lengths: list[int], size: int) -> int:
    """Return the smallest number of rows, by dynamic programming over all subsets."""
    every = range(1 << len(lengths))
    sums = [sum(length for bit, length in enumerate(lengths) if mask >> bit & 1) for mask in every]
    best = [0] + [len(lengths)] * (len(every) - 1)
    for mask in every:
        part = mask
        while part:
            if sums[part] <= size:
                best[mask] = min(best[mask], best[mask ^ part] + 1)
            part = (part - 1) & mask
    return best[-1]


@given(LENGTHS)
def test_nothing_is_lost_or_doubled_and_no_row_is_too_long(lengths: list[int]) -> None:
    rows = best_fit_decreasing(lengths, SIZE)
    assert sorted(index for row in rows for index in row) == list(range(len(lengths)))
    assert all(0 < sum(lengths[index] for index in row) <= SIZE for row in rows)
    assert best_fit_decreasing(lengths, SIZE) == rows


@given(LENGTHS)
def test_it_is_best_fit_decreasing(lengths: list[int]) -> None:
    """Ties between rows with equal room do not matter: the rows' sums are the same."""
    rows, expected = best_fit_decreasing(lengths, SIZE), by_search(lengths, SIZE)
    assert sorted(sum(lengths[i] for i in row) for row in rows) == sorted(
        sum(lengths[i] for i in row) for row in expected
    )
    # for any two rows, the items of the emptier one do not all fit into the other
    sums = [sum(lengths[index] for index in row) for row in rows]
    assert all(one + other > SIZE for one, other in combinations(sums, 2))


@given(st.lists(st.integers(1, SIZE), min_size=1, max_size=8))
def test_it_takes_few_rows(lengths: list[int]) -> None:
    assert len(best_fit_decreasing(lengths, SIZE)) <= 11 / 9 * fewest(lengths, SIZE) + 1


def test_rooms_beyond_a_machine_word() -> None:
    lengths = [5000, 3000, 3000, 2192, 1]
    assert best_fit_decreasing(lengths, 8192) == [[0, 1, 4], [2, 3]]
