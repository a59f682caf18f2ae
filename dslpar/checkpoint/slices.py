"""Geometry of local pieces: the elements of a full tensor that a rank holds, and overlaps of layouts. No torch.

A **local piece** is a rank's tensor-parallel shard of a tensor. A **box** describes it: for each dim, the segments of
the full tensor that it contains, in local order. A dim has several segments if several weights are fused in the tensor
and each is sharded separately (q, k and v). A segment may reach beyond the full shape: the elements beyond are padding,
which reads as zeros and is never exported. A **fragment** is a flat, row-major range of a local piece, such as a ZeRO
shard. Box and fragment together tell which elements of the full tensor a rank holds, in any layout::

    >>> halves = ((Segment(0, 2), Segment(4, 2)), (Segment(0, 3),))     # rows 0, 1, 4, 5 of a matrix, 3 columns
    >>> local_shape(halves)
    (4, 3)
    >>> overlaps(((Segment(4, 4),), (Segment(1, 1),)), halves)            # rows 4 to 7, column 1
    [((slice(0, 2, None), slice(2, 4, None)), (slice(0, 1, None), slice(1, 2, None)))]

As in torch's distributed checkpoints (offsets and sizes of chunks), a checkpoint stores boxes of named tensors, and a
load reads the intersections of stored and requested boxes. Fragments for ZeRO's shards come from Megatron-LM. torch and
Megatron-LM have one interval per dim. Here a dim may have several, so that fused q, k and v can stay one tensor.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from dslpar.layout import sharding

if TYPE_CHECKING:
    from dslpar.layers.placement import Placement


class Segment(NamedTuple):
    """Elements [start, start + length) of one dim of the full tensor."""

    start: int
    length: int


Box = tuple[tuple[Segment, ...], ...]
"""Segments per dim, in local order; () is a 0-dim tensor, which has one element."""

Shape = tuple[int, ...]

Copy = tuple[tuple[slice, slice], ...]
"""Elements to copy: for each dim, (slice of the target piece, slice of the source piece)."""


class Piece(NamedTuple):
    """The part of a tensor in one file: the fragment [start, stop) of the local piece `box`."""

    file: int
    box: Box
    start: int
    stop: int


def box_of(placement: Placement, coord: Mapping[str, int]) -> Box:
    """Return the box of the tensor rank at `coord` ({axis: index}): the elements that `Placement.cut` returns."""
    cuts = [sharding.piece(placement.tensor, coord, letters) for letters in placement.cuts]
    if not cuts:
        return ()
    lengths = placement.blocks or placement.padded[:1]
    starts = itertools.accumulate(lengths, initial=0)
    first = [_segment(start, length, *cuts[0]) for start, length in zip(starts, lengths, strict=False)]
    rest = ((_segment(0, length, *cut),) for length, cut in zip(placement.padded[1:], cuts[1:], strict=True))
    return (_coalesce(first), *rest)


def _segment(start: int, length: int, index: int, count: int) -> Segment:
    assert length % count == 0, f"{length} in {count} pieces"
    return Segment(start + index * (length // count), length // count)


def _coalesce(segments: Iterable[Segment]) -> tuple[Segment, ...]:
    """Join adjacent segments, so that equal pieces have equal boxes: unsharded blocks become one full segment."""
    joined: list[Segment] = []
    for segment in segments:
        if joined and joined[-1].start + joined[-1].length == segment.start:
            segment = Segment(joined[-1].start, joined.pop().length + segment.length)
        joined.append(segment)
    return tuple(joined)


def full_box(shape: Iterable[int]) -> Box:
    """Return the box of a full tensor."""
    return tuple((Segment(0, length),) for length in shape)


def local_shape(box: Box) -> Shape:
    """Return the shape of the local piece."""
    return tuple(sum(segment.length for segment in segments) for segments in box)


def num_elements(box: Box) -> int:
    """Return the number of elements of the local piece, padding included."""
    return math.prod(local_shape(box))


def overlaps(target: Box, source: Box, shape: Shape | None = None) -> list[Copy]:
    """Return the elements that both boxes contain, as slices of the target piece and of the source piece.

    If the full `shape` is given, padding is left out.
    """
    assert len(target) == len(source), f"{len(target)} dims and {len(source)}"
    ends = shape if shape is not None else (None,) * len(target)
    return list(itertools.product(*map(_intersect_dim, target, source, ends)))


def _intersect_dim(target: Sequence[Segment], source: Sequence[Segment], end: int | None) -> list[tuple[slice, slice]]:
    """Return the intersections of two lists of segments of one dim, up to the full length `end`."""
    found = []
    for (at, one), (by, other) in itertools.product(_with_local_starts(target), _with_local_starts(source)):
        start, stop = max(one.start, other.start), min(one.start + one.length, other.start + other.length)
        stop = stop if end is None else min(stop, end)
        if start < stop:
            into, out_of = start - one.start + at, start - other.start + by
            found.append((slice(into, into + stop - start), slice(out_of, out_of + stop - start)))
    return found


def _with_local_starts(segments: Sequence[Segment]) -> Iterator[tuple[int, Segment]]:
    """Yield (index in the local piece at which the segment starts, segment)."""
    at = 0
    for segment in segments:
        yield at, segment
        at += segment.length


def range_cuboids(shape: Sequence[int], start: int, stop: int) -> Iterator[tuple[range, ...]]:
    """Divide the flat range [start, stop) of a row-major tensor into cuboids (one range of indices per dim).

    Each cuboid is a flat range too. They come in flat order, and are at most 2 n - 1 for n dims.

    >>> list(range_cuboids((3, 4), 2, 9))
    [(range(0, 1), range(2, 4)), (range(1, 2), range(0, 4)), (range(2, 3), range(0, 1))]
    """
    if start >= stop:
        return
    if not shape:
        yield ()
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row  # whole rows
    if first > last:  # within one row
        yield from _row_cuboids(shape, last, start, stop)
        return
    yield from _row_cuboids(shape, first - 1, start, first * row)
    if first < last:
        yield (range(first, last), *map(range, shape[1:]))
    yield from _row_cuboids(shape, last, last * row, stop)


def _row_cuboids(shape: Sequence[int], index: int, start: int, stop: int) -> Iterator[tuple[range, ...]]:
    before = index * math.prod(shape[1:])
    return ((range(index, index + 1), *rest) for rest in range_cuboids(shape[1:], start - before, stop - before))


def sub_box(box: Box, indices: Sequence[range]) -> Box:
    """Return the box of a part of a local piece, given as a range of local indices per dim."""
    return tuple(_narrow_dim(segments, dim) for segments, dim in zip(box, indices, strict=True))


def _narrow_dim(segments: Sequence[Segment], indices: range) -> tuple[Segment, ...]:
    local = (Segment(indices.start, len(indices)),)
    found = []
    for at, segment in _with_local_starts(segments):
        for common, _ in _intersect_dim((Segment(at, segment.length),), local, None):
            found.append(Segment(segment.start + common.start, common.stop - common.start))
    return tuple(found)


def covers(pieces: Iterable[Piece], shape: Shape) -> bool:
    """Return whether the pieces together hold every element of the full tensor exactly once; padding does not count."""
    full = full_box(shape)
    # Cuboids are sorted by rows, so that only those with common rows are compared: thousands of shards have millions of
    # pairs.
    cuboids = sorted(
        (cuboid for piece in _coalesce_fragments(pieces) for cuboid in _cuboids(piece, full)),
        key=lambda found: found[0],
    )
    if sum(math.prod(map(len, cuboid)) for _, cuboid in cuboids) != math.prod(shape):
        return False
    # The number of elements is right. So if no two cuboids share elements, every element is covered exactly once.
    return not any(
        all(a.start < b.stop and b.start < a.stop for a, b in zip(one, other, strict=True))
        for one, other in _neighbours(cuboids)
    )


def _coalesce_fragments(pieces: Iterable[Piece]) -> list[Piece]:
    """Join adjacent shards of one box, of which there may be thousands."""
    joined: list[Piece] = []
    for piece in sorted(pieces, key=lambda piece: (piece.box, piece.start, piece.stop)):
        if joined and joined[-1].box == piece.box and joined[-1].stop == piece.start:
            piece = joined.pop()._replace(stop=piece.stop)
        joined.append(piece)
    return joined


Cuboid = tuple[range, ...]
"""Indices of the full tensor, as one range per dim."""


def _cuboids(piece: Piece, full: Box) -> Iterator[tuple[int, Cuboid]]:
    """Yield (first index in dim 0, cuboid) for the cuboids of the full tensor that a piece contains."""
    for indices in range_cuboids(local_shape(piece.box), piece.start, piece.stop):
        for copy in overlaps(full, sub_box(piece.box, indices)):
            cuboid = tuple(range(into.start, into.stop) for into, _ in copy)
            yield (cuboid[0].start if cuboid else 0), cuboid


def _neighbours(cuboids: Sequence[tuple[int, Cuboid]]) -> Iterator[tuple[Cuboid, Cuboid]]:
    """Yield pairs of sorted cuboids that share indices of dim 0."""
    for at, (_, one) in enumerate(cuboids):
        for first, other in itertools.islice(cuboids, at + 1, None):
            if one and first >= one[0].stop:
                break
            yield one, other
