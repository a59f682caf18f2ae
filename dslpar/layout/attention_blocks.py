"""Which blocks of queries and keys attention computes, and which of them need a mask: attention's work, as data.

A block is a rectangle of (queries, keys). Most are `full`: every query attends to every key; what no query attends to
is no block. A rank's own tokens under a causal mask are one `causal` block, whose mask the kernels know. All else is
cut into tiles of at most `TILE` tokens a side, of which only those on an edge are `masked`: so the masks that are made
never grow with the sequence. (That tiles are sorted into these three is FlexAttention's block mask, arXiv 2412.05496.)

    >>> [str(block) for block in blocks((Run(0, 4), Run(12, 4)), (Run(4, 8),), Pattern(causal=True))]
    ['4-8 to 0-8 full']
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from dslpar.core.named_tuple import NamedTuple
from dslpar.layout.token_order import Run, Runs

TILE = 1024
"""Tokens a side of the largest block that has a mask."""

Kind = Literal["full", "causal", "masked"]


class Pattern(NamedTuple):
    """Which keys a query attends to, as far as positions tell."""

    causal: bool = True
    """Whether to none that come after it."""
    window: int | None = None
    """Whether to none that are this far away or further: `sliding_window` of transformers' configs."""
    by_token: bool = False
    """Whether it depends on the tokens besides: on padding, or on documents."""

    def relation(self, queries: Run, keys: Run) -> Literal["none", "full", "partial"]:
        """Return whether queries attend to keys, by positions: none to any, all to all, or something between."""
        nearest, furthest = queries.first - (keys.end - 1), queries.end - 1 - keys.first
        least = -self.window if self.window is not None else None
        least = -1 if self.causal else least
        if (least is not None and furthest <= least) or (self.window is not None and nearest >= self.window):
            return "none"
        if (least is None or nearest > least) and (self.window is None or furthest < self.window):
            return "full"
        return "partial"


class Block(NamedTuple):
    """A rectangle of attention, in places of what a rank stores."""

    rows: tuple[int, int]
    """Of queries: where they begin, and the end."""
    columns: tuple[int, int]
    """Of keys and values."""
    kind: Kind
    queries: Run
    """Positions; of a full block of several runs, the first one's."""
    keys: Run
    """Likewise."""

    def __str__(self) -> str:
        """Return places and kind."""
        (first, end), (first_key, end_key) = self.rows, self.columns
        return f"{first}-{end} to {first_key}-{end_key} {self.kind}"


def blocks(queries: Runs, keys: Runs, pattern: Pattern, *, tiled: bool = False, tile: int = TILE) -> list[Block]:
    """Return the blocks of a rank's queries and of keys, in both of which positions ascend.

    `tiled`: no block of any kind is larger than a tile, for what has no fused kernel.
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
    """Yield (place, run), cut into tiles."""
    place = 0
    for run in tokens:
        for first in range(run.first, run.end, tile or run.length):
            length = min(tile or run.length, run.end - first)
            yield place, Run(first, length)
            place += length


def _rows_of_blocks(
    queries: list[tuple[int, Run]], keys: list[tuple[int, Run]], pattern: Pattern, *, join: bool = True
) -> list[list[Block]]:
    """Return, for each run of queries, its blocks; full ones that follow one another are one."""
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
    """Join neighbouring runs of queries that attend to the same keys: one large product instead of two."""
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
