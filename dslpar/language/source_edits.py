"""Edits of a config's text that set a key or leave it out, where the author wrote it.

    set_key(config, text, "parallel.tensor.size", "4")     # Fix, or None: the text computes the value
    leave_out(config, text, "zero.stage")

A value is replaced if the text has it as a literal. A key that a section lacks is added to its `dict(...)` or `{...}`,
in a line of its own if the others are; a section that the config lacks is added at the end of the text. Imported and
computed values are never changed, nor is a variable: other keys may use it. Everything else stays as it is.
"""

from __future__ import annotations

import ast
import contextlib
import os
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from dslpar.core.errors import Fix, Location
from dslpar.language.load import NO_SHORTHANDS, YAML_ENDINGS, Config
from dslpar.language.source import Source, parse_quietly
from dslpar.language.tree import Node

_COMMA_AND_COMMENT = re.compile(r"\s*(?P<comma>,?)\s*(?:#.*)?")
"""What stands behind an entry that has its line to itself."""


class _Entry(NamedTuple):
    """A key in a `dict(...)` or `{...}` of the text, or an element of a list."""

    name: str
    whole: ast.AST
    """What is left out with it: a keyword, or the key of a pair."""
    value: ast.expr


def set_key(
    config: Config, text: str, key: str, value: str, shorthands: Mapping[str, str] = NO_SHORTHANDS
) -> Fix | None:
    """Return the edit that gives a key a value, as Python source; None if the text computes it or is no Python.

    `shorthands`: key of a section -> its key that a bare value stands for, as in `pipeline=2`.
    """
    if config.path.endswith(YAML_ENDINGS):
        return None
    node = config.root.get(key)
    if node is not None:
        at = node.location
        is_own = _is_here(config, at) and _is_in_place(config, text, key)
        return Fix(at, value) if is_own and _is_literal(excerpt(text, at)) else None
    *above, name = key.split(".")
    depth = next((d for d in range(len(above), -1, -1) if config.root.get(".".join(above[:d])) is not None), 0)
    for part in reversed(above[depth + (depth == 0) :]):
        name, value = part, f"dict({name}={value})"
    if depth == 0:
        section = above[0] if above else name
        made = f"{section} = dict({name}={value})" if above else f"{name} = {value}"
        return _at_end(config, text, made)
    section = ".".join(above[:depth])
    parent = config.root.get(section)
    assert parent is not None
    if not _is_in_place(config, text, section):
        return None
    if not parent.is_mapping and section in shorthands:
        return _in_short_form(config, text, parent, shorthands[section], name, value)
    return _added(config, text, parent, name, value)


def leave_out(config: Config, text: str, key: str) -> Fix | None:
    """Return the edit that removes a key; None if the text does not have it in one place."""
    if config.path.endswith(YAML_ENDINGS):
        return None
    above, _, name = key.rpartition(".")
    if not above:
        return _without_statement(config, text, name)
    parent = config.root.get(above)
    found = None if parent is None else _entries(config, text, parent)
    if found is None or not _is_in_place(config, text, above):
        return None
    source, entries, _ = found
    places = [index for index, entry in enumerate(entries) if entry.name == name]
    return _without_entry(source, entries, places[0]) if len(places) == 1 else None


def leave_one_of_two_out(config: Config, text: str, at: Location, *, first: bool) -> Fix | None:
    """Return the edit that removes one of two entries of the same key in the `{...}` around a place."""
    source = Source(config.path, text)
    place = (at.line, at.column)
    with contextlib.suppress(SyntaxError, ValueError):
        for found in ast.walk(parse_quietly(source.text, config.path)):
            begin, end = _span(source, found) if isinstance(found, ast.Dict) else (place, place)
            if not isinstance(found, ast.Dict) or not begin <= place < end:
                continue
            entries = _pairs(found)
            names = [each.name for each in entries or ()]
            twice = [index for index, name in enumerate(names) if names.count(name) > 1]
            if entries and len(twice) > 1:
                return _without_entry(source, entries, twice[0 if first else 1])
    return None


