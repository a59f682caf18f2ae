"""Index of a checkpoint, `index.json`: the file of each piece of each tensor. No torch.

Every distinct tensor element is stored once, under its parameter's global name: the name in the model without a
pipeline. So a job of any layout can read the tensors with the index alone. Each rank makes an index of the pieces that
it writes, and `merge` joins these indices. A tensor file has the number of the rank that wrote it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from dslpar.checkpoint.folder import TENSORS, unreadable
from dslpar.checkpoint.slices import Box, Piece, Segment, Shape, covers, num_elements
from dslpar.core.json_values import MAX_COUNT, count, items, mapping, number, parse, plain, text

Value = TypeVar("Value")

INDEX = "index.json"
ITEM_BYTES: Mapping[str, int] = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1,
}  # fmt: skip
"""Bytes per element, by safetensors' dtype names."""
MAX_DIMS = 32
MAX_SEGMENTS = 256
"""Maximum number of combinations of a box's segments (see `slices`); saved boxes have several in one dim only."""
SET_BY_OPTIMIZER = ("step",)
"""Keys of an optimizer's parameter group that the optimizer itself changes."""
SET_BY_SCHEDULER = ("lr", "initial_lr", "momentum", "betas")
"""Keys of an optimizer's parameter group that LR schedulers change."""


class IrregularState(NamedTuple):
    """Dtype and shape of an optimizer tensor that has another shape than its parameter."""

    dtype: str
    shape: Shape

    @property
    def num_elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, kw_only=True)
class Entry:
    """Stored tensors of one parameter: its weight and its optimizer state."""

    shape: Shape
    """Full shape, without padding."""
    dtype: str
    """Stored dtype of the weight, in safetensors' names ("F32", "BF16"). If there is a master, it is stored instead."""
    trained: bool = True
    """Whether the parameter requires a gradient."""
    states: Mapping[str, str] = field(default_factory=dict)
    """Key in the optimizer state ("exp_avg") -> dtype, for optimizer tensors of the parameter's shape. They are stored
    in the same pieces as the weight.
    """
    scalars: Mapping[str, Any] = field(default_factory=dict)
    """Scalar optimizer values: a number, or [dtype, number] for a tensor."""
    irregular: Mapping[str, IrregularState] = field(default_factory=dict)
    """Optimizer tensors of other shapes (Adafactor's rows and columns), stored whole in `irregular_file`."""
    irregular_file: int | None = None
    """Number of the tensor file that holds them; None: there are no such tensors."""
    group: int | None = None
    """Number of the parameter's optimizer group in `Index.groups`; None: the parameter is in no group."""
    pieces: Sequence[Piece] = ()
    """Pieces of the weight and of the `states`, one per file."""

    def dtype_of(self, key: str = "") -> str:
        """Return the dtype of the weight (key "") or of an optimizer tensor."""
        return self.states[key] if key else self.dtype


@dataclass(frozen=True)
class Index:
    """Index of all tensors of a checkpoint."""

    parameters: Mapping[str, Entry] = field(default_factory=dict)
    """Parameters by global name, as in `pipeline_module.named_parameters`."""
    copies: Mapping[str, Entry] = field(default_factory=dict)
    """Copies of tied weights on ranks that do not own the weight, by `copy_name`; only the same layout reads them."""
    groups: Sequence[Mapping[str, Any]] = ()
    """Plain values of the optimizer's parameter groups."""

    def entry(self, name: str) -> Entry:
        """Return the entry of a parameter or of a tied copy. Raises: KeyError."""
        return self.parameters[name] if name in self.parameters else self.copies[name]

    def incomplete(self) -> list[str]:
        """Return the names of parameters whose elements are missing or stored twice."""
        named = [*self.parameters.items(), *self.copies.items()]
        return [name for name, entry in named if not covers(entry.pieces, entry.shape)]

    def to_json(self) -> dict[str, Any]:
        """Return the index as plain JSON values."""
        return {
            "parameters": {name: _entry_to_json(entry) for name, entry in self.parameters.items()},
            "copies": {name: _entry_to_json(entry) for name, entry in self.copies.items()},
            "groups": [dict(group) for group in self.groups],
        }

    @classmethod
    def from_json(cls, plain: object, num_bytes: int = MAX_COUNT) -> Index:
        """Read the values of `to_json`. `num_bytes`: size of all tensor files. Raises: ValueError: invalid values."""
        values = mapping(plain, "the index", "parameters", "copies", "groups")
        groups = [
            _group_from_json(group, f"groups[{number}]")
            for number, group in enumerate(items(values["groups"], "groups"))
        ]
        bounds = _Bounds(num_bytes, len(groups))
        parameters, copies = (
            {name: _entry_from_json(entry, name, bounds) for name, entry in mapping(values[key], key).items()}
            for key in ("parameters", "copies")
        )
        return cls(parameters, copies, groups)


