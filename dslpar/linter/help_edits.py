"""Changes that the help of a finding names, as data: for editors, and for the tests that follow each help.

    for alternative in alternatives(finding.help):        # "size=4 or 8" has two
        for change in changes(alternative, finding): ...  # SetKey("parallel.tensor.size", "4")

A help has one or more alternatives, separated by "or". Each has one or more changes, separated by "with" or "and". Text
in brackets, after a colon, or in a separate clause without "or" is explanation. A change names keys from their section
on, or keys beside its finding's:

    batch.micro_size=4                 also "add k=1 to zero", "at least 4", "4 or more", "such as 4"
    4                                  of the finding's own key
    did you mean 'size'?               where the finding stands
    leave it out, leave momentum out   and "keep one of a and b": either is left out
    here that is train.steps           the value moves, as by "write it under train.steps"
    start 16 ranks, --world-size 6     of the world

Values that only the author knows are holes (`...`, `N`, `NAME`), or follow "choose": such alternatives are left out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

from dslpar.core.errors import Finding
from dslpar.schema.sections_reader import SECTIONS


class SetKey(NamedTuple):
    """Give a key a value."""

    key: str
    value: str
    """Python source."""


class LeaveOut(NamedTuple):
    """Remove a key."""

    key: str


class LeaveItOut(NamedTuple):
    """Remove what the finding marks, which has no key: by its fix if it has one, else the whole statement."""


class LeaveEntry(NamedTuple):
    """Remove one of two entries of the same key in a dict."""

    which: Literal["first", "second"]


class Meant(NamedTuple):
    """Write another name where the finding stands, in the same quotation marks."""

    name: str


class Write(NamedTuple):
    """Write Python source where the finding stands."""

    code: str


class Move(NamedTuple):
    """Move the value of the finding's key to another key."""

    key: str


class Start(NamedTuple):
    """Start another number of ranks."""

    world: int


class Trust(NamedTuple):
    """Trust a package."""

    package: str


class ByProgram(NamedTuple):
    """Say that a program makes the model."""


class Slots(NamedTuple):
    """Give the line of a hostfile, or each line, a number of slots."""

    slots: int
    each: bool


Change = SetKey | LeaveOut | LeaveItOut | LeaveEntry | Meant | Write | Move | Start | Trust | ByProgram | Slots


class UnreadableHelpError(Exception):
    """A help without a change that can be carried out to the letter."""


HOLE = re.compile(r"\.\.\.|\b(?:N|NAME|SLOT|FILE|VALUE|REGEX|choose|correct|value itself|key=value)\b")
"""Marks of a help that only its reader can complete."""

CLAUSE_OF_ITS_OWN = re.compile(r"(?:write|add|leave|keep|set|choose|name|give)\b")
"""Beginning of a clause that would be one more change: after a semicolon, no help has one."""


def alternatives(text: str) -> list[str]:
    """Split a help at each "or" into alternatives without holes and explanations."""
    clauses = _clauses(text)
    known: list[str] = []
    for clause in (clauses[0], *(each for each in clauses[1:] if each.startswith("or "))):
        if re.match(r"(?:or )?(?:choose|correct)\b", clause):
            continue
        for part in _split(clause.removeprefix("or "), r",? or (?!more)"):
            if part and not HOLE.search(part):
                known += _kept_one(_split(part.removeprefix("nearest legal: "), r": ")[0].strip())
    for number, part in enumerate(known):  # in `size=4 or 8`, the second value belongs to the first's key
        key = re.match(rf"{_KEY} ?= ?", known[number - 1]) if number else None
        if key and re.fullmatch(_VALUE, part):
            known[number] = key[0] + part
    return known


def explanations(text: str) -> list[str]:
    """Return the clauses of a help after its first that are no alternatives."""
    return [clause for clause in _clauses(text)[1:] if not clause.startswith("or ")]


def changes(alternative: str, finding: Finding) -> list[Change]:
    """Return what an alternative changes, in its order.

    Raises:
        UnreadableHelpError: If a part of it has none of the known forms.
    """
    return list(_changes(alternative, finding))


def _clauses(text: str) -> list[str]:
    text = re.sub(r"(?<=\S) \([^()]*\)", "", text).replace("? Or ", "?; or ")
    text = re.sub(r"start (\d+) or (\d+) ranks", r"start \1 ranks or start \2 ranks", text)
    return _split(text, r"; ")


def _kept_one(part: str) -> list[str]:
    match = re.fullmatch(r"keep one of (\S+(?:, \S+)*) and (\S+)", part)
    names = [*match[1].split(", "), match[2]] if match else []
    if part == "leave one of the two out":
        return ["leave the first out", "leave the second out"]
    return ["leave " + " and ".join(other for other in names if other != name) + " out" for name in names] or [part]