def _without_entry(source: Source, entries: Sequence[_Entry], at: int) -> Fix:
    begin, end = _span(source, entries[at].whole)[0], _span(source, entries[at].value)[1]
    before, after = source.lines[begin[0] - 1][: begin[1] - 1], source.lines[end[0] - 1][end[1] - 1 :]
    if not before.strip() and _COMMA_AND_COMMENT.fullmatch(after) and end[0] < len(source.lines):
        # Lines of its own go as a whole, with its comment; the comments of the other entries stay.
        return Fix(_location(source, (begin[0], 1), (end[0] + 1, 1)), "")
    if at + 1 < len(entries):
        end = _span(source, entries[at + 1].whole)[0]
    elif at:
        begin = _span(source, entries[at - 1].value)[1]
    return Fix(_location(source, begin, end), "")


def leave_statement_out(config: Config, text: str, line: int) -> Fix | None:
    """Return the edit that removes the statement that ends at or after a line; None if the text is no Python."""
    source = Source(config.path, text)
    with contextlib.suppress(SyntaxError, ValueError):
        for node in parse_quietly(source.text, config.path).body:
            if (node.end_lineno or 0) >= line:
                return _without_lines(source, node)
    return None


def excerpt(text: str, at: Location) -> str:
    """Return the characters of a text at a place."""
    lines = text.split("\n")[at.line - 1 : at.end_line]
    if not lines:
        return ""
    lines[-1] = lines[-1][: at.end_column - 1]
    lines[0] = lines[0][at.column - 1 :]
    return "\n".join(lines)


# ---- sections ----


def _entries(config: Config, text: str, node: Node) -> tuple[Source, list[_Entry], ast.expr] | None:
    """Return the entries of a section or list that this file writes out, and the whole expression."""
    if not _is_here(config, node.location):
        return None
    source = Source(config.path, text)
    with contextlib.suppress(SyntaxError, ValueError):
        for found in ast.walk(parse_quietly(source.text, config.path)):
            if not isinstance(found, ast.expr) or source.location(found) != node.location:
                continue
            if isinstance(found, ast.Call):
                is_plain = not found.args and all(each.arg is not None for each in found.keywords)
                entries = [_Entry(each.arg or "", each, each.value) for each in found.keywords] if is_plain else None
            elif isinstance(found, ast.Dict):
                entries = _pairs(found)
            elif isinstance(found, ast.List):
                entries = [_Entry(str(index), each, each) for index, each in enumerate(found.elts)]
            else:
                continue
            return None if entries is None else (source, entries, found)
    return None


def _pairs(found: ast.Dict) -> list[_Entry] | None:
    """Return the entries of a `{...}`; None if it has computed keys."""
    pairs = [
        _Entry(str(key.value), key, value)
        for key, value in zip(found.keys, found.values, strict=True)
        if isinstance(key, ast.Constant)
    ]
    return pairs if len(pairs) == len(found.keys) else None


def _in_short_form(config: Config, text: str, section: Node, short: str, name: str, value: str) -> Fix | None:
    """Set a key of a section that is written as a bare value: `zero = 2` becomes `zero = dict(stage=2, ...)`."""
    old = excerpt(text, section.location)
    if not _is_here(config, section.location) or not _is_literal(old):
        return None
    return Fix(section.location, value if name == short else f"dict({short}={old}, {name}={value})")


def _added(config: Config, text: str, parent: Node, name: str, value: str) -> Fix | None:
    found = _entries(config, text, parent)
    if found is None or isinstance(found[2], ast.List):
        return None
    source, entries, whole = found
    written = f"{name}={value}" if isinstance(whole, ast.Call) else f"{name!r}: {value}"
    if entries:
        last = entries[-1]
        begin = _span(source, last.value)[1]
        lines = {_span(source, entry.whole)[0][0] for entry in entries}
        first = _span(source, last.whole)[0]
        is_own_line = len(lines) == len(entries) and source.lines[first[0] - 1][: first[1] - 1].strip() == ""
        indent = " " * (first[1] - 1)
        line = source.lines[begin[0] - 1]
        rest = line[begin[1] - 1 :]
        if is_own_line and (found_rest := _COMMA_AND_COMMENT.fullmatch(rest)):
            # Behind the last entry's comment, which stays with it.
            kept = rest if found_rest["comma"] else f",{rest}"
            added = f"{kept}\n{indent}{written}{found_rest['comma']}"
            return Fix(_location(source, begin, (begin[0], len(line) + 1)), added)
        return Fix(_location(source, begin, begin), f",\n{indent}{written}" if is_own_line else f", {written}")
    end = _span(source, whole)[1]
    place = (end[0], end[1] - 1)
    return Fix(_location(source, place, place), written)


