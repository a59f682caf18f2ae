"""Conversations put into rows of one length: best fit, the longest first.

Each goes where the least room is left that holds it, else into a new row: at most 11/9 of the fewest rows, and 1
(Johnson, 1974). That training data are packed this way comes from "Fewer Truncations Improve Language Modeling" (arXiv
2404.10830), and TRL and NeMo do it so; here it takes no seed, and the run's order is of the rows.

>>> best_fit_decreasing([3, 5, 2, 2], 7)
[[1, 2], [0, 3]]
"""

from __future__ import annotations

from collections.abc import Sequence


def best_fit_decreasing(lengths: Sequence[int], size: int) -> list[list[int]]:
    """Return rows of indices of `lengths`, each from 1 to `size`: no row is longer than `size` in all."""
    rows: list[list[int]] = []
    with_room: list[list[int]] = [[] for _ in range(size)]
    """Rows by the room that is left in them."""
    rooms = 0
    """Bit r: a row has room r. Shifted and isolated, the lowest bit is the best fit: no search tree is needed."""
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