def file_key(name: str, state: str = "") -> str:
    """Return the key in tensor files of a weight (state "") or of an optimizer tensor."""
    return f"{name}::{state}" if state else name


def copy_name(name: str, pipe_rank: int) -> str:
    """Return the name in the index of the copy of a tied weight on a pipeline rank."""
    return f"{name}@{pipe_rank}"


def tensor_path(folder: Path, file: int) -> Path:
    """Return the path of the tensor file with this number."""
    return folder / TENSORS / f"{file:05d}.safetensors"


def merge(indices: Iterable[Index]) -> Index:
    """Merge the indices of all ranks into one; optimizer groups with equal values become one group.

    All ranks wait for the merge, so its time must be linear in the number of pieces.
    """
    groups: list[Mapping[str, Any]] = []
    parts: tuple[dict[str, list[Entry]], ...] = {}, {}
    for index in indices:
        # Groups are compared by value, since each rank numbers them by their first parameter on that rank.
        for group in map(dict, index.groups):
            if group not in groups:
                groups.append(group)
        number = [groups.index(group) for group in index.groups]  # the rank's group number -> the merged number
        for found, part in zip(parts, (index.parameters, index.copies), strict=True):
            for name, entry in part.items():
                if entry.group is not None and number[entry.group] != entry.group:
                    entry = replace(entry, group=number[entry.group])
                found.setdefault(name, []).append(entry)
    parameters, copies = ({name: _merge_entries(name, entries) for name, entries in found.items()} for found in parts)
    return Index(parameters, copies, groups)


def _merge_entries(name: str, entries: Sequence[Entry]) -> Entry:
    """Merge the entries of one parameter from several ranks."""
    if len(entries) == 1:
        return entries[0]
    facts = {(entry.shape, entry.dtype, entry.trained) for entry in entries}
    assert len(facts) == 1, f"{name}: {facts}"
    return replace(
        entries[0],
        states=_merge_dicts(entry.states for entry in entries),
        scalars=_merge_dicts(entry.scalars for entry in entries),
        irregular=_merge_dicts(entry.irregular for entry in entries),
        irregular_file=next((entry.irregular_file for entry in entries if entry.irregular_file is not None), None),
        group=next((entry.group for entry in entries if entry.group is not None), None),
        pieces=[piece for entry in entries for piece in entry.pieces],
    )


def _merge_dicts(mappings: Iterable[Mapping[str, Value]]) -> dict[str, Value]:
    return {key: value for mapping in mappings for key, value in mapping.items()}


def load_index(folder: Path) -> Index:
    """Load the index of a checkpoint whose tensor files exist.

    Raises:
        DslparError: CKP216: it is missing, malformed, or larger than the tensor files allow.
    """
    path = folder / INDEX
    try:
        num_bytes = sum(file.stat().st_size for file in (folder / TENSORS).glob("*"))
        return Index.from_json(parse(path.read_bytes()), num_bytes)
    except (OSError, ValueError) as error:
        raise unreadable(
            path, f"{type(error).__name__}: {error}" if isinstance(error, OSError) else str(error)
        ) from error


# ---- as JSON ----


def _entry_to_json(entry: Entry) -> dict[str, Any]:
    # Boxes have their own list, to which pieces refer: thousands of ZeRO shards have only one box per tensor rank.
    boxes = list(dict.fromkeys(piece.box for piece in entry.pieces))
    numbers = {box: number for number, box in enumerate(boxes)}
    plain: dict[str, Any] = {
        "shape": list(entry.shape),
        "dtype": entry.dtype,
        "trained": entry.trained,
        "states": dict(entry.states),
        "numbers": dict(entry.scalars),
        "group": entry.group,
        "boxes": [[[list(segment) for segment in segments] for segments in box] for box in boxes],
        "pieces": [[piece.file, numbers[piece.box], piece.start, piece.stop] for piece in entry.pieces],
    }
    if entry.irregular:
        states = entry.irregular.items()
        plain["odd"] = {key: {"dtype": state.dtype, "shape": list(state.shape)} for key, state in states}
        plain["odd_file"] = entry.irregular_file
    return plain


