"""Tensor files of a checkpoint: write them with their digest, map them, assemble pieces for any layout.

A file is a valid safetensors file (https://github.com/huggingface/safetensors) of flat tensors: eight bytes with the
length of a JSON header, the header, the tensors without gaps. It is written here in one pass and hashed on the way,
without the copy of everything in memory that `safetensors.torch.save_file` makes.

    written = tensor_file.write_tensors(path, {"1.weight": flat, "1.weight::exp_avg": other})
    reader = tensor_file.TensorReader(folder, load_index(folder))
    reader.fragment("1.weight", "exp_avg", box, start, stop)       # of any box, whatever the boxes that were stored
"""

from __future__ import annotations

import io
import json
import math
import mmap
import resource
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dslpar.checkpoint import folder as files
from dslpar.checkpoint.folder import FileDigest
from dslpar.checkpoint.index import Index, file_key, tensor_path, unreadable
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

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""By safetensors' names."""

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Elements are copied as integers: not every operation is implemented for every 8-bit float."""

_LENGTH_BYTES = 8
_ALIGNED_BYTES = 64
"""Alignment of the first tensor, for the widest vector loads."""
_CHUNK_BYTES = 1 << 23
_MAX_FILES = 1 << 15
_PRIVATE = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0x4000)
"""NORESERVE (named since Python 3.13): no swap space for copies that nobody makes of a file larger than memory."""


def dtype_name(dtype: torch.dtype) -> str:
    """Return safetensors' name of a dtype. Raises: KeyError."""
    return _NAMES[dtype]


# ---- writing ----


