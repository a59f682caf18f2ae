"""Every token is stored once, and in zigzag every rank has the same causal work."""

from __future__ import annotations

from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dslpar.layout.token_order import Run, causal_pairs, place_of, runs, stored_order

Cut = tuple[int, int]


@st.composite
def cuts(draw: st.DrawFn) -> Cut:
    """Draw (tokens, ranks of the ring), with equally many tokens per rank."""
    ring = draw(st.integers(1, 9))
    return ring * draw(st.integers(1, 12)), ring


def positions(tokens: tuple[Run, ...]) -> list[int]:
    return [position for run in tokens for position in range(run.first, run.end)]


@given(cuts(), st.data())
def test_parts_are_the_sequence(cut: Cut, data: st.DataObject) -> None:
    length, ring = cut
    count = data.draw(st.sampled_from([size for size in range(1, length + 1) if length % size == 0]))
    parts = [positions(runs(length, ring, index, count)) for index in range(count)]
    assert sorted(chain(*parts)) == list(range(length))
    assert {len(part) for part in parts} == {length // count}
    assert list(chain(*parts)) == positions(tuple(stored_order(length, ring)))


@given(cuts())
def test_positions_ascend_on_each_rank(cut: Cut) -> None:
    length, ring = cut
    for index in range(ring):
        own = positions(runs(length, ring, index, ring))
        assert own == sorted(own)


@given(cuts())
def test_the_first_token_is_the_first_rank_s_first(cut: Cut) -> None:
    """Class tokens are expected there."""
    assert runs(cut[0], cut[1], 0, cut[1])[0].first == 0


@given(cuts())
def test_causal_work_is_counted(cut: Cut) -> None:
    length, ring = cut
    own = [runs(length, ring, index, ring) for index in range(ring)]
    assert [causal_pairs(each) for each in own] == [sum(p + 1 for p in positions(each)) for each in own]
    assert sum(map(causal_pairs, own)) == length * (length + 1) // 2


@pytest.mark.parametrize("ring", [2, 3, 4, 8, 16])
def test_zigzag_balances_causal_work(ring: int) -> None:
    """Even pieces balance exactly, odd ones to a token's work. Unshuffled pieces do not: the last of 4 has 1.75 of the
    mean.
    """
    for each in (2, 64, 21, 63, 255):
        work = [causal_pairs(runs(each * ring, ring, index, ring)) for index in range(ring)]
        assert 1 <= max(work) / (sum(work) / ring) <= (1 + 1 / each if each % 2 else 1)
    pieces = [causal_pairs(runs(64 * 4, 1, index, 4)) for index in range(4)]
    assert max(pieces) / (sum(pieces) / 4) == pytest.approx(1.75, abs=0.01)


@given(cuts(), st.data())
def test_the_place_of_a_position(cut: Cut, data: st.DataObject) -> None:
    length, ring = cut
    own = runs(length, ring, data.draw(st.integers(0, ring - 1)), ring)
    where = [place_of(position, own) for position in range(length)]
    assert [where.index(place) for place in range(length // ring)] == positions(own)
    assert where.count(None) == length - length // ring
