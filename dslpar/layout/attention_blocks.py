"""Blocks of queries and keys that attention computes, and which of them need a mask, as data.

A block is a rectangle of (queries, keys). Most blocks are `full`: every query attends to every key. Keys that no query
attends to are in no block. A rank's own tokens under a causal mask are one `causal` block, whose mask is built into the
kernels. All other pairs are split into tiles of at most `TILE` tokens per side. Only tiles on an edge of the mask are
`masked`, so masks never grow with the sequence. (FlexAttention's block mask, arXiv 2412.05496, has the same three
kinds of tiles.)

    >>> [str(block) for block in blocks((Run(0, 4), Run(12, 4)), (Run(4, 8),), Pattern(causal=True))]
    ['4-8 to 0-8 full']
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

from dslpar.layout.token_order import Run, Runs

TILE = 1024
"""Tokens per side of the largest block with a mask."""

Kind = Literal["full", "causal", "masked"]


class Pattern(NamedTuple):
    """Rule for which keys a query attends to, by position."""

    causal: bool = True
    """Whether a query does not attend to later keys."""
    window: int | None = None
    """Distance from which on a query does not attend to keys: `sliding_window` in transformers' configs."""
    by_token: bool = False
    """Whether attention also depends on the tokens, because of padding or documents."""

    def relation(self, queries: Run, keys: Run) -> Literal["none", "full", "partial"]:
        """Return whether, by position, queries attend to none of the keys, to all of them, or to some."""
        nearest, furthest = queries.first - (keys.end - 1), queries.end - 1 - keys.first
        least = -self.window if self.window is not None else None
        least = -1 if self.causal else least
        if (least is not None and furthest <= least) or (self.window is not None and nearest >= self.window):
            return "none"
        if (least is None or nearest > least) and (self.window is None or furthest < self.window):
            return "full"
        return "partial"


class Block(NamedTuple):
    """Rectangle of attention, in indices of the tokens that a rank stores."""

    rows: tuple[int, int]
    """Start and end index of the queries."""
    columns: tuple[int, int]
    """Start and end index of the keys and values."""
    kind: Kind
    queries: Run
    """Positions of the queries; only the first run's, if a full block has several runs."""
    keys: Run
    """Positions of the keys; only the first run's, if a full block has several runs."""

    def __str__(self) -> str:
        """Return the indices and the kind."""
        (first, end), (first_key, end_key) = self.rows, self.columns
        return f"{first}-{end} to {first_key}-{end_key} {self.kind}"


def blocks(queries: Runs, keys: Runs, pattern: Pattern, *, tiled: bool = False, tile: int = TILE) -> list[Block]:
    """Return the blocks of a rank's queries and keys; positions must ascend in both.

    `tiled` limits blocks of every kind to one tile, for attention without a fused kernel.
    """
    by_position = pattern.window is None and not pattern.by_token
    if not tiled and by_position and pattern.causal and queries == keys:
        length = sum(run.length for run in queries)
        return [Block((0, length), (0, length), "causal", queries[0], keys[0])]
    if not tiled and by_position:
        found = _rows_of_blocks(list(_placed(queries)), list(_placed(keys)), pattern)
        if all(block.kind == "full" for row in found for block in row):
            return [block for row in _joined_rows(found) for block in row]
    rows = list(_placed(queries, tile))
    found = _rows_of_blocks(rows, list(_placed(keys, tile)), pattern, join=not tiled)
    return [block for row in found for block in row]


def _placed(tokens: Runs, tile: int | None = None) -> Iterator[tuple[int, Run]]:
    """Yield (index, run), split into tiles of `tile` tokens if it is set."""
    place = 0
    for run in tokens:
        for first in range(run.first, run.end, tile or run.length):
            length = min(tile or run.length, run.end - first)
            yield place, Run(first, length)
            place += length


def _rows_of_blocks(
    queries: list[tuple[int, Run]], keys: list[tuple[int, Run]], pattern: Pattern, *, join: bool = True
) -> list[list[Block]]:
    """Return the blocks of each run of queries; `join` merges adjacent full blocks."""
    found = []
    for place, run in queries:
        row: list[Block] = []
        for key_place, key_run in keys:
            relation = pattern.relation(run, key_run)
            if relation == "none":
                continue
            kind: Kind = "full" if relation == "full" and not pattern.by_token else "masked"
            columns = key_place, key_place + key_run.length
            if join and row and kind == row[-1].kind == "full" and row[-1].columns[1] == key_place:
                row[-1] = row[-1]._replace(columns=(row[-1].columns[0], columns[1]))
                continue
            row.append(Block((place, place + run.length), columns, kind, run, key_run))
        found.append(row)
    return found


def _joined_rows(rows: list[list[Block]]) -> list[list[Block]]:
    """Merge neighbouring runs of queries that attend to the same keys, for one large product instead of two."""
    joined: list[list[Block]] = []
    for row in rows:
        above = joined[-1] if joined else []
        if above and [block.columns for block in above] == [block.columns for block in row]:
            joined[-1] = [
                one._replace(rows=(one.rows[0], other.rows[1])) for one, other in zip(above, row, strict=True)
            ]
            continue
        joined.append(row)
    return joined
