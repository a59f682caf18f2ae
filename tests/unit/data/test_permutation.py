"""Computed permutations: each number once, for any size; small sets keep the drawn order."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dslpar.data import order
from dslpar.data.order import Permutations, epoch_permutation, sample_index
from dslpar.data.permutation import permuted


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 700), st.integers(0, 2**63), st.integers(0, 5))
def test_each_number_comes_once(size: int, seed: int, epoch: int) -> None:
    assert sorted(permuted(position, size, ("epoch", seed, epoch)) for position in range(size)) == list(range(size))


def test_epochs_and_seeds_differ_and_neighbours_part() -> None:
    orders = [[permuted(p, 1000, ("epoch", seed, epoch)) for p in range(1000)] for seed in (1, 2) for epoch in (0, 1)]
    assert len({tuple(each) for each in orders}) == 4
    for each in orders:
        assert sum(abs(b - a) for a, b in pairwise(each)) / 999 == pytest.approx(1000 / 3, rel=0.1)
        assert sum(number < 500 for number in each[:500]) == pytest.approx(250, abs=40)


def test_small_sets_keep_the_order_that_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [sample_index(k, 8, 1234) for k in range(8)] == epoch_permutation(8, 1234, 0).tolist()
    assert [Permutations(8, 1234).sample_index(k) for k in range(16)] == [sample_index(k, 8, 1234) for k in range(16)]
    monkeypatch.setattr(order, "MOST_DRAWN", 7)
    computed = [sample_index(k, 8, 1234) for k in range(16)]
    assert sorted(computed[:8]) == sorted(computed[8:]) == list(range(8))
    assert [Permutations(8, 1234).sample_index(k) for k in range(16)] == computed


def test_huge_sets_take_no_table() -> None:
    size = 10**13
    found = {sample_index(k, size, 7) for k in range(3 * size - 500, 3 * size + 500)}
    assert len(found) >= 999  # of two epochs
    assert all(0 <= number < size for number in found)
