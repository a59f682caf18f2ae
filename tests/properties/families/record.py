"""The record of rows that ran: proven.jsonl, a line per row, written by `python -m tests.properties.families`.

The pages' tables are made from it, so they show what ran. A test compares its rows with the table of tests.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tests.properties.families.table import ROWS

PATH = Path(__file__).with_name("proven.jsonl")

Seen = Mapping[str, float]
"""Largest relative deviations of a row from plain transformers: loss, norm and weights."""


def read() -> dict[str, Seen]:
    """Return the results of each row that ran, in the file's order."""
    lines = PATH.read_text().splitlines() if PATH.exists() else []
    return dict(json.loads(line) for line in lines)


def add(name: str, seen: Seen) -> None:
    """Add or replace the result of a row, and drop rows that no longer exist. Safe in parallel."""
    with _locked():
        found = read() | {name: {what: float(f"{value:.1e}") for what, value in seen.items()}}
        lines = [json.dumps([row, found[row]]) + "\n" for row in ROWS if row in found]
        part = PATH.with_suffix(".part")
        part.write_text("".join(lines))
        os.replace(part, PATH)


@contextmanager
def _locked() -> Iterator[None]:
    """Lock the folder, so that parallel runs keep each other's rows."""
    folder = os.open(PATH.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)