class LazyTensor(NamedTuple):
    """A tensor that is made when it is written, and dropped after."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    """Shape in the file."""
    make: Callable[[], Tensor]

    @property
    def num_bytes(self) -> int:
        """Bytes in the file."""
        return math.prod(self.shape) * self.dtype.itemsize


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> FileDigest:
    """Write tensors by their keys, from any device, each stored flat, and bring the file to the disk.

    The widest dtypes come first, so that each tensor is aligned. Tensors of an accelerator are copied one at a time.

    Raises:
        OSError: it cannot be written; what is there then is no file to read.
    """
    lazy = [LazyTensor(key, tensor.dtype, (tensor.numel(),), tensor.detach) for key, tensor in tensors.items()]
    return write_lazy_tensors(path, lazy, metadata)


def write_lazy_tensors(
    path: Path, tensors: Sequence[LazyTensor], metadata: Mapping[str, str] | None = None
) -> FileDigest:
    """Write tensors that are made one at a time, and keep their shapes. Raises: OSError."""
    ordered = sorted(tensors, key=lambda lazy: -lazy.dtype.itemsize)
    header = memoryview(_header(ordered, metadata or {}))
    # Lazily: a tensor is made when the one before it is on its way to the disk, so that one at a time is in memory.
    data = (chunk for lazy in ordered for chunk in _bytes_of(lazy.make()))
    return files.write_file(path, chain([header], data))


def _header(ordered: list[LazyTensor], metadata: Mapping[str, str]) -> bytes:
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    for lazy in ordered:
        end = at + lazy.num_bytes
        header[lazy.key] = {"dtype": dtype_name(lazy.dtype), "shape": list(lazy.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + _LENGTH_BYTES) % _ALIGNED_BYTES)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def _bytes_of(tensor: Tensor) -> Iterator[memoryview]:
    """Yield the bytes in chunks, each released when the next is asked for, so that no reference keeps the tensor."""
    # None of these copies a contiguous tensor on the CPU: it is written from where the optimizer keeps it.
    flat = tensor.detach().cpu().contiguous().view(-1)
    if flat.numel():
        with memoryview(flat.view(torch.uint8).numpy()) as data:  # type: ignore[arg-type]
            for at in range(0, len(data), _CHUNK_BYTES):
                with data[at : at + _CHUNK_BYTES] as chunk:
                    yield chunk


def torch_bytes(values: object) -> memoryview:
    """Return what torch.save makes of the values: on a full disk it raises no OSError itself, as `write_file` does."""
    buffer = io.BytesIO()
    torch.save(values, buffer)
    return buffer.getbuffer()


# ---- reading ----


class TensorSpan(NamedTuple):
    """The place of a tensor in its file."""

    dtype: torch.dtype
    start: int
    """First byte in the file."""
    numel: int


class TensorFile(NamedTuple):
    """A mapped file, whose tensors are views: nothing is read before it is used, and nothing is written back."""

    path: Path
    memory: mmap.mmap
    spans: Mapping[str, TensorSpan]
    """By the tensors' keys, in the order of the file."""
    metadata: Mapping[str, str]

    def span(self, key: str) -> TensorSpan:
        """Return where a tensor lies. Raises: DslparError: CKP216: there is none of that key."""
        if key not in self.spans:
            raise unreadable(self.path, f"it holds no {key!r}")
        return self.spans[key]

    def get(self, key: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Return elements [start, stop) of a tensor, a view of the map. Raises: DslparError: CKP216: out of range."""
        span = self.span(key)
        stop = span.numel if stop is None else stop
        if not 0 <= start <= stop <= span.numel:
            raise unreadable(self.path, f"{key!r} has {span.numel} elements, and {start} to {stop} were requested")
        if start == stop:
            return torch.empty(0, dtype=span.dtype)
        first = span.start + start * span.dtype.itemsize
        return torch.frombuffer(self.memory, dtype=span.dtype, count=stop - start, offset=first)


def open_file(path: Path) -> TensorFile:
    """Map a safetensors file, privately: the file stays as it is, whatever is done to the tensors.

    Raises:
        DslparError: CKP216: it is missing, or no safetensors file.
    """
    try:
        with path.open("rb") as opened:
            # Writable, since torch warns of buffers that are not; private, so that no write reaches the file.
            memory = mmap.mmap(opened.fileno(), 0, flags=_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        begin = _LENGTH_BYTES + int.from_bytes(memory[:_LENGTH_BYTES], "little")
        if begin > len(memory):
            raise ValueError(f"a header of {begin - _LENGTH_BYTES} bytes in a file of {len(memory)}")
        header = json.loads(memory[_LENGTH_BYTES:begin])
        metadata = header.pop("__metadata__", {})
        spans = {key: _span(recorded, begin) for key, recorded in header.items()}
        # The safetensors library refuses gaps and overlaps as well: nothing may hide between tensors.
        _check_gapless(spans, begin, len(memory))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise unreadable(path, f"{type(error).__name__}: {error}") from error
    return TensorFile(path, memory, spans, metadata)


def _span(recorded: Mapping[str, Any], begin: int) -> TensorSpan:
    dtype, (start, end) = DTYPES[recorded["dtype"]], recorded["data_offsets"]
    numel = math.prod(recorded["shape"])
    if end - start != numel * dtype.itemsize:
        raise ValueError(f"{numel} elements of {recorded['dtype']} in {end - start} bytes")
    return TensorSpan(dtype, begin + start, numel)


def _check_gapless(spans: Mapping[str, TensorSpan], begin: int, end: int) -> None:
    at = begin
    for span in sorted(spans.values(), key=lambda span: (span.start, span.numel)):
        if span.start != at:
            raise ValueError(f"a gap, or an overlap, at byte {at}")
        at += span.numel * span.dtype.itemsize
    if at != end:
        raise ValueError(f"{end} bytes, and by its header {at}")


# ---- of any layout ----


class TensorReader:
    """Read pieces of a checkpoint's tensors in the boxes of any layout; only the result is in memory.

    Where one stored fragment holds all that is requested, the result is a view of a file's map: never write to it.
    Tensors may be in a thousand shards, each in its own file, and are read one after the other: files stay open, as
    many as the system allows.
    """

    def __init__(self, folder: Path, index: Index, max_open: int | None = None) -> None:
        self.folder, self.index = folder, index
        self._max_open = _raise_open_file_limit() if max_open is None else max_open
        self._open: OrderedDict[int, TensorFile] = OrderedDict()
        self._by_box: dict[str, dict[Box, list[Piece]]] = {}

    def fragment(self, name: str, key: str, box: Box, start: int, stop: int) -> Tensor:
        """Return the flat range [start, stop) of the piece `box` of a weight (key "") or of its optimizer tensor `key`.

        Shape [stop - start], on the CPU, in the stored dtype. Padding, and what no rank stored, is zero.

        Raises:
            KeyError: the index has no such tensor.
            DslparError: CKP216: a file does not hold what the index says.
        """
        entry = self.index.entry(name)
        same = [piece for piece in self._pieces(name).get(box, []) if piece.start < stop and start < piece.stop]
        if len(same) == 1 and same[0].start <= start and stop <= same[0].stop:
            return self._read(name, key, same[0], start, stop)  # no copy
        out = torch.zeros(stop - start, dtype=DTYPES[entry.dtype_of(key)])
        integers = _as_integers(out)
        if _covers(same, start, stop):  # the same box in other ZeRO shards: ranges are copied, without any geometry
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
        """Return an optimizer's tensor of another shape than the parameter's."""
        entry = self.index.entry(name)
        assert entry.irregular_file is not None, f"no file holds {name}::{key}"
        return self._file(entry.irregular_file).get(file_key(name, key)).view(entry.irregular[key].shape)

    def _assemble(self, out: Tensor, name: str, key: str, box: Box, start: int, stop: int) -> None:
        """Cut both fragments into cuboids, and copy what any two of them share."""
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
        """Return the stored pieces by box: of thousands of ZeRO shards there are only as many boxes as tensor ranks."""
        if name not in self._by_box:
            found = self._by_box[name] = {}
            for piece in self.index.entry(name).pieces:
                found.setdefault(piece.box, []).append(piece)
        return self._by_box[name]

    def _read(self, name: str, key: str, piece: Piece, start: int, stop: int) -> Tensor:
        """Read the range [start, stop) of a piece from the stored fragment `piece`."""
        opened, at = self._file(piece.file), file_key(name, key)
        recorded = DTYPES[self.index.entry(name).dtype_of(key)]
        span, numel = opened.span(at), piece.stop - piece.start
        if span.dtype != recorded or span.numel != numel:
            problem = f"{at!r} is {span.numel} of {span.dtype}, by the index {numel} of {recorded}"
            raise unreadable(opened.path, problem)
        return opened.get(at, start - piece.start, stop - piece.start)

    def _file(self, file: int) -> TensorFile:
        if file not in self._open:
            self._open[file] = open_file(tensor_path(self.folder, file))
            # The least recently used one goes; its map lives on as long as a tensor is a view of it.
            while len(self._open) > self._max_open:
                self._open.popitem(last=False)
        self._open.move_to_end(file)
        return self._open[file]


def _raise_open_file_limit() -> int:
    """Raise the process's limit of open files, usually 1,024, as far as it may be; return half of it for maps."""
    # Each map keeps a descriptor of its own, also when the file that it was made of is closed.
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = _MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    return max(1, limit // 2)


def _as_integers(tensor: Tensor) -> Tensor:
    return tensor.view(_SAME_SIZE[tensor.element_size()])


def _covers(pieces: list[Piece], start: int, stop: int) -> bool:
    """Whether fragments of one box together hold all of [start, stop)."""
    at = start
    for piece in sorted(pieces, key=lambda piece: piece.start):
        if piece.start > at:
            return False
        at = max(at, piece.stop)
    return at >= stop


def _source_range(copies: list[Copy], shape: Shape) -> tuple[int, int]:
    """Return the flat range of the source piece, of that shape, that contains all copies; (0, 0) if there are none."""
    first, last = 0, 0
    for dim, length in enumerate(shape):
        first = first * length + min((copy[dim][1].start for copy in copies), default=0)
        last = last * length + max((copy[dim][1].stop - 1 for copy in copies), default=0)
    return (first, last + 1) if copies else (0, 0)
