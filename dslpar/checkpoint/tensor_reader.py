"""Read the tensors of a checkpoint in any layout: assemble the requested piece from the stored pieces.

    reader = TensorReader(folder, load_index(folder))
    reader.fragment("1.weight", "exp_avg", box, start, stop)       # of any box, whatever the boxes that were stored

A piece is a range of a box of the full tensor (see `slices`, which also computes the elements that two boxes share).
`tensor_file` maps the files.
"""

from __future__ import annotations

import resource
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from dslpar.checkpoint.index import Index, file_key, tensor_path
from dslpar.checkpoint.slices import (
    Box,
    Copy,
    Piece,
    Shape,
    full_box,
    local_shape,
    num_elements,
    overlaps,
    range_cuboids,
    sub_box,
)
from dslpar.checkpoint.tensor_file import DTYPES, TensorFile, open_file

_MAX_FILES = 1 << 15
_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Bytes per element -> integer dtype. Elements are copied as integers: some operations lack some 8-bit floats."""


class TensorReader:
    """Read pieces of a checkpoint's tensors in the boxes of any layout.

    If one stored fragment contains the whole request, the result is a view of the mapped file: never write to it.
    A tensor may have a thousand ZeRO shards, each in its own file. So files stay open between tensors, up to the
    system's limit; `max_open` sets a lower one.
    """

    def __init__(self, folder: Path, index: Index, max_open: int | None = None) -> None:
        self.folder, self.index = folder, index
        self._max_open = _raise_open_file_limit() if max_open is None else max_open
        self._open: OrderedDict[int, TensorFile] = OrderedDict()
        self._by_box: dict[str, dict[Box, list[Piece]]] = {}

    def fragment(self, name: str, key: str, box: Box, start: int, stop: int) -> Tensor:
        """Return the flat range [start, stop) of the piece `box` of a weight (key "") or of its optimizer tensor `key`.

        The result has shape [stop - start] and the stored dtype, on the CPU. Padding is zero, as are elements that no
        rank has stored.

        Raises:
            KeyError: the index has no such tensor.
            DslparError: CKP216: a file does not match the index.
        """
        entry = self.index.entry(name)
        same = [piece for piece in self._pieces(name).get(box, []) if piece.start < stop and start < piece.stop]
        if len(same) == 1 and same[0].start <= start and stop <= same[0].stop:
            return self._read(name, key, same[0], start, stop)  # no copy
        out = torch.zeros(stop - start, dtype=DTYPES[entry.dtype_of(key)])
        integers = _as_integers(out)
        if _covers(same, start, stop):  # the same box in other ZeRO shards: copy flat ranges
            for piece in same:
                first, last = max(start, piece.start), min(stop, piece.stop)
                integers[first - start : last - start] = _as_integers(self._read(name, key, piece, first, last))
        else:
            self._assemble(integers, name, key, box, start, stop)
        return out

    def local(self, name: str, key: str, box: Box) -> Tensor:
        """Return the piece `box` in its local shape."""
        return self.fragment(name, key, box, 0, num_elements(box)).view(local_shape(box))

    def full(self, name: str, key: str = "") -> Tensor:
        """Return the full tensor, without padding."""
        return self.local(name, key, full_box(self.index.entry(name).shape))

    def irregular(self, name: str, key: str) -> Tensor:
        """Return an optimizer tensor whose shape differs from the parameter's."""
        entry = self.index.entry(name)
        assert entry.irregular_file is not None, f"no file holds {name}::{key}"
        opened, state = self._file(entry.irregular_file), entry.irregular[key]
        opened.span(file_key(name, key), state.dtype, state.num_elements)
        return opened.get(file_key(name, key)).view(state.shape)

    def _assemble(self, out: Tensor, name: str, key: str, box: Box, start: int, stop: int) -> None:
        """Divide the requested and the stored fragments into cuboids, and copy the elements that two cuboids share."""
        at, shape = 0, self.index.entry(name).shape
        for indices in range_cuboids(local_shape(box), start, stop):
            part = sub_box(box, indices)
            size = num_elements(part)
            target = out[at : at + size].view(local_shape(part))
            at += size
            for stored, pieces in self._pieces(name).items():
                first, last = _source_range(overlaps(part, stored, shape), local_shape(stored))
                for piece in pieces:
                    if piece.start < last and first < piece.stop:
                        self._copy_overlap(target, part, name, key, piece)

    def _copy_overlap(self, target: Tensor, part: Box, name: str, key: str, piece: Piece) -> None:
        at, shape = piece.start, self.index.entry(name).shape
        for stored_indices in range_cuboids(local_shape(piece.box), piece.start, piece.stop):
            stored = sub_box(piece.box, stored_indices)
            size = num_elements(stored)
            if copies := overlaps(part, stored, shape):
                source = _as_integers(self._read(name, key, piece, at, at + size)).view(local_shape(stored))
                for copy in copies:
                    target[tuple(into for into, _ in copy)] = source[tuple(out_of for _, out_of in copy)]
            at += size

    def _pieces(self, name: str) -> Mapping[Box, list[Piece]]:
        """Return the stored pieces grouped by box: thousands of ZeRO shards have only one box per tensor rank."""
        if name not in self._by_box:
            found = self._by_box[name] = {}
            for piece in self.index.entry(name).pieces:
                found.setdefault(piece.box, []).append(piece)
        return self._by_box[name]

    def _read(self, name: str, key: str, piece: Piece, start: int, stop: int) -> Tensor:
        """Read the flat range [start, stop) of a local piece from its stored fragment `piece`."""
        opened, at = self._file(piece.file), file_key(name, key)
        opened.span(at, self.index.entry(name).dtype_of(key), piece.stop - piece.start)
        return opened.get(at, start - piece.start, stop - piece.start)

    def _file(self, file: int) -> TensorFile:
        if file not in self._open:
            self._open[file] = open_file(tensor_path(self.folder, file))
            # The least recently used file is closed; its map exists as long as a tensor is a view of it.
            while len(self._open) > self._max_open:
                self._open.popitem(last=False)
        self._open.move_to_end(file)
        return self._open[file]


def _raise_open_file_limit() -> int:
    """Raise this process's limit of open files (usually 1,024) as far as allowed; return half of it, for maps."""
    # Each map keeps its own descriptor, even after its file is closed.
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = _MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    return max(1, limit // 2)


def _as_integers(tensor: Tensor) -> Tensor:
    return tensor.view(_SAME_SIZE[tensor.element_size()])


def _covers(pieces: list[Piece], start: int, stop: int) -> bool:
    """Return whether fragments of one box together contain all of [start, stop)."""
    at = start
    for piece in sorted(pieces, key=lambda piece: piece.start):
        if piece.start > at:
            return False
        at = max(at, piece.stop)
    return at >= stop


def _source_range(copies: list[Copy], shape: Shape) -> tuple[int, int]:
    """Return the flat range of a source piece of shape `shape` that contains all copies; (0, 0) without copies."""
    first, last = 0, 0
    for dim, length in enumerate(shape):
        first = first * length + min((copy[dim][1].start for copy in copies), default=0)
        last = last * length + max((copy[dim][1].stop - 1 for copy in copies), default=0)
    return (first, last + 1) if copies else (0, 0)
