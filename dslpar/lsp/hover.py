"""Explanation of a key at a cursor: its help, its value as resolved, and why.

explanation_at(analysis, line, column)     # markdown; None where there is no key
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from dslpar.core.errors import Location
from dslpar.language.tree import Node
from dslpar.lsp.analysis import Analysis
from dslpar.provenance import text as provenance_text
from dslpar.provenance.query import Answers
from dslpar.provenance.reference import Row, rows
from dslpar.provenance.subject import Subject
from dslpar.provenance.values import Value, values_of


class Key(NamedTuple):
    """A key that is written at a place."""

    dotted: str
    node: Node
    at: Location
    """Of the key, or of the value if the cursor is on it."""


def key_at(analysis: Analysis, line: int, column: int) -> Key | None:
    """Return the innermost key whose name or value is at a line and column, both from 1."""
    found = None
    for dotted, node in _nodes(analysis.config.root, ""):
        for at in (node.key_location, node.location):
            if at is not None and at.path == analysis.path and _contains(at, line, column):
                found = Key(dotted, node, at)
                break
    return found


def _nodes(node: Node, prefix: str) -> Iterator[tuple[str, Node]]:
    """Yield all keys, each before those in it."""
    for name, child in node.value.items() if isinstance(node.value, dict) else ():
        dotted = f"{prefix}{name}"
        yield dotted, child
        yield from _nodes(child, f"{dotted}.")


def _contains(at: Location, line: int, column: int) -> bool:
    return (at.line, at.column) <= (line, column) < (at.end_line, at.end_column)


def explanation_at(analysis: Analysis, line: int, column: int) -> tuple[str, Location] | None:
    """Return the explanation of the key at a line and column in markdown, and the place of the key."""
    key = key_at(analysis, line, column)
    if key is None:
        return None
    subject = Subject(analysis.config, analysis.settings.worlds[0])
    values = values_of(subject)
    found = Answers(subject, values).of(key.dotted)
    own = next((value for value in found if key.dotted in (value.key, value.source_key)), None)
    row = _row(own.key if own is not None else key.dotted)
    if own is None and row is None and not found:
        return None
    return "\n\n".join(_paragraphs(key.dotted, row, own, found)), key.at


def _row(key: str) -> Row | None:
    return next((row for row in rows() if row.key == key), None)


def _paragraphs(key: str, row: Row | None, own: Value | None, found: list[Value]) -> Iterator[str]:
    yield f"**{key}**" + (f": {row.type}" if row is not None and row.type else "")
    help = (own.help if own is not None else "") or (row.help if row is not None else "")
    if help:
        yield help
    if own is not None:
        shown = "unknown" if own.how == "unknown" else f"`{provenance_text.shown(own.value)}`"
        yield f"{shown} ({own.how}{f': {own.why}' if own.why else ''})" + "".join(f"; {note}" for note in own.notes)
    inferred = [value for value in found if value is not own and value.how == "inferred"]
    if inferred:
        yield "\n".join(f"- {value.key} = `{provenance_text.shown(value.value)}`: {value.why}" for value in inferred)
    if row is not None and row.default not in ("", "required"):
        yield f"default: `{row.default}`"
