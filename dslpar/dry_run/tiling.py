"""Check that the shards of all ranks tile a parameter: every element is in exactly one shard, up to equal copies.

    >>> from dslpar.core.mesh import TensorMesh
    >>> from dslpar.layers.placement import Placement
    >>> tensor = TensorMesh(q=2, y=2, mode="2d", residual="hidden")
    >>> tiling_errors(Placement(tensor, (8, 4), (("y", "q"), ("z",))))
    []
    >>> tiling_errors(Placement(tensor, (8, 4), (("y", "y"), ("z",))))
    ['dim 0, sharded over y y: 4 of 8 indices are on no rank, such as 2']

The check builds no shards. A placement splits each dim of a parameter separately, so a rank holds a *box*: some indices
of each dim, in all combinations. The indices of one dim are a *piece*. `Placement.cut` gives a rank's piece when it is
applied to the vector of all indices. Boxes tile the parameter under two conditions:

1. On every dim, different pieces are disjoint, and together they cover the dim.
2. Every combination of pieces, one per dim, is on some rank.

Tensor ranks are checked, and the data ranks over which experts are divided ("e"). Nothing else is split over data and
pipeline ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import pairwise, product

import numpy as np
import torch

from dslpar.core.mesh import TENSOR_AXES
from dslpar.layers.placement import Letters, Placement
from dslpar.layers.token_exchange import EXPERT_AXES

Ranges = tuple[tuple[int, int], ...]
"""A piece: indices of one dim as half-open ranges."""


def tiling_errors(placement: Placement) -> list[str]:
    """Return errors in a placement, or an empty list.

    Errors are indices on no rank or in two pieces, boxes on no rank, and boxes without exactly one owner.
    """
    tensor = placement.tensor
    sizes = {letter: getattr(tensor, letter) for letter in EXPERT_AXES}
    if unknown := [letter for letters in placement.cuts for letter in letters if letter not in sizes]:
        return [f"sharded over {' '.join(unknown)}, which is not an axis of the cuboid"]
    if len(placement.cuts) != len(placement.shape):
        return [f"{len(placement.cuts)} cuts of {len(placement.shape)} dims"]
    try:
        dims = [_pieces(placement, dim, sizes) for dim in range(len(placement.shape))]
    except (AssertionError, RuntimeError) as error:  # a length that does not divide
        return [str(error)]
    errors = [error for dim, pieces in enumerate(dims) for error in _dim_errors(placement, dim, pieces)]
    return errors or _box_errors(placement, dims, sizes)


def _pieces(placement: Placement, dim: int, sizes: Mapping[str, int]) -> dict[tuple[int, ...], Ranges]:
    """Return the pieces of one dim, by a rank's coordinates on the axes that split the dim."""
    letters = placement.cuts[dim]
    first = dim == 0
    alone = Placement(
        placement.tensor,
        placement.shape[dim : dim + 1],
        (letters,),
        blocks=placement.blocks if first else (),
        padded_rows=placement.padded_rows if first else None,
    )
    indices = torch.arange(1, placement.shape[dim] + 1)  # 0 is padding
    found: dict[tuple[int, ...], Ranges] = {}
    for coord in _coords(letters, sizes):
        piece = alone.cut(indices, coord)
        found[_on(coord, letters)] = _ranges(piece)
    return found


def _ranges(piece: torch.Tensor) -> Ranges:
    """Return the ranges of indices that a piece holds. Its values are the indices plus 1; a 0 is padding."""
    held = piece.numpy()  # single-threaded: torch would start a thread pool for these few numbers
    held = held[held > 0] - 1
    breaks = [0, *(np.flatnonzero(np.diff(held) != 1) + 1).tolist(), len(held)]
    return tuple((int(held[begin]), int(held[end - 1]) + 1) for begin, end in pairwise(breaks) if end > begin)


def _coords(letters: Letters, sizes: Mapping[str, int]) -> list[dict[str, int]]:
    """Return all coordinates on the axes `letters`, with index 0 on the other axes."""
    axes = {_COORD.get(letter, letter): sizes[letter] for letter in letters}
    origin = dict.fromkeys(("data", *TENSOR_AXES), 0)
    return [origin | dict(zip(axes, at, strict=True)) for at in product(*map(range, axes.values()))]


def _on(coord: Mapping[str, int], letters: Letters) -> tuple[int, ...]:
    return tuple(coord[_COORD.get(letter, letter)] for letter in dict.fromkeys(letters))


_COORD = {"e": "data"}
"""Axis of a rank's coordinate for a letter of a placement: e is the fast part of the data axis."""


def _dim_errors(placement: Placement, dim: int, pieces: Mapping[tuple[int, ...], Ranges]) -> list[str]:
    """Check that different pieces of a dim are disjoint, and that together they cover the dim."""
    length, name = placement.shape[dim], f"dim {dim}, sharded over {' '.join(placement.cuts[dim]) or 'nothing'}"
    covered, missing, twice = 0, Counter[int](), Counter[int]()
    for begin, end in [*sorted(held for piece in dict.fromkeys(pieces.values()) for held in piece), (length, length)]:
        if begin > covered:
            missing[covered] = begin - covered
        if begin < covered:
            twice[begin] = min(covered, end) - begin
        covered = max(covered, end)
    return [
        f"{name}: {wrong.total()} of {length} indices are {kind}, such as {min(wrong)}"
        for kind, wrong in (("on no rank", missing), ("in two shards", twice))
        if wrong
    ]


def _box_errors(placement: Placement, dims: list[dict[tuple[int, ...], Ranges]], sizes: Mapping[str, int]) -> list[str]:
    """Check that every combination of pieces is on equally many ranks, and that one of these ranks owns it."""
    boxes: Counter[tuple[Ranges, ...]] = Counter()
    owners: Counter[tuple[Ranges, ...]] = Counter()
    for coord in _coords(EXPERT_AXES if placement.is_expert else TENSOR_AXES, sizes):
        box = tuple(pieces[_on(coord, letters)] for pieces, letters in zip(dims, placement.cuts, strict=True))
        boxes[box] += 1
        owners[box] += placement.owner(coord)
    wanted = list(product(*(dict.fromkeys(pieces.values()) for pieces in dims)))
    errors = []
    if missing := sum(box not in boxes for box in wanted):
        errors.append(f"{missing} of {len(wanted)} shards are on no rank: two dims are sharded over one axis")
    if len(set(boxes.values())) > 1:
        errors.append(f"shards have from {min(boxes.values())} to {max(boxes.values())} copies")
    if wrong := sum(owners[box] != 1 for box in boxes):
        errors.append(
            f"{wrong} of {len(boxes)} shards have no owner, or several: norms would not count each element once"
        )
    return errors
