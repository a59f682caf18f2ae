"""Tensor files of a checkpoint: written once with their digest, read as a map, put together for any layout.

A file is a valid safetensors file (https://github.com/huggingface/safetensors) of flat tensors: eight bytes with the
length of a JSON header, the header, the tensors without gaps. Here it is written in one pass, hashed on the way,
without a copy of everything in memory, which `safetensors.torch.save_file` makes.

    written = tensorfile.write(path, {"1.weight": flat, "1.weight::exp_avg": other})
    reader = tensorfile.Reader(folder, load_index(folder))
    reader.fragment("1.weight", "exp_avg", box, start, stop)       # of any box, whatever the boxes that were stored
"""

from __future__ import annotations

import json
import math
import mmap
import resource
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dslpar.checkpoint import folder as files
from dslpar.checkpoint.folder import Written
from dslpar.checkpoint.index import Index, file_key, tensor_path, unreadable
from dslpar.checkpoint.slices import (
    Box,
    Copy,
    Piece,
    Shape,
    local_shape,
    num_elements,
    overlaps,
    runs,
    sub_box,
    whole_box,
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
"""Safetensors' names."""

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Bytes are moved as integers: not every operation knows every float of eight bits."""

_LENGTH_BYTES = 8
_ALIGNED_BYTES = 64
"""Where the tensors begin: the widest vector loads want it."""
_CHUNK_BYTES = 1 << 23
_MOST_FILES = 1 << 15
_PRIVATE = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0x4000)
"""Without a reserve for copies that nobody makes: a file may be larger than memory. Linux's; named since 3.13."""


def dtype_name(dtype: torch.dtype) -> str:
    """Safetensors' name of a dtype. Raises: KeyError."""
    return _NAMES[dtype]


# ---- writing ----


class Lazy(NamedTuple):
    """A tensor that is made when its turn comes to be written, and dropped after."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    """As the file tells it."""
    make: Callable[[], Tensor]


def write(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> Written:
    """Writes flat tensors by their keys, on any device and of any shape (stored flat), and brings the file to the disk.

    The widest dtypes come first, so that each tensor is aligned. Of an accelerator's tensors one at a time is copied.

    Raises:
        OSError: it cannot be written; what stands there then is no file to read.
    """
    made = [Lazy(key, tensor.dtype, (tensor.numel(),), tensor.detach) for key, tensor in tensors.items()]
    return write_lazily(path, made, metadata)


def write_lazily(path: Path, tensors: Sequence[Lazy], metadata: Mapping[str, str] | None = None) -> Written:
    """The same of tensors that are made one at a time, and keep their shapes. Raises: OSError."""
    ordered = sorted(tensors, key=lambda lazy: -lazy.dtype.itemsize)
    return files.write(path, _chunks(_header(ordered, metadata or {}), ordered))


def _header(ordered: list[Lazy], metadata: Mapping[str, str]) -> bytes:
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    for key, dtype, shape, _ in ordered:
        end = at + math.prod(shape) * dtype.itemsize
        header[key] = {"dtype": dtype_name(dtype), "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + _LENGTH_BYTES) % _ALIGNED_BYTES)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def _chunks(header: bytes, ordered: list[Lazy]) -> Iterator[memoryview]:
    yield memoryview(header)
    for lazy in ordered:
        yield from _bytes_of(lazy.make())


def _bytes_of(tensor: Tensor) -> Iterator[memoryview]:
    """In chunks, each released when the next is asked for: who still names one does not keep the tensor."""
    flat = tensor.detach().cpu().contiguous().view(-1)
    if flat.numel():
        with memoryview(flat.view(torch.uint8).numpy()) as data:  # type: ignore[arg-type]
            for at in range(0, len(data), _CHUNK_BYTES):
                with data[at : at + _CHUNK_BYTES] as chunk:
                    yield chunk


# ---- reading ----


class Stretch(NamedTuple):
    """Where a tensor lies in its file."""

    dtype: torch.dtype
    start: int
    """First byte in the file."""
    numel: int


class TensorFile:
    """A file's tensors, as views of its map: nothing is read before it is touched, nothing is ever written back."""

    def __init__(
        self, path: Path, memory: mmap.mmap, stretches: Mapping[str, Stretch], metadata: Mapping[str, str]
    ) -> None:
        self.path, self.metadata = path, metadata
        self._memory, self._stretches = memory, stretches

    def keys(self) -> list[str]:
        """In the order of the file."""
        return list(self._stretches)

    def dtype(self, key: str) -> torch.dtype:
        """Of a stored tensor. Raises: DslparError: CKP216: there is none of that key."""
        return self._stretch(key).dtype

    def numel(self, key: str) -> int:
        """Of a stored tensor. Raises: DslparError: CKP216."""
        return self._stretch(key).numel

    def get(self, key: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Elements [start, stop) of a tensor, flat, on the map. Raises: DslparError: CKP216: there are none such."""
        stretch = self._stretch(key)
        stop = stretch.numel if stop is None else stop
        if not 0 <= start <= stop <= stretch.numel:
            raise unreadable(self.path, f"{key!r} has {stretch.numel} elements, and {start} to {stop} are asked for")
        if start == stop:
            return torch.empty(0, dtype=stretch.dtype)
        first = stretch.start + start * stretch.dtype.itemsize
        return torch.frombuffer(self._memory, dtype=stretch.dtype, count=stop - start, offset=first)

    def _stretch(self, key: str) -> Stretch:
        if key not in self._stretches:
            raise unreadable(self.path, f"it holds no {key!r}")
        return self._stretches[key]


def open_file(path: Path) -> TensorFile:
    """Maps a safetensors file, privately: the file stays as it is, whatever is done to the tensors.

    Raises:
        DslparError: CKP216: it is missing, or no such file.
    """
    try:
        with path.open("rb") as opened:
            memory = mmap.mmap(opened.fileno(), 0, flags=_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        begin = _LENGTH_BYTES + int.from_bytes(memory[:_LENGTH_BYTES], "little")
        if begin > len(memory):
            raise ValueError(f"a header of {begin - _LENGTH_BYTES} bytes in a file of {len(memory)}")
        header = json.loads(memory[_LENGTH_BYTES:begin])
        metadata = header.pop("__metadata__", {})
        stretches = {key: _stretch(told, begin) for key, told in header.items()}
        _check_gapless(stretches, begin, len(memory))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise unreadable(path, f"{type(error).__name__}: {error}") from error
    return TensorFile(path, memory, stretches, metadata)


def _stretch(told: Mapping[str, Any], begin: int) -> Stretch:
    dtype, (start, end) = DTYPES[told["dtype"]], told["data_offsets"]
    numel = math.prod(told["shape"])
    if end - start != numel * dtype.itemsize:
        raise ValueError(f"{numel} elements of {told['dtype']} in {end - start} bytes")
    return Stretch(dtype, begin + start, numel)


def _check_gapless(stretches: Mapping[str, Stretch], begin: int, end: int) -> None:
    at = begin
    for stretch in sorted(stretches.values(), key=lambda stretch: (stretch.start, stretch.numel)):
        if stretch.start != at:
            raise ValueError(f"a gap, or an overlap, at byte {at}")
        at += stretch.numel * stretch.dtype.itemsize
    if at != end:
        raise ValueError(f"{end} bytes, and its header tells of {at}")


# ---- of any layout ----


class Reader:
    """Pieces of a checkpoint's tensors, in boxes of the asking layout; what is memory here is one target and views.

    A view of a file's map is returned where one stored fragment holds all that is asked; never write to the result.
    Of a tensor in a thousand shards each is asked for, tensor after tensor: all files stay open, if the system has it.
    """

    def __init__(self, folder: Path, index: Index, max_open: int | None = None) -> None:
        self.folder, self.index = folder, index
        self._max_open = _most_open() if max_open is None else max_open
        self._open: OrderedDict[int, TensorFile] = OrderedDict()
        self._by_box: dict[str, dict[Box, list[Piece]]] = {}

    def fragment(self, name: str, key: str, box: Box, start: int, stop: int) -> Tensor:
        """The flat range [start, stop) of the piece `box` of a weight (key "") or of an optimizer's tensor of it.

        [stop - start], on the CPU, in the stored dtype. Padding, and what nobody stored, is zero.

        Raises:
            KeyError: the index has no such tensor.
            DslparError: CKP216: a file does not hold what the index tells.
        """
        entry = self.index.entry(name)
        same = [piece for piece in self._pieces(name).get(box, []) if piece.start < stop and start < piece.stop]
        if len(same) == 1 and same[0].start <= start and stop <= same[0].stop:
            return self._part(name, key, same[0], start, stop)
        out = torch.zeros(stop - start, dtype=DTYPES[entry.dtype_of(key)])
        if _fills(same, start, stop):
            for piece in same:
                first, last = max(start, piece.start), min(stop, piece.stop)
                _bits(out)[first - start : last - start] = _bits(self._part(name, key, piece, first, last))
        else:
            self._assemble(_bits(out), name, key, box, start, stop)
        return out

    def local(self, name: str, key: str, box: Box) -> Tensor:
        """The whole piece, in its local shape."""
        return self.fragment(name, key, box, 0, num_elements(box)).view(local_shape(box))

    def whole(self, name: str, key: str = "") -> Tensor:
        """The whole tensor, without padding."""
        return self.local(name, key, whole_box(self.index.entry(name).shape))

    def odd(self, name: str, key: str) -> Tensor:
        """An optimizer's tensor of another shape, as it was."""
        entry = self.index.entry(name)
        assert entry.odd_file is not None, f"no file holds {name}::{key}"
        return self._file(entry.odd_file).get(file_key(name, key)).view(entry.odd[key].shape)

    def _assemble(self, out: Tensor, name: str, key: str, box: Box, start: int, stop: int) -> None:
        """Both fragments are cut into cuboids, and what any two of them share is copied."""
        at, shape = 0, self.index.entry(name).shape
        for wanted in runs(local_shape(box), start, stop):
            part = sub_box(box, wanted)
            size = num_elements(part)
            target = out[at : at + size].view(local_shape(part))
            at += size
            for stored, pieces in self._pieces(name).items():
                first, last = _extent(overlaps(part, stored, shape), local_shape(stored))
                for piece in pieces:
                    if piece.start < last and first < piece.stop:
                        self._copy_common(target, part, name, key, piece)

    def _copy_common(self, target: Tensor, part: Box, name: str, key: str, piece: Piece) -> None:
        at, shape = piece.start, self.index.entry(name).shape
        for held in runs(local_shape(piece.box), piece.start, piece.stop):
            stored = sub_box(piece.box, held)
            size = num_elements(stored)
            if copies := overlaps(part, stored, shape):
                source = _bits(self._part(name, key, piece, at, at + size)).view(local_shape(stored))
                for copy in copies:
                    target[tuple(into for into, _ in copy)] = source[tuple(out_of for _, out_of in copy)]
            at += size

    def _pieces(self, name: str) -> Mapping[Box, list[Piece]]:
        """By their boxes: of thousands of shards there are as many boxes as tensor ranks."""
        if name not in self._by_box:
            found = self._by_box[name] = {}
            for piece in self.index.entry(name).pieces:
                found.setdefault(piece.box, []).append(piece)
        return self._by_box[name]

    def _part(self, name: str, key: str, piece: Piece, start: int, stop: int) -> Tensor:
        """Of a stored fragment, what lies at [start, stop) of its piece."""
        opened, at = self._file(piece.file), file_key(name, key)
        told = DTYPES[self.index.entry(name).dtype_of(key)]
        if opened.dtype(at) != told or opened.numel(at) != piece.stop - piece.start:
            found = f"{opened.numel(at)} of {opened.dtype(at)}"
            raise unreadable(opened.path, f"{at!r} is {found}, by the index {piece.stop - piece.start} of {told}")
        return opened.get(at, start - piece.start, stop - piece.start)

    def _file(self, file: int) -> TensorFile:
        if file not in self._open:
            self._open[file] = open_file(tensor_path(self.folder, file))
            while len(self._open) > self._max_open:
                self._open.popitem(last=False)
        self._open.move_to_end(file)
        return self._open[file]


def _most_open() -> int:
    """Half of what the process may have open: a map holds its file open, and the usual 1,024 are a default."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return max(1, wanted // 2)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.view(_SAME_SIZE[tensor.element_size()])


def _fills(pieces: list[Piece], start: int, stop: int) -> bool:
    """Whether fragments of one box hold all of [start, stop)."""
    at = start
    for piece in sorted(pieces, key=lambda piece: piece.start):
        if piece.start > at:
            return False
        at = max(at, piece.stop)
    return at >= stop


def _extent(copies: list[Copy], shape: Shape) -> tuple[int, int]:
    """The flat range of the source piece, of that shape, in which all that is copied lies; (0, 0): nothing is."""
    first, last = 0, 0
    for dim, length in enumerate(shape):
        first = first * length + min((copy[dim][1].start for copy in copies), default=0)
        last = last * length + max((copy[dim][1].stop - 1 for copy in copies), default=0)
    return (first, last + 1) if copies else (0, 0)
