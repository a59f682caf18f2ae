"""Read TOML into a tree with locations: tomllib parses the values, and a scanner finds where each key is written.

Neither tomllib nor tomlkit tells lines. The scanner reads only text that tomllib accepted, so it looks for headers
(`[table]`, `[[tables]]`), keys and the ends of values, and judges nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any, NamedTuple

from dslpar.core.errors import Location
from dslpar.language.errors import finding
from dslpar.language.load import Config
from dslpar.language.tree import Node

TOML = ".toml"
_STRING = r'"(?:\\.|[^"\\\n])*"|' + r"'[^'\n]*'"
_LONG = r'"""(?:\\.|[^\\])*?"{3,5}' + r"|'''.*?'{3,5}"
_KEY = re.compile(rf"(?:{_STRING}|[A-Za-z0-9_-]+)(?:[ \t]*\.[ \t]*(?:{_STRING}|[A-Za-z0-9_-]+))*")
_PART = re.compile(rf"{_STRING}|[A-Za-z0-9_-]+")
_BLANK = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_HEADER = re.compile(r"\[\[?[ \t]*")
_TOKEN = re.compile(rf"{_LONG}|{_STRING}|#[^\n]*|[\[\]{{}}\n]|[^\[\]{{}}\n#\"']+", re.DOTALL)
_LINE = re.compile(r"line (\d+), column (\d+)")


class Place(NamedTuple):
    """Place of a key and its value: offsets in the text."""

    key: tuple[int, int]
    value: tuple[int, int]


def values_of(text: str) -> Mapping[str, Any]:
    """Return the values of a TOML text. Raises ValueError if it is none, and where Python has no parser (3.10)."""
    try:
        values: Mapping[str, Any] = import_module("tomllib").loads(text)
    except ModuleNotFoundError:
        raise ValueError("reading TOML needs Python 3.11 or later") from None
    return values


def load_toml(text: str, path: str) -> Config:
    """Read a TOML file. A text that is no TOML has a finding, and no values."""
    text = text.replace("\r\n", "\n")
    try:
        values = values_of(text)
    except ValueError as error:
        found = _LINE.search(str(error))
        line, column = (int(found[1]), int(found[2])) if found else (1, 1)
        place = Location(path, line, column, line, column + 1)
        problem = finding("CFG001", place, f"this is no TOML: {error}", "correct the syntax: TOML's")
        return Config(path, Node({}, Location(path)), (problem,), {path: text}, complete=False)
    places = dict(_places(text))
    lines = _Lines(text, path)
    return Config(path, _node(values, "", places, lines, Location(path)), (), {path: text})


class _Lines:
    """Locations of offsets in a text."""

    def __init__(self, text: str, path: str) -> None:
        self.path = path
        self.starts = [0, *(index + 1 for index, char in enumerate(text) if char == "\n")]

    def location(self, span: tuple[int, int]) -> Location:
        """Return the location of a part of the text."""
        (line, column), (end_line, end_column) = map(self._at, span)
        return Location(self.path, line, column, end_line, end_column)

    def _at(self, offset: int) -> tuple[int, int]:
        from bisect import bisect_right

        line = bisect_right(self.starts, offset)
        return line, offset - self.starts[line - 1] + 1


def _node(value: Any, path: str, places: Mapping[str, Place], lines: _Lines, above: Location) -> Node:
    place = places.get(path)
    location = lines.location(place.value) if place else above
    key = lines.location(place.key) if place else None
    if isinstance(value, dict):
        children = {name: _node(item, f"{path}\0{name}", places, lines, location) for name, item in value.items()}
        return Node(children, location, key)
    if isinstance(value, list):
        return Node([_item(item, location) for item in value], location, key)
    return Node(_plain(value), location, key)


def _item(value: Any, location: Location) -> Node:
    """Return an item of an array, at the array's place."""
    if isinstance(value, list):
        return Node([_item(item, location) for item in value], location)
    return Node(_plain(value), location)


def _plain(value: Any) -> Any:
    """Return a value of the tree: dates, and tables in arrays, become text."""
    return value if isinstance(value, bool | int | float | str) else str(value)


def _places(text: str) -> Iterator[tuple[str, Place]]:
    """Yield the dotted path of each table and key, parts divided by NUL, and its place. The first of a path counts."""
    at, table, seen = 0, "", set[str]()
    while (at := _end(_BLANK, text, at)) < len(text):
        header = _HEADER.match(text, at)
        start = header.end() if header else at
        end = _end(_KEY, text, start)
        path = _path(text[start:end])
        if header:
            table = path
            stop = text.find("\n", end)
            span = (at, len(text) if stop < 0 else stop)
            at = span[1]
        else:
            path = f"{table}{path}"
            first = _end(re.compile(r"[ \t]*=[ \t]*"), text, end)
            at = _value_end(text, first)
            span = (first, at)
        if path not in seen:
            seen.add(path)
            yield path, Place((start, end), (span[0], max(span[1], span[0] + 1)))
        if not header and text[span[0] : span[0] + 1] == "{":
            yield from _inline(text, path, span)


def _inline(text: str, path: str, span: tuple[int, int]) -> Iterator[tuple[str, Place]]:
    """Yield the keys of an inline table and their places."""
    at = _end(_BLANK, text, span[0] + 1)
    while at < span[1] and _KEY.match(text, at):
        end = _end(_KEY, text, at)
        first = _end(re.compile(r"[ \t]*=[ \t]*"), text, end)
        stop = _value_end(text, first, ",}")
        below = f"{path}{_path(text[at:end])}"
        yield below, Place((at, end), (first, max(stop, first + 1)))
        if text[first : first + 1] == "{":
            yield from _inline(text, below, (first, stop))
        at = _end(re.compile(r"[ \t\r\n,]*"), text, stop)


def _end(pattern: re.Pattern[str], text: str, at: int) -> int:
    found = pattern.match(text, at)
    return found.end() if found else at


def _path(key: str) -> str:
    """Return a dotted key with NUL before each part."""
    made = ""
    for part in _PART.findall(key):
        made += "\0" + (part[1:-1] if part[0] in "\"'" else part)
    return made


def _value_end(text: str, at: int, stops: str = "\n") -> int:
    """Return the end of a value: that of its line, or of its closing bracket."""
    depth, start = 0, at
    while at < len(text):
        token = _TOKEN.match(text, at)
        if token is None:  # tomllib accepted the text
            break
        piece = token[0]
        if piece in "[{":
            depth += 1
        elif piece in "]}":
            if not depth:
                break
            depth -= 1
        elif not depth and (piece == "\n" or piece[0] == "#"):
            break
        elif not depth and "," in stops and piece[0] not in "\"'" and "," in piece:
            at += piece.index(",")
            break
        at = token.end()
    return start + len(text[start:at].rstrip())
