"""Safetensors files: write tensors and compute the file's digest in one pass, and map files into memory.

    digest = tensor_file.write_tensors(path, {"1.weight": flat, "1.weight::exp_avg": moment})
    content = tensor_file.copied_bytes({"1.weight": flat}, HostBuffers())   # a snapshot; training may change the tensor
    tensor_file.open_file(path).get("1.weight")                    # a view of the mapped file; nothing is read yet

A safetensors file (https://github.com/huggingface/safetensors) has eight bytes with the length of a JSON header, the
header, and the tensors without gaps. `safetensors.torch.save_file` would make a full copy of the file in memory, and
computes no digest. A checkpoint's tensors are stored flat; exported tensors have their shapes.
"""

from __future__ import annotations

import io
import json
import math
import mmap
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dslpar.checkpoint import writer
from dslpar.checkpoint.folder import FileDigest, unreadable
from dslpar.checkpoint.host_buffers import HostBuffers
from dslpar.core.json_values import count, items, mapping, parse, text

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
"""Torch dtypes by safetensors' names."""

_NAMES = {dtype: name for name, dtype in DTYPES.items()}

_LENGTH_BYTES = 8
"""Size of the field with the header's length."""
_ALIGNED_BYTES = 64
"""Alignment in bytes of the first tensor, for the widest vector loads of CPUs."""
_CHUNK_BYTES = 1 << 23
"""The most bytes of a tensor that are written at once."""
_MAP_FLAGS = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0x4000)
"""Flags of a private map. NORESERVE (named since Python 3.13) reserves no swap space, since maps are not written to."""


def dtype_name(dtype: torch.dtype) -> str:
    """Return safetensors' name of a dtype. Raises: KeyError."""
    return _NAMES[dtype]


# ---- writing ----


class LazyTensor(NamedTuple):
    """A tensor of a file to write; `make` computes it when it is written, and it is freed afterwards."""

    key: str
    """Name in the file."""
    dtype: torch.dtype
    """Dtype in the file."""
    shape: tuple[int, ...]
    """Shape in the file."""
    make: Callable[[], Tensor]
    """Computes the tensor, with this dtype and number of elements."""

    @property
    def num_bytes(self) -> int:
        """Bytes in the file."""
        return math.prod(self.shape) * self.dtype.itemsize


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> FileDigest:
    """Write tensors from any device under their keys, each stored flat, and sync the file to disk.

    Tensors with the widest dtypes come first, so that each tensor is aligned. Tensors on an accelerator are copied to
    the host one at a time.

    Raises:
        OSError: the file cannot be written; an unreadable part of it may remain.
    """
    return writer.write_file(path, file_bytes(tensors, metadata))