def _at_end(config: Config, text: str, statement: str) -> Fix:
    lines = text.split("\n")
    at = (len(lines), len(lines[-1]) + 1)
    end = "" if not lines[-1] else "\n"
    return Fix(Location(config.path, *at, *at), f"{end}{statement}\n")


def _without_statement(config: Config, text: str, name: str) -> Fix | None:
    source = Source(config.path, text)
    with contextlib.suppress(SyntaxError, ValueError):
        made = [node for node in parse_quietly(source.text, config.path).body if _assigns(node, name)]
        if len(made) == 1:
            return _without_lines(source, made[0])
    return None


def _without_lines(source: Source, node: ast.stmt) -> Fix | None:
    """Return the edit that removes the lines of a statement; None if another statement shares them."""
    begin, end = _span(source, node)
    around = source.lines[begin[0] - 1][: begin[1] - 1] + source.lines[end[0] - 1][end[1] - 1 :].partition("#")[0]
    if around.strip():
        return None
    after = (end[0] + 1, 1) if end[0] < len(source.lines) else end
    return Fix(_location(source, (begin[0], 1), after), "")


def _assigns(node: ast.stmt, name: str) -> bool:
    targets: Sequence[ast.expr] = node.targets if isinstance(node, ast.Assign) else ()
    if isinstance(node, ast.AnnAssign):
        targets = [node.target]
    return len(targets) == 1 and isinstance(targets[0], ast.Name) and targets[0].id == name


# ---- places ----


_ASSIGNED = re.compile(r"\s*(?::[^=\n]*)?[=:]\s*\(?\s*")
"""What stands between a key and its own value."""


def _is_in_place(config: Config, text: str, key: str) -> bool:
    """Return whether a value and the sections around it are written at their keys.

    They are not if a variable has the value or a section: other keys may use it, too.
    """
    parts = key.split(".")
    paths = [".".join(parts[: depth + 1]) for depth in range(len(parts))]
    nodes = [(path, config.root.get(path)) for path in paths]
    return all(node is not None and _is_beside_its_key(config, text, path, node) for path, node in nodes)


def _is_beside_its_key(config: Config, text: str, key: str, node: Node) -> bool:
    above = config.root.get(key.rpartition(".")[0]) if "." in key else None
    written = node.key_location
    if written is None:  # an element of a list
        return above is not None and _contains(above.location, node.location)
    if written.path != node.location.path:
        return False
    source = Source(config.path, text)
    begin, end = ((written.end_line, written.end_column), (node.location.line, node.location.column))
    lines = source.lines[begin[0] - 1 : end[0]]
    if begin > end or not lines:
        return False
    lines[-1] = lines[-1][: end[1] - 1]
    lines[0] = lines[0][begin[1] - 1 :]
    return _ASSIGNED.fullmatch("\n".join(lines)) is not None


def _contains(outer: Location, inner: Location) -> bool:
    return outer.path == inner.path and outer[1:3] <= inner[1:3] and inner[3:5] <= outer[3:5]


def _is_here(config: Config, at: Location) -> bool:
    return os.path.realpath(at.path) == os.path.realpath(config.path)


def _is_literal(text: str) -> bool:
    with contextlib.suppress(SyntaxError, ValueError, RecursionError, MemoryError):
        node = ast.parse(text.strip(), mode="eval").body
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "dict":
            return not node.args
        ast.literal_eval(node)
        return True
    return False


def _span(source: Source, node: ast.AST) -> tuple[tuple[int, int], tuple[int, int]]:
    at = source.location(node)
    return (at.line, at.column), (at.end_line, at.end_column)


def _location(source: Source, begin: tuple[int, int], end: tuple[int, int]) -> Location:
    return Location(source.path, *begin, *end)
