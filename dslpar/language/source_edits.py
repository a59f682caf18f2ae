"""Edits of a config's text that set a key or leave it out, where the author wrote it.

    set_key(config, text, "parallel.tensor.size", "4")     # Fix, or None: the text computes the value
    leave_out(config, text, "zero.stage")

A value is replaced if the text has it as a literal. A key that a section lacks is added to its `dict(...)` or `{...}`,
in a line of its own if the others are; a section that the config lacks is added at the end of the text. Imported and
computed values are never changed. Everything else stays as it is.
"""

from __future__ import annotations

import ast
import contextlib
import os
from collections.abc import Sequence
from typing import NamedTuple

from dslpar.core.errors import Fix, Location
from dslpar.language.load import YAML_ENDINGS, Config
from dslpar.language.source import Source, parse_quietly
from dslpar.language.tree import Node


class _Entry(NamedTuple):
    """A key in a `dict(...)` or `{...}` of the text."""

    name: str
    whole: ast.AST
    """What is left out with it: a keyword, or the key of a pair."""
    value: ast.expr


def set_key(config: Config, text: str, key: str, value: str) -> Fix | None:
    """Return the edit that gives a key a value, as Python source; None if the text computes it or is no Python."""
    if config.path.endswith(YAML_ENDINGS):
        return None
    node = config.root.get(key)
    if node is not None:
        at = node.location
        return Fix(at, value) if _is_here(config, at) and _is_literal(_excerpt(text, at)) else None
    *above, name = key.split(".")
    depth = next((d for d in range(len(above), -1, -1) if config.root.get(".".join(above[:d])) is not None), 0)
    for part in reversed(above[depth + (depth == 0) :]):
        name, value = part, f"dict({name}={value})"
    if depth == 0:
        section = above[0] if above else name
        made = f"{section} = dict({name}={value})" if above else f"{name} = {value}"
        return _at_end(config, text, made)
    parent = config.root.get(".".join(above[:depth]))
    assert parent is not None
    return _added(config, text, parent, name, value)


def leave_out(config: Config, text: str, key: str) -> Fix | None:
    """Return the edit that removes a key; None if the text does not have it in one place."""
    if config.path.endswith(YAML_ENDINGS):
        return None
    above, _, name = key.rpartition(".")
    if not above:
        return _without_statement(config, text, name)
    parent = config.root.get(above)
    found = None if parent is None else _mapping(config, text, parent)
    if found is None:
        return None
    source, entries, _ = found
    places = [index for index, entry in enumerate(entries) if entry.name == name]
    if len(places) != 1:
        return None
    (at,) = places
    begin, end = _span(source, entries[at].whole)[0], _span(source, entries[at].value)[1]
    if at + 1 < len(entries):
        end = _span(source, entries[at + 1].whole)[0]
    elif at:
        begin = _span(source, entries[at - 1].value)[1]
    return Fix(_location(source, begin, end), "")


# ---- sections ----


def _mapping(config: Config, text: str, node: Node) -> tuple[Source, list[_Entry], ast.expr] | None:
    """Return the entries of a section that this file writes as `dict(...)` or `{...}`, and the whole expression."""
    if not node.is_mapping or not _is_here(config, node.location):
        return None
    source = Source(config.path, text)
    with contextlib.suppress(SyntaxError, ValueError):
        for found in ast.walk(parse_quietly(source.text, config.path)):
            if not isinstance(found, (ast.Call, ast.Dict)) or source.location(found) != node.location:
                continue
            if isinstance(found, ast.Call):
                if found.args or any(each.arg is None for each in found.keywords):
                    return None
                return source, [_Entry(each.arg or "", each, each.value) for each in found.keywords], found
            pairs = list(zip(found.keys, found.values, strict=True))
            if not all(isinstance(each, ast.Constant) for each, _ in pairs):
                return None
            return source, [_Entry(str(each.value), each, value) for each, value in pairs], found  # type: ignore[union-attr, arg-type]
    return None


def _added(config: Config, text: str, parent: Node, name: str, value: str) -> Fix | None:
    found = _mapping(config, text, parent)
    if found is None:
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
            begin, end = _span(source, made[0])
            last = len(source.lines)
            after = (end[0] + 1, 1) if end[0] < last else end
            return Fix(_location(source, (begin[0], 1), after), "")
    return None


def _assigns(node: ast.stmt, name: str) -> bool:
    targets: Sequence[ast.expr] = node.targets if isinstance(node, ast.Assign) else ()
    if isinstance(node, ast.AnnAssign):
        targets = [node.target]
    return len(targets) == 1 and isinstance(targets[0], ast.Name) and targets[0].id == name


# ---- places ----


def _is_here(config: Config, at: Location) -> bool:
    return os.path.realpath(at.path) == os.path.realpath(config.path)


def _excerpt(text: str, at: Location) -> str:
    lines = text.split("\n")[at.line - 1 : at.end_line]
    if not lines:
        return ""
    lines[-1] = lines[-1][: at.end_column - 1]
    lines[0] = lines[0][at.column - 1 :]
    return "\n".join(lines)


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