class _Bounds(NamedTuple):
    """Upper bounds of an entry's values, so that a malformed index is refused before anything large is allocated."""

    num_bytes: int
    """Bytes of all tensor files together; no tensor can be larger."""
    num_groups: int
    """Number of optimizer groups in the index."""


def _entry_from_json(plain: object, name: str, bounds: _Bounds) -> Entry:
    at = f"the entry of {name!r}"
    values = mapping(plain, at, "shape", "dtype", "trained", "states", "numbers", "group", "boxes", "pieces")
    shape, dtype = _shape(values["shape"], f"{at}.shape"), text(values["dtype"], f"{at}.dtype", ITEM_BYTES)
    _check_size(shape, dtype, bounds.num_bytes, at)
    irregular = {
        key: _irregular(state, f"{at}.odd.{key}", bounds.num_bytes)
        for key, state in mapping(values.get("odd", {}), f"{at}.odd").items()
    }
    boxes = [_box(box, len(shape), f"{at}.boxes[{number}]") for number, box in enumerate(items(values["boxes"], at))]
    pieces = [
        _piece(piece, boxes, f"{at}.pieces[{number}]") for number, piece in enumerate(items(values["pieces"], at))
    ]
    if len({piece.file for piece in pieces}) != len(pieces):
        raise ValueError(f"{at} has two shards in one file, which can hold only one tensor per name")
    return Entry(
        shape=shape,
        dtype=dtype,
        trained=values["trained"] is True,
        states={
            key: text(each, f"{at}.states.{key}", ITEM_BYTES) for key, each in mapping(values["states"], at).items()
        },
        scalars={key: _scalar(each, f"{at}.numbers.{key}") for key, each in mapping(values["numbers"], at).items()},
        irregular=irregular,
        irregular_file=count(values.get("odd_file"), f"{at}.odd_file") if irregular else None,
        group=None if values["group"] is None else count(values["group"], f"{at}.group", most=bounds.num_groups - 1),
        pieces=pieces,
    )


def _shape(value: object, at: str) -> Shape:
    shape = tuple(count(length, at) for length in items(value, at))
    if len(shape) > MAX_DIMS:
        raise ValueError(f"{at} has {len(shape)} dims")
    return shape


def _check_size(shape: Shape, dtype: str, num_bytes: int, at: str) -> None:
    if math.prod(shape) * ITEM_BYTES[dtype] > num_bytes:
        raise ValueError(
            f"{at} has shape {list(shape)} of {dtype}, but all tensor files together have {num_bytes} bytes"
        )


def _irregular(value: object, at: str, num_bytes: int) -> IrregularState:
    values = mapping(value, at, "dtype", "shape")
    state = IrregularState(text(values["dtype"], f"{at}.dtype", ITEM_BYTES), _shape(values["shape"], f"{at}.shape"))
    _check_size(state.shape, state.dtype, num_bytes, at)
    return state


def _scalar(value: object, at: str) -> Any:
    """Read a number, or [dtype, number] for a tensor."""
    if not isinstance(value, list):
        return number(value, at)
    dtype, plain = items(value, at, length=2)
    return [text(dtype, at, ITEM_BYTES), number(plain, at)]


def _box(value: object, num_dims: int, at: str) -> Box:
    box = tuple(
        tuple(Segment(*(count(each, at) for each in items(segment, at, length=2))) for segment in items(dim, at))
        for dim in items(value, at, length=num_dims)
    )
    # The number is bounded, since overlaps of two boxes are computed for each combination of their segments.
    if math.prod(map(len, box)) > MAX_SEGMENTS or num_elements(box) > MAX_COUNT:
        raise ValueError(f"{at} has too many segments or elements")
    return box


def _piece(value: object, boxes: Sequence[Box], at: str) -> Piece:
    file, box, start, stop = items(value, at, length=4)
    box = boxes[count(box, f"{at}: the box", most=len(boxes) - 1)]
    stop = count(stop, f"{at}: the end", most=num_elements(box))
    return Piece(count(file, f"{at}: the file"), box, count(start, f"{at}: the start", most=stop), stop)


def _group_from_json(value: object, at: str) -> dict[str, Any]:
    group = mapping(plain(value, at), at)
    for key in {*SET_BY_OPTIMIZER, *SET_BY_SCHEDULER} & group.keys():
        for each in items(group[key], f"{at}.{key}") if key == "betas" else [group[key]]:
            number(each, f"{at}.{key}")
    return group
