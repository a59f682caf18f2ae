"""Chunks: every stage has one rank, and a rank its stages in the order of the forward."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dslpar.layout.chunks import Chunks


@given(st.integers(1, 16), st.integers(1, 5))
def test_every_stage_is_held_by_one_rank(pipe: int, num: int) -> None:
    chunks = Chunks(pipe, num)
    held = [(stage, rank) for rank in range(pipe) for stage in chunks.held_by(rank)]
    assert sorted(held) == [(stage, chunks.rank_of(stage)) for stage in range(chunks.stages)]
    assert {len(chunks.held_by(rank)) for rank in range(pipe)} == {num}
    assert chunks.rank_of(chunks.last) == pipe - 1


@pytest.mark.parametrize("pipe", [1, 2, 5])
def test_with_one_chunk_stages_and_ranks_are_one(pipe: int) -> None:
    chunks = Chunks(pipe)
    assert [list(chunks.held_by(rank)) for rank in range(pipe)] == [[rank] for rank in range(pipe)]
    assert (chunks.stages, chunks.last) == (pipe, pipe - 1)
