"""Weights of a folder that transformers saved: config.json and safetensors files, in one or with an index.

Each rank reads the bytes of its own pieces, and no others: safetensors files are mapped, and sliced by rows and columns
(`get_slice`). No hub is asked: a folder is a folder.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dslpar.core.catalog import finding, raise_finding
from dslpar.core.errors import DslparError
from dslpar.layers.placement import Placement, piece
from dslpar.policies.modules import Source

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
HINT = "name a folder that transformers' save_pretrained wrote, with safe_serialization"


class Folder:
    """The files of a model, by the names of its tensors.

    Raises:
        DslparError: there are no safetensors files, or the index is not readable.
    """

    def __init__(self, path: str, base_prefix: str = "") -> None:
        self.path, self.base_prefix = Path(path), base_prefix
        self._opened: dict[str, Any] = {}

    @cached_property
    def files(self) -> Mapping[str, str]:
        """Tensor's name -> its file."""
        index = self.path / INDEX
        try:
            if index.exists():
                return dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
            return dict.fromkeys(self._open(SINGLE).keys(), SINGLE)
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            message = f"cannot read the weights in {self.path}: {error}"
            raise DslparError([finding("CKP205", message, HINT, str(self.path))]) from error

    def slice(self, name: str) -> Any:
        """Return a tensor that is not read yet; a base model's are saved without its prefix."""
        known = next((each for each in (name, name.removeprefix(f"{self.base_prefix}.")) if each in self.files), None)
        if known is None:
            raise_finding("CKP207", f"{self.path} has no {name!r}", HINT, str(self.path))
        return self._open(self.files[known]).get_slice(known)

    def _open(self, file: str) -> Any:
        if file not in self._opened:
            self._opened[file] = safe_open(self.path / file, "pt")
        return self._opened[file]


class PretrainedWeights(NamedTuple):
    """How a parameter begins: as a folder has it."""

    folder: Folder
    sources: tuple[Source, ...]

    def piece(self, placement: Placement, coord: Mapping[str, int], seed: int, name: str) -> Tensor:
        """Read this rank's piece. Raises: DslparError: a tensor is missing, or has another shape."""
        slices = [self.folder.slice(source.name) for source in self.sources]
        lengths = [_shape(of, source)[0] for of, source in zip(slices, self.sources, strict=True)]
        shape = (sum(lengths), *_shape(slices[0], self.sources[0])[1:])
        if shape != placement.shape:
            names = ", ".join(source.name for source in self.sources)
            message = f"{names} of {self.folder.path} has shape {shape}, the model's {placement.shape}"
            raise_finding("CKP207", message, "the config.json of the same folder", str(self.folder.path))
        columns = _range(placement, coord, 1) if len(shape) > 1 else None
        parts = [
            _read(slices[number], self.sources[number], begin, end, columns)
            for number, begin, end in _rows(placement, coord, lengths)
        ]
        found = torch.cat(parts)
        missing = placement.local_shape[0] - len(found)
        return torch.cat([found, found.new_zeros(missing, *found.shape[1:])]) if missing else found


def _shape(of: Any, source: Source) -> tuple[int, ...]:
    shape = tuple(of.get_shape())
    return shape[::-1] if source.transposed else shape


def _read(of: Any, source: Source, begin: int, end: int, columns: tuple[int, int] | None) -> Tensor:
    if columns is None:
        vector: Tensor = of[begin:end]
        return vector
    first, last = columns
    part: Tensor = of[first:last, begin:end].t() if source.transposed else of[begin:end, first:last]
    return part


def _range(placement: Placement, coord: Mapping[str, int], dim: int) -> tuple[int, int]:
    index, count = piece(placement.tensor, coord, placement.cuts[dim])
    length = placement.padded[dim] // count
    return index * length, (index + 1) * length


def _rows(placement: Placement, coord: Mapping[str, int], lengths: list[int]) -> Iterator[tuple[int, int, int]]:
    """Yield (source, first row, end) of each block's part that the rank at `coord` holds; padding is no row."""
    index, count = piece(placement.tensor, coord, placement.cuts[0])
    source, offset = 0, 0
    for block in placement.blocks or placement.padded[:1]:
        part = block // count
        begin, end = offset + index * part, offset + (index + 1) * part
        yield source, min(begin, lengths[source]), min(end, lengths[source])
        offset += block
        if offset >= lengths[source] and source + 1 < len(lengths):
            source, offset = source + 1, 0
