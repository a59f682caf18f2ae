"""Pack conversations into rows of one length by best-fit decreasing.

Starting with the longest, each conversation goes into the row with the least room that holds it, or into a new row.
This takes at most 11/9 of the fewest possible rows, plus 1 (Johnson, 1974). Packing training data in this way comes
from "Fewer Truncations Improve Language Modeling" (arXiv 2404.10830). TRL and NeMo do the same. Here packing takes no
seed, and the run's order is an order of the rows.

>>> best_fit_decreasing([3, 5, 2, 2], 7)
[[1, 2], [0, 3]]
"""

from __future__ import annotations

from collections.abc import Sequence


def best_fit_decreasing(lengths: Sequence[int], size: int) -> list[list[int]]:
    """Return rows of indices of `lengths`. Lengths are from 1 to `size`, and no row's total exceeds `size`."""
    rows: list[list[int]] = []
    with_room: list[list[int]] = [[] for _ in range(size)]
    """Rows by their remaining room."""
    rooms = 0
    """Bit r is set if a row has room r. The lowest bit from `length` on is the best fit, without a search tree."""
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        length = lengths[index]
        assert 0 < length <= size
        if fitting := rooms >> length:
            room = length + (fitting & -fitting).bit_length() - 1
            row = with_room[room].pop()
            if not with_room[room]:
                rooms &= ~(1 << room)
        else:
            room, row = size, len(rows)
            rows.append([])
        rows[row].append(index)
        if left := room - length:
            with_room[left].append(row)
            rooms |= 1 << left
    return [sorted(row) for row in rows]