def file_bytes(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> Iterator[memoryview]:
    """Yield the bytes of a file of these tensors. Each tensor is read when its bytes are requested."""
    return _lazy_bytes(_flat(tensors), metadata or {}, _ALIGNED_BYTES)


def copied_bytes(tensors: Mapping[str, Tensor], buffers: HostBuffers) -> list[memoryview]:
    """Copy these tensors' present values to `buffers`, and return the bytes of their file.

    The next copy into the buffers overwrites these bytes.
    """
    ordered = _in_file_order(_flat(tensors))
    header = memoryview(_header(ordered, {}, _ALIGNED_BYTES))
    return [header, *buffers.copy(lazy.make() for lazy in ordered)]


def write_lazy_tensors(
    path: Path,
    tensors: Sequence[LazyTensor],
    metadata: Mapping[str, str] | None = None,
    aligned_bytes: int = _ALIGNED_BYTES,
) -> FileDigest:
    """Write tensors with their shapes; only one tensor at a time is in memory. Raises: OSError.

    The first tensor begins at a multiple of `aligned_bytes`.
    """
    return writer.write_file(path, _lazy_bytes(tensors, metadata or {}, aligned_bytes))


def _flat(tensors: Mapping[str, Tensor]) -> list[LazyTensor]:
    return [LazyTensor(key, tensor.dtype, (tensor.numel(),), tensor.detach) for key, tensor in tensors.items()]


def _in_file_order(tensors: Sequence[LazyTensor]) -> list[LazyTensor]:
    return sorted(tensors, key=lambda lazy: -lazy.dtype.itemsize)


def _lazy_bytes(tensors: Sequence[LazyTensor], metadata: Mapping[str, str], aligned_bytes: int) -> Iterator[memoryview]:
    ordered = _in_file_order(tensors)
    yield memoryview(_header(ordered, metadata, aligned_bytes))
    # A tensor is made when the one before it has been written, so that only one is in memory.
    for lazy in ordered:
        yield from _bytes_of(lazy.make())


def _header(ordered: list[LazyTensor], metadata: Mapping[str, str], aligned_bytes: int) -> bytes:
    """Return the header's length and the header, padded with blanks so that the first tensor is aligned."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    start = 0
    for lazy in ordered:
        end = start + lazy.num_bytes
        header[lazy.key] = {"dtype": dtype_name(lazy.dtype), "shape": list(lazy.shape), "data_offsets": [start, end]}
        start = end
    encoded = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    encoded += b" " * (-(len(encoded) + _LENGTH_BYTES) % aligned_bytes)
    return len(encoded).to_bytes(_LENGTH_BYTES, "little") + encoded


def _bytes_of(tensor: Tensor) -> Iterator[memoryview]:
    """Yield a tensor's bytes in chunks. A chunk is released when the next is requested, so the tensor can be freed."""
    # These calls do not copy a contiguous CPU tensor: its bytes are written from the optimizer's own memory.
    flat = tensor.detach().cpu().contiguous().view(-1)
    if flat.numel():
        with memoryview(flat.view(torch.uint8).numpy()) as data:  # type: ignore[arg-type]
            for start in range(0, len(data), _CHUNK_BYTES):
                with data[start : start + _CHUNK_BYTES] as chunk:
                    yield chunk


def torch_bytes(values: object) -> memoryview:
    """Return the bytes of torch.save, to write them with `write_file`: torch.save raises no OSError on a full disk."""
    buffer = io.BytesIO()
    torch.save(values, buffer)
    return buffer.getbuffer()


# ---- reading ----


class TensorSpan(NamedTuple):
    """The place of a tensor in its file."""

    dtype: torch.dtype
    """Dtype in the file."""
    start: int
    """First byte in the file."""
    numel: int
    """Number of elements."""


class TensorFile(NamedTuple):
    """A mapped tensor file. Its tensors are views of the map: the disk is read when they are used, never written."""

    path: Path
    """Path of the file, for messages."""
    memory: mmap.mmap
    """The map of the whole file."""
    spans: Mapping[str, TensorSpan]
    """Key of a tensor -> its place, in file order."""
    metadata: Mapping[str, str]
    """Value of the header's `__metadata__`."""

    def span(self, key: str, dtype: str = "", numel: int = 0) -> TensorSpan:
        """Return the place of a tensor. If a dtype is given, check dtype and number of elements.

        Raises:
            DslparError: CKP216: the file has no such key, or its dtype or number of elements differs.
        """
        if key not in self.spans:
            raise unreadable(self.path, f"it holds no {key!r}")
        span = self.spans[key]
        if dtype and (span.dtype, span.numel) != (DTYPES[dtype], numel):
            found = f"{span.numel} of {dtype_name(span.dtype)}"
            raise unreadable(self.path, f"{key!r} has {found}, but the index says {numel} of {dtype}")
        return span

    def get(self, key: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Return elements [start, stop) of a tensor, flat, as a view. Raises: DslparError: CKP216: out of range."""
        span = self.span(key)
        stop = span.numel if stop is None else stop
        if not 0 <= start <= stop <= span.numel:
            raise unreadable(self.path, f"{key!r} has {span.numel} elements, but {start} to {stop} were requested")
        if start == stop:
            return torch.empty(0, dtype=span.dtype)
        first = span.start + start * span.dtype.itemsize
        return torch.frombuffer(self.memory, dtype=span.dtype, count=stop - start, offset=first)


def open_file(path: Path) -> TensorFile:
    """Map a safetensors file privately: writes to its tensors never reach the file.

    Raises:
        DslparError: CKP216: the file is missing, or not a valid safetensors file.
    """
    try:
        with path.open("rb") as opened:
            # Writable, since torch warns about read-only buffers; private, so that no write reaches the file.
            memory = mmap.mmap(opened.fileno(), 0, flags=_MAP_FLAGS, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        begin = _LENGTH_BYTES + int.from_bytes(memory[:_LENGTH_BYTES], "little")
        if begin > len(memory):
            raise ValueError(f"a header of {begin - _LENGTH_BYTES} bytes in a file of {len(memory)}")
        header = mapping(parse(memory[_LENGTH_BYTES:begin]), "its header")
        metadata = mapping(header.pop("__metadata__", {}), "its metadata")
        spans = {key: _span(recorded, begin, key) for key, recorded in header.items()}
        # As in the safetensors library: bytes between tensors are refused.
        _check_gapless(spans, begin, len(memory))
    except (OSError, ValueError) as error:
        raise unreadable(path, f"{type(error).__name__}: {error}") from error
    return TensorFile(path, memory, spans, metadata)


def _span(value: object, begin: int, key: str) -> TensorSpan:
    recorded = mapping(value, key, "dtype", "shape", "data_offsets")
    dtype = DTYPES[text(recorded["dtype"], f"{key}.dtype", DTYPES)]
    start, end = (count(offset, f"{key}.data_offsets") for offset in items(recorded["data_offsets"], key, length=2))
    numel = math.prod(count(length, f"{key}.shape") for length in items(recorded["shape"], key))
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
        raise ValueError(f"it has {end} bytes, but its header describes {at}")
