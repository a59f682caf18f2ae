"""Read metrics.jsonl: the last lines quickly, whatever its length, or the whole file for plotting.

    tail = read_tail(Path("outputs/gpt_3d/metrics.jsonl"))
    tail.last["loss"], tail.evaluated["eval_loss"], tail.problems
    records, problems = read_records(Path("outputs/gpt_3d/metrics.jsonl"))

A killed run may leave half a line, and a full disk or a broken file system may do more damage. Invalid lines are
skipped and reported, so that nobody mistakes the rest for the whole. (TensorBoard's reader ends at the first damaged
record of a file.)
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

Record = Mapping[str, Any]
"""A line of metrics.jsonl, with an integer as its `step`."""

_BLOCK_BYTES = 1 << 14
"""Bytes read from a file's end: about fifty lines."""
_MAX_SEARCH_BYTES = 1 << 22
"""Bytes from the end in which the last evaluation is searched."""


class MetricsError(ValueError):
    """A file that cannot be read; the message says why."""


class Tail(NamedTuple):
    """End of a metrics.jsonl."""

    records: Sequence[Record]
    """Last records, oldest first."""
    evaluated: Record
    """Last record with an `eval_loss`; empty if there is none."""
    updated_s: float
    """Time of the last write to the file, in seconds since the epoch."""
    problems: Sequence[str]
    """Problems in the file."""

    @property
    def last(self) -> Record:
        """Last record; empty if there is none."""
        return self.records[-1] if self.records else {}


def read_tail(path: Path) -> Tail:
    """Read the last records of a file.

    Raises:
        MetricsError: the file cannot be read.
    """
    try:
        with _open(path) as file:
            size = os.fstat(file.fileno()).st_size
            text = _read_end(file, size, _BLOCK_BYTES)
            records, problems = _parse(text)
            evaluated = _last_evaluated(records)
            if not evaluated and size > _BLOCK_BYTES:
                evaluated = _search_evaluated(_read_end(file, size, _MAX_SEARCH_BYTES))
            return Tail(records, evaluated, os.fstat(file.fileno()).st_mtime, problems)
    except OSError as error:
        raise MetricsError(error.strerror or str(error)) from error


def read_records(path: Path) -> tuple[list[Record], list[str]]:
    """Read all records of a file, and its problems.

    Steps ascend: a repeated step means that the run was resumed from before it, so the earlier records are dropped.

    Raises:
        MetricsError: the file cannot be read.
    """
    try:
        with _open(path) as file:
            records, problems = _parse(file.read())
    except OSError as error:
        raise MetricsError(error.strerror or str(error)) from error
    if len(kept := ascending(records)) < len(records):
        problems.append(f"{len(records) - len(kept)} steps are repeated; the later ones count")
    return kept, problems


def ascending(records: Sequence[Record]) -> list[Record]:
    """Return the records without those that a later record replaces, which has the same step or an earlier one."""
    kept: list[Record] = []
    for record in records:
        while kept and kept[-1]["step"] >= record["step"]:
            kept.pop()
        kept.append(record)
    return kept


def number(record: Record, name: str) -> float | None:
    """Return a metric of a record as a finite number; None if it is missing, null, or not a finite number."""
    value = record.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    try:
        value = float(value)
    except OverflowError:  # an integer of more than 300 digits
        return None
    return value if math.isfinite(value) else None


def _open(path: Path) -> BinaryIO:
    # Opening a pipe would wait for ever.
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise MetricsError("no file")
    return open(path, "rb")


def _read_end(file: BinaryIO, size: int, num_bytes: int) -> bytes:
    """Return the last bytes of a file, from the start of a line on."""
    start = max(size - num_bytes, 0)
    file.seek(start)
    text = file.read(size - start)
    return text.partition(b"\n")[2] if start else text


def _parse(text: bytes) -> tuple[list[Record], list[str]]:
    """Return the records among lines, and problems with other lines."""
    records: list[Record] = []
    bad = 0
    *lines, rest = text.split(b"\n")
    for line in lines:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        if isinstance(record, dict) and type(record.get("step")) is int and record["step"] >= 0:
            records.append(record)
        else:
            bad += 1
    problems = [f"{bad} {'line is not a record' if bad == 1 else 'lines are not records'}"] if bad else []
    return records, problems + (["the last line is cut off"] if rest else [])


def _last_evaluated(records: Sequence[Record]) -> Record:
    return next((record for record in reversed(records) if "eval_loss" in record), {})


def _search_evaluated(text: bytes) -> Record:
    """Return the last record with an evaluation; parse only lines that may have one."""
    end = len(text)
    while (found := text.rfind(b'"eval_loss"', 0, end)) >= 0:
        start = text.rfind(b"\n", 0, found) + 1
        stop = text.find(b"\n", found)
        if evaluated := _last_evaluated(_parse(text[start : stop + 1])[0]):
            return evaluated
        end = start
    return {}
