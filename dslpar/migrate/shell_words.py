"""Split a shell script into the words of its commands, unexpanded; each character keeps its position in the script.

A word consists of pieces: stretches of characters with the same kind of quoting.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

Text = list[tuple[str, int]]
"""Characters, each with its position in the script; UNKNOWN stands for unknown text."""
UNKNOWN = ""


class Word(NamedTuple):
    """Unexpanded word of a command."""

    pieces: list[tuple[str, Text]]
    """(kind, characters) of each piece.

    The kinds: "text" has no variables, "literal" is in single quotes, "expand" is to be expanded and split at blanks,
    and "quoted" is in double quotes, to be expanded but not split.
    """
    items: list[Word] | None = None
    """Words between the parentheses, if the word assigns an array."""


def plain(text: Text) -> str:
    """Return the characters without their positions."""
    return "".join(letter for letter, _ in text)


def lines(script: str) -> Iterator[list[Word]]:
    """Yield the words of each simple command, unexpanded."""
    reader = _Reader(script)
    while reader.left():
        words = reader.command()
        if words:
            yield words


_REDIRECTION = re.compile(r"(?:\d*(?:>>|>&|>\||<&|>|<)|&>>?)[ \t]*")


class _Reader:
    """Reads a script from its start to its end."""

    def __init__(self, script: str) -> None:
        self.script, self.at = script, 0
        self.here: list[str] = []
        """End markers of here-documents (`<<EOF`) whose text begins on the next line."""

    def left(self) -> bool:
        return self.at < len(self.script)

    def command(self) -> list[Word]:
        words: list[Word] = []
        while self.left():
            letter = self.script[self.at]
            if self.script.startswith("\\\n", self.at):
                self.at += 2
            elif letter == "\n":
                self.at += 1
                self._skip_documents()
                return words
            elif letter in " \t":
                self.at += 1
            elif letter == "#":
                end = self.script.find("\n", self.at)
                self.at = end if end >= 0 else len(self.script)
            elif found := re.compile(r"<<-?\s*(['\"]?)(\w+)\1").match(self.script, self.at):
                self.here.append(found[2])
                self.at = found.end()
            elif found := _REDIRECTION.match(self.script, self.at):
                self.at = found.end()
                self._word()  # the file
            elif letter in ";&|()<>":
                self.at += 1
                return words
            else:
                words.append(self._word())
        return words

    def _skip_documents(self) -> None:
        for end in self.here:
            found = re.compile(rf"^\t*{re.escape(end)}$", re.MULTILINE).search(self.script, self.at)
            self.at = found.end() if found else len(self.script)
        self.here = []

    def _word(self) -> Word:
        pieces: list[tuple[str, Text]] = []
        while self.left() and self.script[self.at] not in " \t\n;&|()<>":
            letter = self.script[self.at]
            if self.script.startswith("\\\n", self.at):
                break
            if letter == "'":
                pieces.append(("literal", self._until("'", self.at + 1)))
            elif letter == '"':
                pieces.append(("quoted", self._double_quoted()))
            else:
                pieces.append(self._unquoted())
        items = None
        if pieces and self.left() and self.script[self.at] == "(" and plain(pieces[-1][1]).endswith("="):
            self.at += 1
            items = self._array()
        return Word(pieces, items)

    def _array(self) -> list[Word]:
        """Read the words of an array, up to its closing parenthesis."""
        words: list[Word] = []
        while self.left() and self.script[self.at] != ")":
            if self.script.startswith("\\\n", self.at):
                self.at += 2
            elif self.script[self.at] == "#":
                end = self.script.find("\n", self.at)
                self.at = end if end >= 0 else len(self.script)
            elif self.script[self.at] in " \t\n;&|(<>":
                self.at += 1
            else:
                words.append(self._word())
        self.at += 1
        return words

    def _until(self, end: str, start: int) -> Text:
        stop = self.script.find(end, start)
        stop = stop if stop >= 0 else len(self.script)
        self.at = stop + 1
        return [(self.script[at], at) for at in range(start, stop)]

    def _double_quoted(self) -> Text:
        made: Text = []
        self.at += 1
        while self.left() and self.script[self.at] != '"':
            if self.script.startswith("\\\n", self.at):
                self.at += 2
                continue
            if self.script[self.at] == "\\" and self.at + 1 < len(self.script):
                self.at += 1
            elif self.script.startswith("$(", self.at):
                made += self._parenthesis()
                continue
            made.append((self.script[self.at], self.at))
            self.at += 1
        self.at += 1
        return made

    def _unquoted(self) -> tuple[str, Text]:
        made: Text = []
        while self.left() and self.script[self.at] not in " \t\n;&|()<>'\"":
            if self.script.startswith("\\\n", self.at):
                break
            if self.script.startswith("$(", self.at):
                made += self._parenthesis()
                continue
            if self.script.startswith("${", self.at):
                end = self.script.find("}", self.at)
                end = end if end >= 0 else len(self.script) - 1
                made += [(self.script[at], at) for at in range(self.at, end + 1)]
                self.at = end + 1
                continue
            if self.script[self.at] == "\\" and self.at + 1 < len(self.script):
                self.at += 1
            made.append((self.script[self.at], self.at))
            self.at += 1
        return ("expand" if any(letter in "$`" for letter, _ in made) else "text"), made

    def _parenthesis(self) -> Text:
        """Read `$(...)` or `$((...))` unchanged."""
        start, depth = self.at, 0
        while self.left():
            depth += {"(": 1, ")": -1}.get(self.script[self.at], 0)
            self.at += 1
            if depth == 0 and self.script[self.at - 1] == ")":
                break
        return [(self.script[at], at) for at in range(start, self.at)]
