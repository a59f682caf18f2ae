"""Read pretrained weights from a folder that transformers saved: config.json and safetensors, with or without an index.

Each rank reads only the bytes of its own pieces: safetensors files are memory-mapped, and sliced by rows and columns
(`get_slice`). Nothing is downloaded from a hub.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dslpar.core.catalog import finding, raise_finding
from dslpar.core.errors import DslparError
from dslpar.layers.placement import Placement, piece

CONFIG, INDEX, SINGLE = "config.json", "model.safetensors.index.json", "model.safetensors"
HINT = "name a folder that transformers' save_pretrained wrote, with safe_serialization"


_OLDER = re.compile(r"(?<=LayerNorm\.)(weight|bias)$")
_OLDER_NAMES = {"weight": "gamma", "bias": "beta"}
"""LayerNorm's names in early BERT files, which transformers still reads."""


class Source(NamedTuple):
    """Tensor in the transformers model's state dict."""

    name: str
    """Name in the state dict."""
    transposed: bool = False
    """Whether its shape is [in, out], as in transformers' Conv1D."""


Sources = Mapping[str, tuple[Source, ...]]
"""Name of dslpar's parameter -> the tensors that form it, concatenated along dim 0."""


def merged(sources: tuple[Source, ...], read: Callable[[str], Tensor]) -> Tensor:
    """Return the full tensor of a parameter from its sources."""
    parts = [read(source.name) for source in sources]
    return torch.cat([part.t() if source.transposed else part for part, source in zip(parts, sources, strict=True)])


def read_config(path: str) -> dict[str, Any]:
    """Read the config.json of a folder. Raises: DslparError: the file is missing or no JSON object."""
    file = Path(path, CONFIG)
    try:
        found = json.loads(file.read_bytes())
        if not isinstance(found, dict):
            raise ValueError("it is not a JSON object")
    except (OSError, ValueError) as error:
        why = "there is no such file" if isinstance(error, FileNotFoundError) else str(error)
        raise DslparError([finding("CKP205", f"cannot read {file}: {why}", HINT, path)]) from error
    return found


class Folder:
    """The safetensors files of a model, by tensor name.

    A state is an entry of the model's state dict. Most states are a tensor in the files. `stored` returns the other
    ones, as {state: the tensors in the files that form it}. `base_prefix` is the prefix of the base model's names,
    which files may omit.

    Raises:
        DslparError: there are no safetensors files, or the index is not readable.
    """

    def __init__(
        self, path: str, base_prefix: str = "", stored: Callable[[], Mapping[str, Sequence[StoredPart]]] = dict
    ) -> None:
        self.path, self.base_prefix = Path(path), base_prefix
        self._stored = stored
        self._opened: dict[str, Any] = {}

    @cached_property
    def files(self) -> Mapping[str, str]:
        """Tensor name -> file."""
        index = self.path / INDEX
        try:
            if index.exists():
                return dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
            return dict.fromkeys(self._open(SINGLE).keys(), SINGLE)
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            message = f"cannot read the weights in {self.path}: {error}"
            raise DslparError([finding("CKP205", message, HINT, str(self.path))]) from error

    @cached_property
    def stored(self) -> Mapping[str, Sequence[StoredPart]]:
        """State -> the tensors that form it, for states that are not in the files under their own name."""
        return self._stored()

    def has(self, name: str) -> bool:
        """Return whether the files have a state, or the tensors that form it."""
        return self._known(name) is not None or name in self.stored

    def slice(self, name: str) -> Any:
        """Return a lazy slice of a state, like safetensors' `get_slice`."""
        if self._known(name) is None and name in self.stored:
            return _Joined(self, self.stored[name])
        return self._slice(name)

    def _slice(self, name: str) -> Any:
        known = self._known(name)
        if known is None:
            raise_finding("CKP207", f"{self.path} has no {name!r}", HINT, str(self.path))
        try:
            return self._open(self.files[known]).get_slice(known)
        except (OSError, SafetensorError) as error:
            message = f"cannot read {self.path / self.files[known]}: {error}"
            raise DslparError([finding("CKP205", message, HINT, str(self.path))]) from error

    def _known(self, name: str) -> str | None:
        """Return a tensor's name in the files, or None. Base models are saved without the prefix, others with it."""
        prefix = f"{self.base_prefix}."
        names = (name, name.removeprefix(prefix), prefix + name)
        older = [_OLDER.sub(lambda match: _OLDER_NAMES[match[1]], each) for each in names]
        return next((each for each in (*names, *older) if each in self.files), None)

    def _open(self, file: str) -> Any:
        if file not in self._opened:
            self._opened[file] = safe_open(self.path / file, "pt")
        return self._opened[file]


class StoredPart(NamedTuple):
    """Tensor in the files that fills a rectangular part (a box) of a state."""

    name: str
    """Name of the tensor in the files."""
    starts: tuple[int, ...]
    """First index of the box in each dim of the state."""
    lengths: tuple[int, ...]
    """Length of the box in each dim of the state."""
    order: tuple[int, ...]
    """The tensor's dim for each dim of the state; -1 for a dim that only the state has (an expert's number)."""


