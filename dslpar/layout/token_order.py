"""Order in which ranks store the tokens of a split sequence, and the causal attention that each rank computes.

If a sequence is split into n consecutive pieces, the last rank attends to all tokens and the first only to its own. The
busiest rank then computes (2n - 1)/n times the mean. In zigzag order a rank stores two pieces, one from each end of the
sequence, so that every rank has the same work (as in Megatron-LM's context parallelism and zhuzilin's
ring-flash-attention). This module describes a rank's tokens as `Run`s of positions. Attention derives its blocks from
these runs.

    >>> [runs(16, ring=2, index=index, count=2) for index in (0, 1)]
    [(Run(first=0, length=4), Run(first=12, length=4)), (Run(first=4, length=8),)]

The two pieces need not be equal: with an odd number of tokens per rank, the early piece is one token longer. So
sequences must divide only by n, while Megatron-LM requires 2n.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple


class Run(NamedTuple):
    """Consecutive tokens of a sequence."""

    first: int
    """Position of the first token."""
    length: int
    """Number of tokens."""

    @property
    def end(self) -> int:
        """Position after the last token."""
        return self.first + self.length


Runs = tuple[Run, ...]
"""Tokens that a rank stores, in this order; positions ascend."""


def stored_order(length: int, ring: int) -> list[Run]:
    """Return the runs of a sequence of `length` tokens in zigzag order, rank by rank; one run if `ring` is 1."""
    assert length % ring == 0, f"{length} tokens over {ring} ranks"
    if ring == 1:
        return [Run(0, length)]
    late = length // ring // 2
    early = length // ring - late
    pairs = ((Run(rank * early, early), Run(length - (rank + 1) * late, late)) for rank in range(ring))
    return [run for pair in pairs for run in pair]


def runs(length: int, ring: int, index: int, count: int) -> Runs:
    """Return the `index`-th of `count` equal parts of a sequence in zigzag order over `ring` ranks."""
    assert length % count == 0, f"{length} tokens in {count} parts"
    part = length // count
    return tuple(joined(between(stored_order(length, ring), index * part, (index + 1) * part)))


def between(order: Sequence[Run], start: int, stop: int) -> Iterator[Run]:
    """Yield the runs of the tokens at index `start` up to, but not including, index `stop` of an order."""
    place = 0
    for run in order:
        first, end = max(start - place, 0), min(stop - place, run.length)
        if first < end:
            yield Run(run.first + first, end - first)
        place += run.length


def joined(order: Iterator[Run]) -> Iterator[Run]:
    """Merge runs whose positions are consecutive."""
    whole: Run | None = None
    for run in order:
        if whole is not None and whole.end == run.first:
            whole = Run(whole.first, whole.length + run.length)
            continue
        if whole is not None:
            yield whole
        whole = run
    if whole is not None:
        yield whole


def place_of(position: int, tokens: Runs) -> int | None:
    """Return the index of a position among the stored `tokens` of a rank; None if the rank does not store it."""
    place = 0
    for run in tokens:
        if run.first <= position < run.end:
            return place + position - run.first
        place += run.length
    return None


def causal_pairs(queries: Runs) -> int:
    """Return the number of (query, key) pairs of a rank's queries under a causal mask: the work of its attention."""
    # A query at position p attends to p + 1 keys.
    return sum(run.length * (run.first + run.end + 1) // 2 for run in queries)
