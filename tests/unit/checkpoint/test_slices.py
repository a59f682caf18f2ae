"""Boxes, fragments and their overlaps, against `Placement.cut` and sets of indices; no ranks needed."""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dslpar.checkpoint.slices import (
    Box,
    Piece,
    Segment,
    box_of,
    covers,
    full_box,
    local_shape,
    num_elements,
    overlaps,
    range_cuboids,
    sub_box,
)
from dslpar.core.mesh import TENSOR_AXES, Mesh, TensorMesh
from dslpar.layers.placement import Placement
from tests.support.layouts import CUBOIDS, LAYOUTS

TENSORS = st.sampled_from([TensorMesh(), *LAYOUTS.values(), *CUBOIDS.values()])


class Two(NamedTuple):
    """The same full tensor on two cuboids."""

    whole: torch.Tensor
    source: Placement
    target: Placement


def coords(tensor: TensorMesh) -> list[dict[str, int]]:
    mesh = Mesh(tensor=tensor)
    return [mesh.coord(rank) for rank in range(mesh.world_size)]


@st.composite
def two(draw: st.DrawFn) -> Two:
    """Draw lengths that both cuboids divide; dim 0 may have blocks, or padding rows."""
    dims = draw(st.integers(0, 3))
    tensors = draw(TENSORS), draw(TENSORS)
    cuts = [draw(cuts_of(dims)) for _ in tensors]
    counts = [counts_of(tensor, cut) for tensor, cut in zip(tensors, cuts, strict=True)]
    common = [math.lcm(*of_dim) for of_dim in zip(*counts, strict=True)]
    first, padded = draw(st.sampled_from([(1, False), (3, False), (2, True)])) if dims else (1, False)
    blocks = tuple(common[0] * draw(st.integers(1, 2)) for _ in range(first)) if dims and not padded else ()
    rows = [draw(st.integers(1, 2 * common[0]))] if padded else [sum(blocks)] if dims else []
    shape = (*rows, *(length * draw(st.integers(1, 2)) for length in common[1:]))
    placements = []
    for tensor, cut, count in zip(tensors, cuts, counts, strict=True):
        padded_rows = -(-rows[0] // count[0]) * count[0] if padded else None
        placements.append(Placement(tensor, shape, cut, blocks=blocks if first > 1 else (), padded_rows=padded_rows))
    return Two(1 + torch.arange(math.prod(shape), dtype=torch.int32).view(shape), *placements)


@st.composite
def cuts_of(draw: st.DrawFn, dims: int) -> tuple[tuple[str, ...], ...]:
    """Let each letter shard one dim, or none."""
    order = draw(st.permutations(TENSOR_AXES))
    dim_of = {letter: draw(st.sampled_from([*range(dims), 0, -1])) for letter in order}  # dim 0 has blocks and padding
    return tuple(tuple(letter for letter in order if dim_of[letter] == dim) for dim in range(dims))


def counts_of(tensor: TensorMesh, cuts: tuple[tuple[str, ...], ...]) -> list[int]:
    return [math.prod(getattr(tensor, letter) for letter in letters) for letters in cuts]


def cut(placement: Placement, whole: torch.Tensor, coord: dict[str, int]) -> torch.Tensor:
    return placement.cut(whole, coord) if whole.dim() else whole  # a scalar is never sharded


def indices(segments: tuple[Segment, ...]) -> list[int]:
    return [segment.start + at for segment in segments for at in range(segment.length)]


def held(piece: Piece, shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Return the elements of the full tensor in a piece, without padding."""
    elements = list(itertools.product(*map(indices, piece.box)))[piece.start : piece.stop]
    return [at for at in elements if all(i < length for i, length in zip(at, shape, strict=True))]


@settings(max_examples=80, deadline=None)
@given(two())
def test_a_box_holds_what_the_placement_cuts(drawn: Two) -> None:
    whole, at = drawn.whole, drawn.source
    padded = torch.zeros(at.padded, dtype=whole.dtype)
    padded[tuple(map(slice, at.shape))] = whole
    for coord in coords(at.tensor):
        box = box_of(at, coord)
        piece = cut(at, whole, coord)
        assert local_shape(box) == tuple(piece.shape)
        found = padded[tuple(torch.meshgrid(*map(torch.tensor, map(indices, box)), indexing="ij"))] if box else whole
        assert torch.equal(found, piece)


@settings(max_examples=80, deadline=None)
@given(two(), st.data())
def test_overlaps_are_the_elements_that_both_hold(drawn: Two, data: st.DataObject) -> None:
    boxes = [
        box_of(at, data.draw(st.sampled_from([*coords(at.tensor), coords(at.tensor)[-1]])))  # the last has padding
        for at in (drawn.target, drawn.source)
    ]
    shape = data.draw(st.sampled_from([None, tuple(drawn.whole.shape)]))
    into, out_of = (list(map(indices, box)) for box in boxes)
    both = []
    for copy in overlaps(*boxes, shape):
        one = list(itertools.product(*(dim[part] for dim, (part, _) in zip(into, copy, strict=True))))
        assert one == list(itertools.product(*(dim[part] for dim, (_, part) in zip(out_of, copy, strict=True))))
        both += one
    every = (set(itertools.product(*map(indices, box))) for box in boxes)
    expected = {at for at in set.intersection(*every) if shape is None or all(map(int.__lt__, at, shape))}
    assert len(both) == len(set(both))
    assert set(both) == expected


@given(st.lists(st.integers(0, 4), max_size=4), st.data())
def test_cuboids_are_the_flat_range(shape: list[int], data: st.DataObject) -> None:
    total = math.prod(shape)
    start = data.draw(st.integers(0, total))
    stop = data.draw(st.integers(start, total))
    found = list(range_cuboids(shape, start, stop))
    flat = [at for cuboid in found for at in itertools.product(*cuboid)]
    assert flat == list(itertools.product(*map(range, shape)))[start:stop]
    assert len(found) <= max(1, 2 * len(shape) - 1)


@given(st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=3), min_size=1, max_size=3), st.data())
def test_a_sub_box_holds_the_indices(lengths: list[list[int]], data: st.DataObject) -> None:
    """The segments have gaps of one between them."""
    starts = [[sum(dim[:at]) + at for at in range(len(dim))] for dim in lengths]
    box: Box = tuple(tuple(map(Segment, *dims)) for dims in zip(starts, lengths, strict=True))
    wanted = []
    for length in local_shape(box):
        start = data.draw(st.integers(0, length))
        wanted.append(range(start, data.draw(st.integers(start, length))))
    narrowed = [[indices(dim)[at] for at in part] for dim, part in zip(box, wanted, strict=True)]
    assert list(map(indices, sub_box(box, wanted))) == narrowed


@st.composite
def stored(draw: st.DrawFn, at: Placement) -> list[Piece]:
    """Return every owner's piece, in shards."""
    pieces = []
    for file, coord in enumerate(coords(at.tensor)):
        if at.owner(coord):
            box = box_of(at, coord)
            inner = draw(st.lists(st.integers(0, num_elements(box)), max_size=2))
            ends = sorted({0, num_elements(box), *inner})
            pieces += [Piece(file, box, *pair) for pair in itertools.pairwise(ends)]
    return pieces


@settings(max_examples=80, deadline=None)
@given(two(), st.data())
def test_all_pieces_cover_and_any_other_set_does_not(drawn: Two, data: st.DataObject) -> None:
    shape = tuple(drawn.whole.shape)
    pieces = data.draw(stored(drawn.source))
    assert covers(data.draw(st.permutations(pieces)), shape)
    odd = data.draw(st.sampled_from(pieces))
    other = data.draw(st.sampled_from([lambda: [*pieces, odd], lambda: [piece for piece in pieces if piece != odd]]))()
    every = sorted(at for piece in other for at in held(piece, shape))
    assert covers(other, shape) == (every == sorted(itertools.product(*map(range, shape))))


def test_one_element_twice_and_another_never_is_no_cover() -> None:
    """The number of elements is right."""
    box = full_box((2, 3))
    assert not covers([Piece(0, box, 0, 4), Piece(1, box, 3, 5)], (2, 3))
    assert covers([Piece(0, box, 0, 4), Piece(1, box, 4, 6)], (2, 3))
    assert not covers([Piece(0, (), 0, 1), Piece(1, (), 0, 1)], ())


def test_part_of_one_box_and_another_box_cover_together() -> None:
    """Rows 0 and 1 are a box each, and row 2 is the end of a box of rows 1 and 2."""
    columns = (Segment(0, 2),)
    one, two, both = (((Segment(*rows),), columns) for rows in ((0, 1), (1, 1), (1, 2)))
    assert covers([Piece(0, one, 0, 2), Piece(1, two, 0, 2), Piece(2, both, 2, 4)], (3, 2))
    assert not covers([Piece(0, one, 0, 2), Piece(1, two, 0, 2), Piece(2, both, 1, 3)], (3, 2))


def test_padding_that_both_hold_is_no_overlap_where_the_shape_is_known() -> None:
    one, other = ((Segment(0, 4),),), ((Segment(2, 4),),)
    assert overlaps(one, other) == [((slice(2, 4), slice(0, 2)),)]
    assert overlaps(one, other, (3,)) == [((slice(2, 3), slice(0, 1)),)]
    assert overlaps(one, other, (2,)) == []