class _Joined:
    """Lazy slice of a state that consists of several tensors."""

    def __init__(self, folder: Folder, parts: Sequence[StoredPart]) -> None:
        self.folder, self.parts = folder, parts

    def get_shape(self) -> list[int]:
        """Return the state's shape."""
        ends = [
            [start + length for start, length in zip(part.starts, part.lengths, strict=True)] for part in self.parts
        ]
        return [max(each) for each in zip(*ends, strict=True)]

    def __getitem__(self, index: slice | tuple[slice, ...]) -> Tensor:
        """Read ranges of the state's first dims."""
        shape = self.get_shape()
        given = index if isinstance(index, tuple) else (index,)
        ranges = [given[dim] if dim < len(given) else slice(None) for dim in range(len(shape))]
        bounds = [each.indices(length)[:2] for each, length in zip(ranges, shape, strict=True)]
        # Reads no rows: a rank that holds only padding needs the dtype too.
        dtype = self.folder._slice(self.parts[0].name)[0:0].dtype
        out = torch.empty([end - begin for begin, end in bounds], dtype=dtype)
        for part in self.parts:
            shared = [
                (max(begin, start), min(end, start + length))
                for (begin, end), start, length in zip(bounds, part.starts, part.lengths, strict=True)
            ]
            if all(begin < end for begin, end in shared):
                at = tuple(_relative(shared, [begin for begin, _ in bounds]))
                out[at] = self._read(part, _relative(shared, part.starts))
        return out

    def _read(self, part: StoredPart, ranges: Sequence[slice]) -> Tensor:
        """Read these ranges of a part, counted from the part's start, with the dims of the state."""
        own = sorted((dim, at) for at, dim in enumerate(part.order) if dim >= 0)
        read: Tensor = self.folder._slice(part.name)[tuple(ranges[at] for _, at in own)]
        read = read.permute([dim for dim in part.order if dim >= 0])
        return read.reshape([each.stop - each.start for each in ranges])


def _relative(ranges: Sequence[tuple[int, int]], origin: Sequence[int]) -> list[slice]:
    return [slice(begin - start, end - start) for (begin, end), start in zip(ranges, origin, strict=True)]


class PretrainedWeights(NamedTuple):
    """Initial values of a parameter, read from a folder."""

    folder: Folder
    sources: tuple[Source, ...]

    def piece(self, placement: Placement, coord: Mapping[str, int], seed: int, name: str) -> Tensor:
        """Read this rank's piece. Raises: DslparError: a tensor is missing or has the wrong shape."""
        slices = [self.folder.slice(source.name) for source in self.sources]
        lengths = [_shape(of, source)[0] for of, source in zip(slices, self.sources, strict=True)]
        shape = (sum(lengths), *_shape(slices[0], self.sources[0])[1:])
        if shape != placement.shape:
            names = ", ".join(source.name for source in self.sources)
            message = f"{names} in {self.folder.path} has shape {shape}, but the model needs {placement.shape}"
            raise_finding("CKP207", message, "use the config.json of the same folder", str(self.folder.path))
        rest = [_range(placement, coord, dim) for dim in range(1, len(shape))]
        parts = [
            _read(slices[number], self.sources[number], [slice(begin, end), *rest])
            for number, begin, end in _rows(placement, coord, lengths)
        ]
        found = torch.cat(parts)
        missing = placement.local_shape[0] - len(found)
        return torch.cat([found, found.new_zeros(missing, *found.shape[1:])]) if missing else found


def _shape(of: Any, source: Source) -> tuple[int, ...]:
    shape = tuple(of.get_shape())
    return shape[::-1] if source.transposed else shape


def _read(of: Any, source: Source, ranges: Sequence[slice]) -> Tensor:
    part: Tensor = of[tuple(ranges[::-1] if source.transposed else ranges)]
    return part.t() if source.transposed else part


def _range(placement: Placement, coord: Mapping[str, int], dim: int) -> slice:
    index, count = piece(placement.tensor, coord, placement.cuts[dim])
    length = placement.padded[dim] // count
    return slice(index * length, (index + 1) * length)


def _rows(placement: Placement, coord: Mapping[str, int], lengths: list[int]) -> Iterator[tuple[int, int, int]]:
    """Yield (source, first row, end) of each block's part on the rank at `coord`, without padding rows."""
    index, count = piece(placement.tensor, coord, placement.cuts[0])
    source, offset = 0, 0
    for block in placement.blocks or placement.padded[:1]:
        part = block // count
        begin, end = offset + index * part, offset + (index + 1) * part
        yield source, min(begin, lengths[source]), min(end, lengths[source])
        offset += block
        if offset >= lengths[source] and source + 1 < len(lengths):
            source, offset = source + 1, 0
