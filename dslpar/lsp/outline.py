"""Outline of a config: its sections and their keys, with places.

for entry in outline(analysis):
    entry.name, entry.key, entry.whole, entry.children
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from dslpar.core.errors import Location
from dslpar.language.tree import Node
from dslpar.lsp.analysis import Analysis, whole_of


class Entry(NamedTuple):
    """A section or a key that the file writes."""

    name: str
    key: Location
    """Of the name."""
    whole: Location
    """From the name to the end of the value."""
    is_section: bool
    children: tuple[Entry, ...]


def outline(analysis: Analysis) -> list[Entry]:
    """Return the sections of a config in order; values that come from other files are left out."""
    return [*_entries(analysis.config.root, analysis.path)]


def _entries(node: Node, path: str) -> Iterator[Entry]:
    for name, child in node.value.items() if node.is_mapping else ():
        at, key = child.location, child.key_location
        if key is None or key.path != path or at.path != path:
            continue
        whole = whole_of(key, at)
        yield Entry(str(name), key, whole, child.is_mapping, tuple(_entries(child, path)))
