"""Nearest multiples of a size, against a search of all; absurdly large sizes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dslpar.layout.nearest import LARGEST, multiples


@given(st.integers(1, 500), st.integers(1, 60))
def test_multiples_are_the_next_ones_below_and_above(value: int, by: int) -> None:
    every = range(by, value + by + 1, by)
    below, above = [each for each in every if each < value], [each for each in every if each >= value]
    assert multiples(value, by) == below[-1:] + above[:1]


@given(st.integers(2**31, 2**80), st.integers(1, 2**70))
def test_multiples_of_huge_sizes_are_none_that_is_too_large(value: int, by: int) -> None:
    assert all(each <= LARGEST and each % by == 0 for each in multiples(value, by))
