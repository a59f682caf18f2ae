"""Config sources: reading within bounds, parsing, and places in characters.

A path is read only if it is a regular file (a FIFO or device would hang), and never more than the bound. Parsing is
`ast.parse`, which runs nothing; its nodes count columns in UTF-8 bytes, findings in characters.
"""

from __future__ import annotations

import ast
import os
import re
import stat
from collections.abc import Mapping
from typing import Any

from dslpar.core.errors import Location
from dslpar.language.codes import MistakeError
from dslpar.language.limits import MAX_SOURCE_BYTES, MAX_TOKENS, too_much

TOKEN = r"\w+|[^\w\s]"


class Source:
    """The text of one file, under the path that findings show."""

    __slots__ = ("lines", "path", "text")

    def __init__(self, path: str, text: str) -> None:
        self.path = path
        self.text = text.replace("\r\n", "\n").replace("\r", "\n")
        self.lines = self.text.split("\n")

    def place(self, node: Any) -> Location:
        """A syntax node's range, kept on the node once it is known."""
        place: Location | None = getattr(node, "place", None)
        if place is None:
            line, end_line = node.lineno, node.end_lineno or node.lineno
            column, end_column = self._column(line, node.col_offset), self._column(end_line, node.end_col_offset)
            place = node.place = Location(self.path, line, column, end_line, end_column)
        return place

    def _column(self, line: int, offset: int) -> int:
        text = self.lines[line - 1] if line <= len(self.lines) else ""
        if not text.isascii():
            offset = len(text.encode("utf-8", "replace")[:offset].decode("utf-8", "ignore"))
        return offset + 1

    def part(self, place: Location, start: int, length: int) -> Location:
        """A range within the first line of a place."""
        return Location(self.path, place.line, start, place.line, start + length)

    def find(self, word: str, place: Location, after: int = 0) -> Location:
        """Where a word stands at or after a place's line and column; the place itself if it does not."""
        column = self.lines[place.line - 1].find(word, max(place.column - 1, after))
        return self.part(place, column + 1, len(word)) if column >= 0 else place


def read_source(path: str, texts: Mapping[str, str]) -> Source:
    """The text of a file, or the one that stands for it. Raises MistakeError if it may not or cannot be read."""
    instead = texts.get(os.path.realpath(path)) if texts else None
    if instead is not None:
        return Source(path, instead)
    try:
        data = _read_regular(path)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise MistakeError("CFG009", f"cannot read {path!r}: {reason}") from None
    if len(data) > MAX_SOURCE_BYTES:
        raise too_much(f"{path!r} has more than {MAX_SOURCE_BYTES // 1024} KiB", "split it, and import the parts")
    return Source(path, decode(data, path))


def _read_regular(path: str) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0))
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError("it is not a regular file")
        chunks: list[bytes] = []
        while sum(len(chunk) for chunk in chunks) <= MAX_SOURCE_BYTES:
            chunks.append(os.read(descriptor, MAX_SOURCE_BYTES + 1))
            if not chunks[-1]:
                break
        return b"".join(chunks)
    finally:
        os.close(descriptor)


def decode(data: bytes, path: str) -> str:
    """UTF-8 text, with or without a byte order mark."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        place = Location(path, line, 1, line, 1)
        raise MistakeError("CFG009", f"byte {error.start} is not UTF-8", "save the file as UTF-8", place) from None


def check_tokens(source: Source) -> None:
    """Refuse what would take too much memory to parse."""
    if len(source.text) > MAX_SOURCE_BYTES:
        raise too_much(f"more than {MAX_SOURCE_BYTES // 1024} KiB of text", "split it, and import the parts")
    if len(source.text) > MAX_TOKENS:
        count = sum(1 for _ in re.finditer(TOKEN, source.text))
        if count > MAX_TOKENS:
            raise too_much(f"more than {MAX_TOKENS:,} words and signs", "split the file, and import the parts")


def parse(source: Source) -> ast.Module:
    """The syntax tree. Raises MistakeError where the text is not Python."""
    check_tokens(source)
    try:
        tree: ast.Module = quiet_parse(source.text, source.path)
        return tree
    except SyntaxError as error:
        place = _place_of_error(error, source)
        raise MistakeError("CFG001", f"this is not Python syntax: {error.msg}", place=place) from None
    except ValueError as error:  # NUL characters, lone surrogates
        raise MistakeError("CFG001", f"this is not text: {error}", "save the file as UTF-8 text") from None
    except (RecursionError, MemoryError):
        raise too_much("expressions nested too deep", "assign the inner parts to names first") from None


def quiet_parse(text: str, path: str, mode: str = "exec") -> Any:
    """`ast.parse` without the warnings (invalid escapes, `1is`) that it would print about somebody's file."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(text, path, mode)


def _place_of_error(error: SyntaxError, source: Source) -> Location:
    line = min(max(error.lineno or 1, 1), len(source.lines))
    column = max(error.offset or 1, 1)
    end_line, end_column = error.end_lineno or line, error.end_offset or 0
    if end_line < line or end_column < 1 or (end_line == line and end_column <= column):
        end_line, end_column = line, column + 1
    return Location(source.path, line, column, end_line, end_column)
