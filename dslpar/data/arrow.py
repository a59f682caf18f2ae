"""Read data sets saved by Hugging Face's `datasets` through pyarrow: memory-mapped, never loaded whole.

    rows = find_arrow(job)                  # files, splits and columns checked; heads alone are read
    table = open_rows(job, rows.train)      # a table over the mapped files
    table.texts("text"), table.read(["input_ids", "labels"], 7)

The files are plain Arrow streams, so neither `datasets` nor pandas is imported.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from dslpar.core.catalog import raise_finding
from dslpar.data.token_files import sampled_digest
from dslpar.layout.resolve import Job
from dslpar.schema.arrow_folders import ArrowFolder, read_arrow_folder
from dslpar.schema.datasets import HuggingFaceData, absolute_path

_HINT = "a folder that datasets' save_to_disk wrote"
Array = NDArray[Any]


class ArrowRows(NamedTuple):
    """Rows of a saved data set: either the held-out rows, spread evenly over it, or all other rows."""

    folder: ArrowFolder
    num_all: int
    """Number of rows in the files."""
    num_held_out: int
    """Number of held-out rows among them; with a separate split for evaluation, all or none."""
    held_out: bool
    """Whether these are the held-out rows; if not, all other rows."""
    identity: str
    """Digest of these rows, independent of their path."""

    @property
    def num_rows(self) -> int:
        """Number of these rows."""
        return self.num_held_out if self.held_out else self.num_all - self.num_held_out

    def row(self, index: int) -> int:
        """Return the index in the files of the index-th of these rows."""
        if self.held_out:  # the middle row of each of num_held_out equal stretches
            return (2 * index + 1) * self.num_all // (2 * self.num_held_out)
        row = index * self.num_all // self.num_rows
        while row - self._held_out_before(row) > index:
            row -= 1
        while row + 1 - self._held_out_before(row + 1) <= index:
            row += 1
        return row

    def _held_out_before(self, row: int) -> int:
        return (2 * row * self.num_held_out + self.num_all - 1) // (2 * self.num_all)


class Table:
    """Training or held-out rows of a saved data set, read by column from memory-mapped files."""

    def __init__(self, job: Job, rows: ArrowRows) -> None:
        self.job, self.rows, self.table = job, rows, _table(job, rows.folder)
        self.num_rows, self.columns = rows.num_rows, tuple(rows.folder.columns)

    def texts(self, column: str) -> Iterator[str]:
        """Yield the texts of a column in the order of the files; null is an empty text."""
        values = self.table.column(column)
        for index in range(self.rows.num_rows):
            yield values[self.rows.row(index)].as_py() or ""

    def read(self, columns: Sequence[str], index: int) -> Mapping[str, Array]:
        """Return these columns of a row as arrays: integers as int64, other numbers as float32."""
        row = self.rows.row(index)
        return {name: self._array(name, row) for name in columns}

    def _array(self, name: str, row: int) -> Array:
        value = self.table.column(name)[row]
        flat = getattr(value, "values", None)
        try:
            found = np.asarray(
                value.as_py() if flat is None or _is_nested(flat) else flat.to_numpy(zero_copy_only=False)
            )
        except ValueError as error:  # ragged nested lists
            refuse(self.job, self.rows.folder, f"row {row} of {name!r}: {error}")
        if found.dtype.kind not in "biuf":
            refuse(self.job, self.rows.folder, f"row {row} of {name!r} has a value that is not a number")
        return found.astype(np.int64 if found.dtype.kind in "biu" else np.float32)


def find_arrow(job: Job) -> tuple[ArrowRows, ArrowRows]:
    """Find and check a saved data set; return the training rows and the held-out rows.

    Raises:
        DslparError: the data set cannot be used, or pyarrow is not installed.
    """
    data = job.spec.data
    assert isinstance(data, HuggingFaceData)
    if importlib.util.find_spec("pyarrow") is None:
        message = "data of type 'huggingface' need the package pyarrow, which is not installed"
        raise_finding("BAT212", message, "pip install dslpar[data]", job.path, "data.type")
    train = _read(job, data.split, "data.split")
    if data.eval_split is not None:
        other = _read(job, data.eval_split, "data.eval_split")
        sizes = _num_rows(job, train), _num_rows(job, other)
        return _rows(train, sizes[0], 0, False), _rows(other, sizes[1], sizes[1], True)
    size = _num_rows(job, train)
    count = min(max(round(size * data.eval_fraction), 1), size - 1) if data.eval_fraction and size else 0
    return _rows(train, size, count, False), _rows(train, size, count, True)


def refuse(job: Job, folder: ArrowFolder, problem: str, key: str = "data.path") -> NoReturn:
    """Raise a finding about an unusable data set."""
    raise_finding("BAT222", f"{folder.path!r}: {problem}", _HINT, job.path, key)


def _read(job: Job, split: str | None, key: str) -> ArrowFolder:
    data = job.spec.data
    assert isinstance(data, HuggingFaceData)
    found = read_arrow_folder(absolute_path(job.path, data.path), split)
    if found.problem:
        refuse(job, found, found.problem, key if found.is_split else "data.path")
    if data.text_column is not None and found.columns.get(data.text_column) not in ("string", "large_string"):
        what = found.columns.get(data.text_column)
        problem = f"its column {data.text_column!r} is {what}" if what else f"it has no column {data.text_column!r}"
        refuse(job, found, f"{problem}; it has {', '.join(found.columns)}", "data.text_column")
    return found


def _rows(folder: ArrowFolder, size: int, num_held_out: int, held_out: bool) -> ArrowRows:
    seen = [(os.path.getsize(path), sampled_digest(path)) for path in folder.files]
    identity = hashlib.sha256(repr((folder.fingerprint, size, num_held_out, held_out, seen)).encode()).hexdigest()
    return ArrowRows(folder, size, num_held_out, held_out, identity)


def _num_rows(job: Job, folder: ArrowFolder) -> int:
    return int(_table(job, folder).num_rows)


def _table(job: Job, folder: ArrowFolder) -> Any:
    import pyarrow as pa

    try:
        opened = [pa.ipc.open_stream(pa.memory_map(path)).read_all() for path in folder.files]
        return pa.concat_tables(opened) if opened else pa.table({name: [] for name in folder.columns})
    except (pa.ArrowInvalid, OSError) as error:
        refuse(job, folder, str(error))


def _is_nested(array: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_nested(array.type))
