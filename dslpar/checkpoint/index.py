"""`index.json`: which piece of which tensor lies in which file of a checkpoint. No torch.

Every distinct element is stored once, under the global name of its parameter, so the index is all that any layout needs
to read it. Each rank makes an index of what it writes; `merge` makes them one. Files are numbered by the writing rank.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from dslpar.checkpoint.folder import TENSORS
from dslpar.checkpoint.slices import Piece, Segment, Shape, covers
from dslpar.core.catalog import finding
from dslpar.core.errors import DslparError

Value = TypeVar("Value")

INDEX = "index.json"


class IrregularState(NamedTuple):
    """An optimizer's tensor of another shape than its parameter's."""

    dtype: str
    shape: Shape


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One parameter, and its optimizer state."""

    shape: Shape
    """Full shape, without padding."""
    dtype: str
    """Dtype of the weight as stored, by safetensors' name: "F32", "BF16"; the master's, where there is one."""
    trained: bool = True
    states: Mapping[str, str] = field(default_factory=dict)
    """Optimizer tensors of the parameter's shape, stored in the same pieces: {key: dtype}."""
    scalars: Mapping[str, Any] = field(default_factory=dict)
    """Optimizer values without dims: a number, or [dtype, number] for a tensor."""
    irregular: Mapping[str, IrregularState] = field(default_factory=dict)
    """Optimizer tensors of other shapes (Adafactor's rows and columns), stored whole in `irregular_file`."""
    irregular_file: int | None = None
    group: int | None = None
    """Number of its group in the index; None: it is in none."""
    pieces: Sequence[Piece] = ()

    def dtype_of(self, key: str = "") -> str:
        """Return the dtype of the weight (""), or of that optimizer tensor."""
        return self.states[key] if key else self.dtype


@dataclass(frozen=True)
class Index:
    """All of a checkpoint's tensors."""

    parameters: Mapping[str, Entry] = field(default_factory=dict)
    """By global names, as `pipeline_module.named_parameters` has them."""
    copies: Mapping[str, Entry] = field(default_factory=dict)
    """Tied copies on later stages, by `copy_name`; read in the same layout only."""
    groups: Sequence[Mapping[str, Any]] = ()
    """Plain values of the optimizer's groups."""

    def entry(self, name: str) -> Entry:
        """Return the entry of a parameter or of a tied copy. Raises: KeyError."""
        return self.parameters[name] if name in self.parameters else self.copies[name]

    def incomplete(self) -> list[str]:
        """Return the names of parameters of which elements are missing or stored twice."""
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
    def from_json(cls, plain: Mapping[str, Any]) -> Index:
        """Read `to_json`'s values. Raises: KeyError, TypeError, ValueError or IndexError: these are no such values."""
        parameters, copies = (
            {name: _entry_from_json(entry) for name, entry in plain[key].items()} for key in ("parameters", "copies")
        )
        return cls(parameters, copies, list(plain["groups"]))


def file_key(name: str, state: str = "") -> str:
    """Return the key of a weight ("") or of an optimizer's tensor in tensor files."""
    return f"{name}::{state}" if state else name


def copy_name(name: str, stage: int) -> str:
    """Return the name of a tied copy."""
    return f"{name}@{stage}"


def tensor_path(folder: Path, file: int) -> Path:
    """Return the tensor file of that number."""
    return folder / TENSORS / f"{file:05d}.safetensors"


def merge(indices: Iterable[Index]) -> Index:
    """Merge what all ranks have written into one index; groups of equal values become one.

    Its time is linear in the number of pieces, since all ranks wait for it.
    """
    groups: list[Mapping[str, Any]] = []
    parts: tuple[dict[str, list[Entry]], ...] = {}, {}
    for index in indices:
        # Compared by their values: on each rank they are numbered as that rank met them.
        for group in map(dict, index.groups):
            if group not in groups:
                groups.append(group)
        number = [groups.index(group) for group in index.groups]  # in the merged index, by the rank's own number
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
    """Load the index of a checkpoint.

    Raises:
        DslparError: CKP216: it is missing, or no index.
    """
    path = folder / INDEX
    try:
        return Index.from_json(json.loads(path.read_bytes()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise unreadable(path, f"{type(error).__name__}: {error}") from error


def unreadable(path: Path, why: str) -> DslparError:
    """Make the error of a checkpoint's file that cannot be read as what it should be."""
    message = f"{path} is no file of a checkpoint, or is corrupted: {why}"
    hint = "`dslpar checkpoint verify` names every corrupted file; resume from another one: checkpoint.resume_from=NAME"
    return DslparError([finding("CKP216", message, hint, str(path))])


# ---- as JSON ----


def _entry_to_json(entry: Entry) -> dict[str, Any]:
    # Boxes stand apart: thousands of ZeRO shards have only as many boxes as there are tensor ranks.
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


def _entry_from_json(plain: Mapping[str, Any]) -> Entry:
    boxes = [
        tuple(tuple(Segment(_count(start), _count(length)) for start, length in dim) for dim in box)
        for box in plain["boxes"]
    ]
    return Entry(
        shape=tuple(map(_count, plain["shape"])),
        dtype=str(plain["dtype"]),
        trained=bool(plain["trained"]),
        states=dict(plain["states"]),
        scalars=dict(plain["numbers"]),
        irregular={
            key: IrregularState(str(state["dtype"]), tuple(map(_count, state["shape"])))
            for key, state in plain.get("odd", {}).items()
        },
        irregular_file=plain.get("odd_file"),
        group=plain["group"],
        pieces=[Piece(_count(file), boxes[box], _count(a), _count(b)) for file, box, a, b in plain["pieces"]],
    )


def _count(value: object) -> int:
    if not isinstance(value, int) or value < 0:
        raise ValueError(f"{value!r} is no count")
    return value
