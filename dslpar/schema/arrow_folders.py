"""Folders saved by Hugging Face's `datasets`: read their metadata, without pyarrow.

folder/dataset_dict.json          {"splits": ["train", "test"]}, and a folder for each split; or, for a single split:
folder/state.json                 the names of the data files, and a fingerprint
folder/dataset_info.json          the columns and their types
folder/data-00000-of-00002.arrow  rows: Arrow's stream format

found = read_arrow_folder("corpus", "train")
found.problem, found.columns, found.files
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, NamedTuple

from dslpar.core.json_values import items, mapping, parse, text

STATE, INFO, DICT = "state.json", "dataset_info.json", "dataset_dict.json"
_MAX_BYTES = 64 << 20


class ArrowFolder(NamedTuple):
    """One split of a saved data set."""

    path: str
    """Path of the split's own folder."""
    columns: Mapping[str, str] = {}
    """Column -> type, such as 'string' or 'list of int32'."""
    files: tuple[str, ...] = ()
    """Paths of the .arrow files, in order."""
    fingerprint: str = ""
    """The fingerprint by which `datasets` identifies the rows."""
    splits: tuple[str, ...] = ()
    """All splits of the data set; empty if it has none."""
    problem: str = ""
    """Reason why the folder cannot be used; empty if it can."""
    missing: bool = False
    """Whether the path does not exist."""
    is_split: bool = False
    """Whether the problem is that the requested split does not exist."""


def read_arrow_folder(path: str, split: str | None = None) -> ArrowFolder:
    """Read the metadata of a saved data set, or of one split (None: 'train'); `problem` has a mistake, if any."""
    if not os.path.exists(path):
        return ArrowFolder(path, problem="there is no such folder", missing=True)
    try:
        if os.path.isfile(os.path.join(path, DICT)):
            names = items(mapping(_read(path, DICT), DICT, "splits")["splits"], "splits")
            splits = tuple(text(name, "splits") for name in names)
            name = split or "train"
            if name not in splits:
                problem = f"it has the splits {', '.join(splits)}, but no {name!r}"
                return ArrowFolder(path, splits=splits, problem=problem, is_split=True)
            return _read_split(os.path.join(path, name))._replace(splits=splits)
        if not os.path.isfile(os.path.join(path, STATE)):
            return ArrowFolder(path, problem=f"it is not a folder that save_to_disk wrote: it has no {STATE}")
        if split is not None:
            return ArrowFolder(path, problem=f"it has no splits, and no {split!r}", is_split=True)
        return _read_split(path)
    except OSError as error:
        return ArrowFolder(path, problem=f"{os.path.basename(str(error.filename))}: {error.strerror}")
    except ValueError as error:
        return ArrowFolder(path, problem=str(error))


def _read_split(path: str) -> ArrowFolder:
    state = mapping(_read(path, STATE), STATE, "_data_files", "_fingerprint")
    names = [
        text(mapping(file, "_data_files", "filename")["filename"], "filename")
        for file in items(state["_data_files"], "_data_files")
    ]
    for name in names:
        if os.path.basename(name) != name or not os.path.isfile(os.path.join(path, name)):
            raise ValueError(f"{name}: there is no such file")
    features = mapping(mapping(_read(path, INFO), INFO, "features")["features"], "features")
    columns = {name: _described(feature) for name, feature in features.items()}
    files = tuple(os.path.join(path, name) for name in names)
    return ArrowFolder(path, columns, files, text(state["_fingerprint"], "_fingerprint"))


def _described(feature: Any) -> str:
    """Return the type of a column; for a list, with the type of its items."""
    if isinstance(feature, list):  # the form of lists in older versions
        return f"list of {_described(feature[0])}" if feature else "list"
    if not isinstance(feature, dict):
        return "unknown"
    kind = str(feature.get("_type", "dict"))
    if kind == "Value":
        return str(feature.get("dtype", "unknown"))
    if kind in ("List", "LargeList", "Sequence"):
        return f"list of {_described(feature.get('feature'))}"
    return "int64" if kind == "ClassLabel" else kind


def _read(path: str, name: str) -> Any:
    with open(os.path.join(path, name), "rb") as file:
        data = file.read(_MAX_BYTES + 1)
    try:
        if len(data) > _MAX_BYTES:
            raise ValueError(f"more than {_MAX_BYTES:,} bytes")
        return parse(data)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