def _split(text: str, separator: str) -> list[str]:
    """Split at separators outside of quotes, backticks and brackets."""
    masked = text
    for code in (r"`[^`]*`", r"'[^']*'", r"\"[^\"]*\"", r"\([^()]*\)", r"\([^()]*\)", r"\[[^\[\]]*\]"):
        masked = re.sub(code, lambda match: "~" * len(match[0]), masked)
    parts, start = [], 0
    for match in re.finditer(separator, masked):
        parts.append(text[start : match.start()])
        start = match.end()
    return [*parts, text[start:]]


def _changes(alternative: str, finding: Finding) -> Iterator[Change]:
    names = re.fullmatch(r"leave (?!the )(.+?) out(?:, and (.+))?", alternative)
    for name in _split(names[1], " and |, ") if names else ():
        if name == "it" and not finding.key:
            yield LeaveItOut()
        else:
            yield LeaveOut(finding.key if name == "it" else _resolve(name, finding))
    rest = names[2] if names else alternative
    for words in _split(rest, " with | and |, ") if rest else ():
        yield from _change(words, finding)


def _change(words: str, finding: Finding) -> Iterator[Change]:
    for pattern, make in _FORMS:
        match = re.fullmatch(pattern, words)
        if match:
            yield from make(match.groupdict(), finding)
            return
    raise UnreadableHelpError(f"{finding.code}: {words!r} of {finding.help!r}")


def _set(words: Mapping[str, str], finding: Finding) -> Iterator[Change]:
    key = f"{words['section']}.{words['key']}" if words.get("section") else _resolve(words.get("key") or "", finding)
    yield SetKey(key, words["value"])


def _in_place_of(words: Mapping[str, str], finding: Finding) -> Iterator[Change]:
    yield SetKey(words["key"], words["value"])
    yield LeaveOut(finding.key)


def _resolve(name: str, finding: Finding) -> str:
    """Return the full key: from its section on, or beside the finding's."""
    if not name:
        return finding.key
    if name.partition(".")[0] in SECTIONS:
        return name
    if not finding.key:
        raise UnreadableHelpError(f"{finding.code}: {name} is beside nothing")
    owner, _, _ = finding.key.rpartition(".")
    return f"{owner or finding.key}.{name}"


_KEY = r"(?P<key>[a-z_][\w.]*)"
_NUMBERS = r"\[[^\]]*\](?: \* \d+)?"
_VALUE = (
    r"(?P<value>True|False|None|-?[\d.]+(?:e[+-]?\d+)?|'[^']*'|\(.*\)|\{.*\}|dict\(.*\)"
    rf"|{_NUMBERS}(?: \+ {_NUMBERS})*)"
)
_FORMS: Sequence[tuple[str, Callable[[Mapping[str, str], Finding], Iterator[Change]]]] = (
    (
        r"slots=(?P<slots>\d+) (?:or more|(?P<each>on each))",
        lambda words, _: iter([Slots(int(words["slots"]), words["each"] is not None)]),
    ),
    (rf"(?:at (?:most|least) |such as |add |write )?(?:{_KEY} ?= ?)?{_VALUE}(?: or more| without quotes)?", _set),
    (rf"{_KEY} at (?:most|least) {_VALUE}", _set),
    (rf"add {_KEY}={_VALUE} to (?P<section>[\w.]+)", _set),
    (rf"write {_KEY}={_VALUE} in its place", _in_place_of),
    (
        r"leave the (?P<which>first|second) out",
        lambda words, _: iter([LeaveEntry("first" if words["which"] == "first" else "second")]),
    ),
    (r"did you mean '(?P<name>.*)'\?", lambda words, _: iter([Meant(words["name"])])),
    (rf"(?:here that is|write it under) {_KEY}", lambda words, _: iter([Move(words["key"])])),
    (
        r"(?:start (?:at least )?|--world-size )(?P<world>\d+)(?: ranks)?",
        lambda words, _: iter([Start(int(words["world"]))]),
    ),
    (
        r"add trusted = \['(?P<package>.*)'\] to \[tool\.dslpar\] of your pyproject\.toml",
        lambda words, _: iter([Trust(words["package"])]),
    ),
    (r"--trust (?P<package>[\w.]+)", lambda words, _: iter([Trust(words["package"])])),
    (r"--program", lambda words, _: iter([ByProgram()])),
    (r"write (?P<code>[A-Za-z_][\w.]*)", lambda words, _: iter([Write(words["code"])])),
    (r"write `(?P<code>[^`]*)`", lambda words, _: iter([Write(words["code"])])),
)
