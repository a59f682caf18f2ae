"""The place of a cursor in a config's text, also where the text does not parse.

    place_at("model = dict(type='GPT', experts=dict(nu", 1, 41)
    # Place(kind="key", path=("model", "experts"), key="", word="nu", ...)

The statement is read token by token up to the cursor; open brackets tell the sections around it. So nothing after the
cursor matters, which is what an editor needs while somebody types.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

Kind = Literal["name", "key", "value", "import"]
"""What may be written at a cursor: a top-level name, a key of a section, a value, or a name of an imported file."""
_TOKEN = re.compile(
    r"#[^\n]*|'''(?:\\.|[^\\])*?(?:'''|\Z)|\"\"\"(?:\\.|[^\\])*?(?:\"\"\"|\Z)"
    r"|'(?:\\.|[^\\'\n])*(?:'|(?=\n)|\Z)|\"(?:\\.|[^\\\"\n])*(?:\"|(?=\n)|\Z)"
    r"|[^\W\d]\w*|\d\w*(?:\.\w*)?|\.\d\w*|==|[()\[\]{}=:,.]|[^\s\w]",
    re.DOTALL,
)
_WORD = re.compile(r"\w*\Z")
_STATEMENT = re.compile(r"^(?=[^\W\d]|@)", re.MULTILINE)


class Place(NamedTuple):
    """A place where something may be completed."""

    kind: Kind
    path: tuple[str, ...]
    """Names of the sections around the cursor, from the outermost."""
    key: str
    """For a value, the key that gets it."""
    word: str
    """The part of the name, number or string before the cursor."""
    quote: str = ""
    """The quotation mark that begins the word; empty outside a string."""
    given: frozenset[str] = frozenset()
    """Keys of this section before the cursor."""
    module: str = ""
    """For an import, the module, such as ".common.models"."""

    @property
    def dotted(self) -> str:
        """The dotted key of a value, or of the section for a key."""
        return ".".join((*self.path, self.key) if self.key else self.path)


@dataclass
class _Frame:
    """An open bracket."""

    bracket: str
    key: str
    """The key whose value it begins; empty for an item of a list."""
    names: set[str] = field(default_factory=set)
    """Keys before the cursor."""
    pending: str = ""
    """The key whose value is being written."""


def place_at(text: str, line: int, column: int) -> Place | None:
    """Return the place at a line and column, both from 1; None in a comment."""
    before = _before(text, line, column)
    starts = [match.start() for match in _STATEMENT.finditer(before)]
    statement = before[starts[-1] :] if starts else before
    if found := _in_import(statement):
        return found
    while True:
        place = _place(statement)
        # A line without indentation within brackets looks like a statement: read on from the one before.
        if place is None or place.path or place.kind != "name" or len(starts) < 2:
            return place
        starts.pop()
        longer = before[starts[-1] :]
        other = _place(longer)
        if other is None or not other.path or not _is_argument(statement):
            return place
        statement = longer


class Rest(NamedTuple):
    """The part of a name or string after the cursor in it."""

    length: int
    """Characters up to the end of the word; of a key, with its closing quotation mark."""
    is_assigned: bool
    """A `=`, or a `:` after a key in quotation marks, follows."""


def rest_at(text: str, line: int, column: int, place: Place) -> Rest:
    """Return the rest of the word at a place, which a completion replaces too."""
    lines = text.split("\n")
    after = lines[line - 1][column - 1 :] if line <= len(lines) else ""
    # Values such as '2.5d' and 'h100-80g', and dotted names, are one word.
    word = re.match(r"[\w.-]*" if place.kind == "value" and place.quote else r"\w*", after)
    length = word.end() if word is not None else 0
    if place.kind == "key" and place.quote and after.startswith(place.quote, length):
        length += len(place.quote)
    sign = ":" if place.quote else r"=(?!=)"
    return Rest(length, place.kind != "value" and re.match(rf"\s*{sign}", after[length:]) is not None)


def rest_of_setting(text: str, line: int, column: int) -> int:
    """Return the characters after the cursor of a setting's name, with its `=`, or of its value."""
    lines = text.split("\n")
    match = re.match(r"[\w-]*=?", lines[line - 1][column - 1 :] if line <= len(lines) else "")
    return match.end() if match is not None else 0


