"""Text of a shell script: letters with their positions, some of which are unknown.

A value that only a running shell knows (`$1`, `$(hostname)`) is one unknown letter, which keeps its reason. Known text
around it stays known: `ARGS="--lr 1 $EXTRA"` has two known words.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Unknown(NamedTuple):
    """Reason why a piece of text is unknown."""

    why: str
    """Main clause, such as "`$1` is an argument of the script"."""
    at: int = -1
    """Position of the expansion in the script; -1 until the variable is used."""
    length: int = 0
    """Number of characters of the expansion in the script."""
    many: bool = False
    """Whether it may be any number of words, or none."""
    choices: tuple[str, ...] = ()
    """The possible texts, if they are known."""
    one_word: bool = False
    """Whether it is one word even outside of quotes."""


class Letter(NamedTuple):
    """Character of a script, or an unknown piece of text."""

    char: str
    at: int
    """Position in the script."""
    unknown: Unknown | None = None


Text = tuple[Letter, ...]
HOLE = "\0"
"""Stands for an unknown letter in plain text."""


def letters(text: str, at: int = 0) -> Text:
    """Return the letters of text that begins at a position of the script."""
    return tuple(Letter(char, at + index) for index, char in enumerate(text))


def all_at(text: str, at: int) -> Text:
    """Return letters that share one position, as those of a computed value do."""
    return tuple(Letter(char, at) for char in text)


def hole(unknown: Unknown) -> Letter:
    """Return an unknown letter."""
    return Letter(HOLE, unknown.at, unknown)


def plain(text: Iterable[Letter]) -> str:
    """Return the characters without their positions."""
    return "".join(letter.char for letter in text)


def first_unknown(text: Iterable[Letter]) -> Unknown | None:
    """Return the first unknown piece of a text."""
    return next((letter.unknown for letter in text if letter.unknown is not None), None)


def is_known(text: Iterable[Letter]) -> bool:
    """Return whether every letter is known."""
    return first_unknown(text) is None


def unquoted(letter: Letter) -> Letter:
    """Return a letter outside of quotes: an unknown one may be any number of words, unless it is known to be one."""
    unknown = letter.unknown
    if unknown is None or unknown.one_word:
        return letter
    one_each = bool(unknown.choices) and all(len(text.split()) == 1 and "..." not in text for text in unknown.choices)
    return Letter(HOLE, letter.at, unknown._replace(many=unknown.many or not one_each))


def placed(text: Text, at: int, length: int) -> Text:
    """Give the unknown letters of a variable the position of the expansion that uses it."""
    if is_known(text):
        return text
    return tuple(
        hole(letter.unknown._replace(at=at, length=length)) if letter.unknown and letter.unknown.at < 0 else letter
        for letter in text
    )


def joined(items: Iterable[Text]) -> Text:
    """Join texts by blanks."""
    made: list[Letter] = []
    for number, item in enumerate(items):
        if number:
            made.append(Letter(" ", item[0].at if item else 0))
        made += item
    return tuple(made)
