"""Read metrics.jsonl: its last lines, in a time that does not depend on its length, or all lines for plotting.

    tail = read_tail(Path("outputs/gpt_3d/metrics.jsonl"))
    tail.last["loss"], tail.evaluated["eval_loss"], tail.problems
    records, problems = read_records(Path("outputs/gpt_3d/metrics.jsonl"))

A killed run may leave half a line, and a full disk or a broken file system may do more damage. Invalid lines are
skipped, and reported as problems so that readers know that values are missing. TensorBoard's reader, in contrast, ends
at the first damaged record of a file.
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
"""A valid line of metrics.jsonl: a JSON object whose `step` is an integer of at least 0."""

_BLOCK_BYTES = 1 << 14
"""Bytes read from a file's end: about fifty lines."""
_MAX_SEARCH_BYTES = 1 << 22
"""The search for the last evaluation covers at most this many bytes at the file's end."""


class MetricsError(ValueError):
    """The file cannot be read; the message says why."""


class Tail(NamedTuple):
    """End of a metrics.jsonl."""

    records: Sequence[Record]
    """The last records, oldest first."""
    evaluated: Record
    """The last record with an `eval_loss`; empty if no record has one."""
    updated_s: float
    """Time of the last write to the file, in seconds since the epoch."""
    problems: Sequence[str]
    """Problems in the file."""

    @property
    def last(self) -> Record:
        """The last record; empty if the file has no record."""
        return self.records[-1] if self.records else {}


def read_tail(path: Path) -> Tail:
    """Read the last records of a file, and the last one with an evaluation.

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
    """Read all records of a file; return them with ascending steps, and the problems in the file.

    A repeated step means that the run was resumed from an earlier checkpoint. The records from the later attempt count.

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
    """Drop each record that is followed by a record with the same step or an earlier one."""
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
    """Return the last `num_bytes` of a file, without the line that is cut off at the beginning."""
    start = max(size - num_bytes, 0)
    file.seek(start)
    text = file.read(size - start)
    return text.partition(b"\n")[2] if start else text


def _parse(text: bytes) -> tuple[list[Record], list[str]]:
    """Return the valid records among the lines of a text, and problems with the other lines."""
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
    """Return the last record with an `eval_loss`; for speed, parse only lines that contain this name."""
    end = len(text)
    while (found := text.rfind(b'"eval_loss"', 0, end)) >= 0:
        start = text.rfind(b"\n", 0, found) + 1
        stop = text.find(b"\n", found)
        if evaluated := _last_evaluated(_parse(text[start : stop + 1])[0]):
            return evaluated
        end = start
    return {}