def _is_argument(statement: str) -> bool:
    """Return whether a line without indentation may be within brackets: nothing but a word so far."""
    return re.fullmatch(r"\w*", statement) is not None


def _before(text: str, line: int, column: int) -> str:
    lines = text.split("\n")
    return "\n".join([*lines[: line - 1], lines[line - 1][: column - 1] if line <= len(lines) else ""])


def _in_import(statement: str) -> Place | None:
    match = re.match(r"from\s+([.\w]+)\s+import\s+\(?(?:\w+\s*(?:as\s+\w+\s*)?,\s*)*(\w*)\Z", statement)
    return Place("import", (), "", match[2], module=match[1]) if match else None


def _place(statement: str) -> Place | None:
    frames = [_Frame("", "")]
    last, before_last, open_string, end = "", "", "", 0
    owners: tuple[str, ...] = ()
    """Names before the dots of a name: those of `train.dist.` in `train.dist.size`."""
    for match in _TOKEN.finditer(statement):
        token = match[0]
        if token.startswith("#"):
            if match.end() == len(statement):
                return None
            continue
        frame = frames[-1]
        if token[0] in "'\"" and match.end() == len(statement) and not _is_closed(token):
            open_string = token
            break
        if len(frames) == 1 and last and "\n" in statement[end : match.start()]:
            frame.pending, last = "", ""  # the statement has ended
        if token in "([{":
            is_call = token == "(" and re.fullmatch(r"\w+", last) is not None
            frames.append(_Frame("call" if is_call else token, frame.pending))
        elif token in ")]}":
            if len(frames) > 1:
                frames.pop()
        elif token == ",":
            frame.pending = ""
        elif token == "=" and re.fullmatch(r"\w+", last):
            frame.pending = ".".join((*owners, last)) if len(frames) == 1 else last
            frame.names.add(frame.pending)
        elif token == ":" and frame.bracket == "{" and last[:1] in ("'", '"'):
            frame.pending = last.strip("'\"")
            frame.names.add(frame.pending)
        owners = (*owners, last) if token == "." and re.fullmatch(r"\w+", last) else owners if last == "." else ()
        before_last, last, end = last, token, match.end()
    frame = frames[-1]
    if len(frames) == 1 and "\n" in statement[end:]:
        return Place("name", (), "", "")
    path = tuple(part for each in frames[1:] if each.key for part in each.key.split("."))
    if open_string:
        quote = open_string[:3] if open_string[:3] in ("'''", '"""') else open_string[0]
        word = open_string[len(quote) :]
        if frame.bracket == "{" and not frame.pending:
            return Place("key", path, "", word, quote, frozenset(frame.names))
        return Place("value", path, frame.pending, word, quote, frozenset(frame.names))
    found = _WORD.search(statement)
    word = found[0] if found else ""
    previous = before_last if word and word == last else last
    if frame.pending:
        return Place("value", path, frame.pending, word, given=frozenset(frame.names))
    if frame.bracket in ("(", "[") and frame.key:  # an item of a list
        return Place("value", path, "", word)
    if len(frames) == 1:
        return Place("name", (), "", word) if previous in ("", word) else None
    if frame.bracket == "call" and previous in ("(", ","):
        return Place("key", path, "", word, given=frozenset(frame.names))
    return None


def _is_closed(token: str) -> bool:
    for quote in ("'''", '"""'):
        if token.startswith(quote):
            return len(token) >= 6 and token.endswith(quote)
    return len(token) >= 2 and token[-1] == token[0]
