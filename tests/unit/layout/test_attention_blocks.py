"""Attention blocks against single pairs of tokens: each attending pair is in one block, and no other work."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dslpar.layout.attention_blocks import TILE, Block, Pattern, blocks
from dslpar.layout.token_order import Run, Runs, runs

Pair = tuple[int, int]


def positions(tokens: Runs) -> list[int]:
    return [position for run in tokens for position in range(run.first, run.end)]


def attends(query: int, key: int, pattern: Pattern) -> bool:
    near = pattern.window is None or abs(query - key) < pattern.window
    return near and (not pattern.causal or key <= query)


def pairs(block: Block, queries: Runs, keys: Runs, pattern: Pattern) -> Iterator[Pair]:
    """Yield the pairs that a kernel would compute: in a masked block, those that its mask allows."""
    of_queries, of_keys = positions(queries), positions(keys)
    for row, column in product(range(*block.rows), range(*block.columns)):
        query, key = of_queries[row], of_keys[column]
        if block.kind == "masked":
            assert query == block.queries.first + row - block.rows[0], "masks are made of the block's positions"
            assert key == block.keys.first + column - block.columns[0]
        if block.kind == "full" or (attends(query, key, pattern) if block.kind == "masked" else column <= row):
            yield row, column


@st.composite
def attention(draw: st.DrawFn) -> tuple[Runs, Runs, Pattern, bool, int]:
    """Draw the queries and the keys of a rank, and their sharding."""
    ring = draw(st.integers(1, 5))
    length, order = ring * draw(st.integers(1, 9)), draw(st.sampled_from([1, ring]))
    queries, keys = (runs(length, order, draw(st.integers(0, ring - 1)), ring) for _ in range(2))
    window = draw(st.none() | st.integers(1, 12))
    pattern = Pattern(draw(st.booleans()), window, draw(st.booleans()))
    return queries, keys, pattern, draw(st.booleans()), draw(st.sampled_from([2, 3, 5, TILE]))


@settings(max_examples=600)
@given(attention())
def test_each_pair_that_attends_is_in_one_block(case: tuple[Runs, Runs, Pattern, bool, int]) -> None:
    queries, keys, pattern, tiled, tile = case
    found = blocks(queries, keys, pattern, tiled=tiled, tile=tile)
    computed = [pair for block in found for pair in pairs(block, queries, keys, pattern)]
    expected = {
        (row, column)
        for (row, query), (column, key) in product(enumerate(positions(queries)), enumerate(positions(keys)))
        if attends(query, key, pattern)
    }
    assert len(computed) == len(set(computed))
    assert set(computed) == expected


@settings(max_examples=300)
@given(attention())
def test_what_has_a_mask_is_at_most_a_tile(case: tuple[Runs, Runs, Pattern, bool, int]) -> None:
    queries, keys, pattern, tiled, tile = case
    for block in blocks(queries, keys, pattern, tiled=tiled, tile=tile):
        sides = [end - first for first, end in (block.rows, block.columns)]
        assert max(sides) <= tile or not (tiled or block.kind == "masked")
        assert not pattern.by_token or block.kind == "masked"


@pytest.mark.parametrize("ring", [2, 3, 4, 8])
def test_a_step_of_a_zigzag_ring_is_one_block_without_a_mask(ring: int) -> None:
    """So each step is one call of a fused kernel, and all have equally many products, except the rank's own block."""
    length = 1 << 15
    for index, step in product(range(ring), range(ring)):
        own, others = (runs(length * ring, ring, rank, ring) for rank in (index, (index - step) % ring))
        (block,) = blocks(own, others, Pattern(causal=True))
        assert block.kind == ("causal" if step == 0 else "full")
        if step:
            (first, end), (first_key, end_key) = block.rows, block.columns
            assert (end - first) * (end_key - first_key) == length**2 // 2


def test_a_window_needs_few_masks() -> None:
    """32,768 tokens attend to 4,096 each: masks are only needed along two edges of a band."""
    found = blocks((Run(0, 1 << 15),), (Run(0, 1 << 15),), Pattern(causal=True, window=1 << 12))
    tiles = (1 << 15) // TILE
    assert sum(block.kind == "masked" for block in found) <= 2 * tiles
    assert sum(block.kind == "full" for block in found) <= tiles
