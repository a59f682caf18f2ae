"""Config files: reading within bounds, parsing, and locations in characters.

A path is read only if it is a regular file (a FIFO or device would hang), and only up to the bound. `ast.parse` runs
no code. Its nodes count columns in UTF-8 bytes, while findings count characters.
"""

from __future__ import annotations

import ast
import os
import re
import warnings
from bisect import bisect_right
from collections.abc import Mapping
from typing import Any

from dslpar.core.errors import Location
from dslpar.core.regular_file import read_bounded
from dslpar.language.errors import ConfigError
from dslpar.language.limits import MAX_SOURCE_BYTES, MAX_TOKENS, limit_error

TOKEN = r"\w+|[^\w\s]"


class Source:
    """Text of one file, and the path that findings show."""

    __slots__ = ("_starts", "lines", "path", "text")

    def __init__(self, path: str, text: str) -> None:
        self.path = path
        self.text = text.replace("\r\n", "\n").replace("\r", "\n")
        self.lines = self.text.split("\n")
        self._starts: list[int] = []

    def position(self, index: int) -> tuple[int, int]:
        """Return the line and column, both from 1, of a character index; an index beyond the text gives its end."""
        if not self._starts:
            self._starts = [0, *(match.end() for match in re.finditer("\n", self.text))]
        index = min(index, len(self.text))
        line = bisect_right(self._starts, index)
        return line, index - self._starts[line - 1] + 1

    def location(self, node: Any) -> Location:
        """Return the location of a syntax node, and cache it on the node."""
        location: Location | None = getattr(node, "location", None)
        if location is None:
            line, end_line = node.lineno, node.end_lineno or node.lineno
            column, end_column = self._column(line, node.col_offset), self._column(end_line, node.end_col_offset)
            location = node.location = Location(self.path, line, column, end_line, end_column)
        return location

    def _column(self, line: int, offset: int) -> int:
        text = self.lines[line - 1] if line <= len(self.lines) else ""
        if not text.isascii():
            offset = len(text.encode("utf-8", "replace")[:offset].decode("utf-8", "ignore"))
        return offset + 1

    def part(self, location: Location, start: int, length: int) -> Location:
        """Return a range within the first line of a location."""
        return Location(self.path, location.line, start, location.line, start + length)

    def find(self, word: str, location: Location, after: int = 0) -> Location:
        """Find a word in a location's line, at or after the column; return the location unchanged if there is none."""
        column = self.lines[location.line - 1].find(word, max(location.column - 1, after))
        return self.part(location, column + 1, len(word)) if column >= 0 else location


def read_source(path: str, texts: Mapping[str, str]) -> Source:
    """Read a file, or take the text that replaces it. Raises ConfigError if it is too big or cannot be read."""
    text = texts.get(os.path.realpath(path)) if texts else None
    if text is not None:
        return Source(path, text)
    try:
        data = read_bounded(path, MAX_SOURCE_BYTES)
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the path
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError("CFG009", f"cannot read {path!r}: {reason}") from None
    if len(data) > MAX_SOURCE_BYTES:
        raise limit_error(
            f"{path!r} has more than {MAX_SOURCE_BYTES // 1024} KiB", "choose parts of it, and import them"
        )
    return Source(path, decode(data, path))


def import_by_position(name: str, importer: str) -> str:
    """Return the hint to use a relative import, if a full name's module is a file next to `importer`; else empty."""
    module, _, last = name.rpartition(".")
    path = os.path.join(os.path.dirname(importer), *module.split("."))
    if not module or not os.path.isfile(f"{path}.py"):
        return ""
    return f"write `from .{module} import {last}`, which reads a config by its position"


def decode(data: bytes, path: str) -> str:
    """Decode UTF-8 text, with or without a byte order mark. Raises ConfigError if it is not UTF-8."""
    try:
        return data.decode("utf-8-sig").lstrip("\ufeff")  # libyaml skips further marks and does not count them
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        location = Location(path, line, 1, line, 1)
        raise ConfigError(
            "CFG009",
            f"cannot decode byte {error.start} as UTF-8",
            "correct the encoding: save the file as UTF-8",
            location,
        ) from None


def check_tokens(source: Source) -> None:
    """Refuse a text that would take too much memory to parse."""
    if len(source.text) > MAX_SOURCE_BYTES:
        raise limit_error(f"more than {MAX_SOURCE_BYTES // 1024} KiB of text", "choose parts of it, and import them")
    if len(source.text) > MAX_TOKENS:
        count = sum(1 for _ in re.finditer(TOKEN, source.text))
        if count > MAX_TOKENS:
            raise limit_error(f"more than {MAX_TOKENS:,} tokens", "choose parts of the file, and import them")


def parse(source: Source) -> ast.Module:
    """Parse to a syntax tree. Raises ConfigError if the text is not Python."""
    check_tokens(source)
    try:
        tree: ast.Module = parse_quietly(source.text, source.path)
        return tree
    except SyntaxError as error:
        location = _location_of_error(error, source)
        raise ConfigError("CFG001", f"cannot parse this as Python: {error.msg}", location=location) from None
    except ValueError as error:  # NUL characters, lone surrogates
        raise ConfigError(
            "CFG001", f"cannot parse this as text: {error}", "correct the encoding: save the file as UTF-8 text"
        ) from None
    except (RecursionError, MemoryError):  # raised by CPython's parser if its own stack is full
        raise limit_error(
            "expressions are nested too deeply", "choose inner parts, and assign them to names first"
        ) from None


def parse_quietly(text: str, path: str, mode: str = "exec") -> Any:
    """Call `ast.parse` without printing its warnings about the author's file (invalid escapes, `1is`)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(text, path, mode)


def _location_of_error(error: SyntaxError, source: Source) -> Location:
    line = min(max(error.lineno or 1, 1), len(source.lines))
    column = max(error.offset or 1, 1)
    end_line, end_column = error.end_lineno or line, error.end_offset or 0
    if end_line < line or end_column < 1 or (end_line == line and end_column <= column):
        end_line, end_column = line, column + 1
    return Location(source.path, line, column, end_line, end_column)
