"""Follow the help of a finding to the letter. An author could not follow a help that `carry_out` cannot read.

A help has one or more alternatives, separated by "or". Each has one or more edits, separated by "with" or "and". Text
in brackets, after a colon, or in a separate clause without "or" is explanation. An edit names keys from their section
on, or keys beside its finding's:

    batch.micro_size=4                 also "add k=1 to zero", "at least 4", "4 or more", "such as 4"
    4                                  of the finding's own key
    did you mean 'size'?               where the finding stands
    leave it out, leave momentum out   and "keep one of a and b": either is left out
    here that is train.steps           the value moves, as by "write it under train.steps"
    start 16 ranks, --world-size 6     of the world

Values that only the author knows are holes (`...`, `N`, `NAME`), or follow "choose". The caller has the answers.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from dslpar.cluster.filter import filter_hosts
from dslpar.cluster.hostfile import parse
from dslpar.core.errors import Finding, Location
from dslpar.linter.check import lint, load_text
from dslpar.schema.sections_reader import SECTIONS
from tests.support.lint import PATH


class Linted(NamedTuple):
    """Everything that a finding may refer to."""

    text: str
    world: int | None = 8
    overrides: tuple[str, ...] = ()
    hostfile: str | None = None
    hosts: tuple[str, str] = ("", "")
    """--include or --exclude, and its value."""
    trusted: tuple[str, ...] = ()
    """Packages that the config may call, from pyproject.toml or --trust."""
    by_program: bool = False
    """--program."""
    path: str = PATH
    """The file's name, whose ending decides how it is read."""

    def findings(self, ignored: Sequence[str] = ()) -> list[Finding]:
        """Return lint's findings."""
        cluster = parse(self.hostfile, "hosts") if self.hostfile is not None else None
        if cluster is not None and self.hosts[0]:
            cluster = filter_hosts(cluster, self.hosts[1], self.hosts[0])  # type: ignore[arg-type]
        config = load_text(self.text, self.path, self.overrides)._replace(trusted=self.trusted)
        return [
            item
            for item in lint(config, self.world, cluster=cluster, by_program=self.by_program)
            if item.code not in ignored
        ]

    def set(self, key: str, value: str) -> Linted:
        """Return a copy with a key set."""
        return self._replace(overrides=(*self.overrides, f"{key}={value}"))

    def without(self, key: str) -> Linted:
        """Return a copy without a key."""
        return self._replace(overrides=(*self.overrides, f"~{key}"))

    def value(self, key: str) -> str:
        """Return the value of a key, as source text."""
        node = load_text(self.text, PATH, self.overrides).root.get(key)
        assert node is not None, key
        return repr(node.plain())

    def written(self, place: Location) -> str:
        """Return the characters at a location."""
        start, end = self._span(place)
        return (self.hostfile or "" if place.path == "hosts" else self.text)[start:end]

    def rewritten(self, place: Location, new: str) -> Linted:
        """Return a copy with other characters at a location."""
        start, end = self._span(place)
        if place.path == "hosts":
            assert self.hostfile is not None
            return self._replace(hostfile=self.hostfile[:start] + new + self.hostfile[end:])
        return self._replace(text=self.text[:start] + new + self.text[end:])

    def _span(self, place: Location) -> tuple[int, int]:
        lines = (self.hostfile or "" if place.path == "hosts" else self.text).splitlines(keepends=True)
        starts = [sum(map(len, lines[:number])) for number in range(len(lines) + 1)]
        return starts[place.line - 1] + place.column - 1, starts[place.end_line - 1] + place.end_column - 1


class UnreadableHelpError(Exception):
    """A help without an edit that can be carried out to the letter."""


HOLE = re.compile(r"\.\.\.|\b(?:N|NAME|SLOT|FILE|VALUE|REGEX|choose|correct|value itself|key=value)\b")
"""Marks of a help that only its reader can complete."""

Edit = Callable[[Linted], Linted]


def carry_out(finding: Finding, before: Linted) -> Iterator[tuple[str, Linted]]:
    """Yield each alternative of a help without holes, and the result of carrying it out."""
    for alternative in alternatives(finding.help):
        after = before
        for edit in _edits(alternative, finding):
            after = edit(after)
        yield alternative, after


def alternatives(text: str) -> list[str]:
    """Split a help at each "or" into alternatives without holes and explanations."""
    text = re.sub(r"(?<=\S) \([^()]*\)", "", text).replace("? Or ", "?; or ")
    text = re.sub(r"start (\d+) or (\d+) ranks", r"start \1 ranks or start \2 ranks", text)
    first, *more = _split(text, r"; ")
    clauses = [first, *(clause for clause in more if clause.startswith("or "))]
    for clause in set(more) - set(clauses):
        assert not re.match(r"(write|add|leave|keep|set|choose|name|give)\b", clause), f"a clause of its own: {text}"
    known: list[str] = []
    for clause in clauses:
        if re.match(r"(?:or )?(?:choose|correct)\b", clause):
            continue
        for part in _split(clause.removeprefix("or "), r",? or (?!more)"):
            if not HOLE.search(part):
                known += _kept_one(_split(part.removeprefix("nearest legal: "), r": ")[0].strip())
    for number, part in enumerate(known):  # in `size=4 or 8`, the second value belongs to the first's key
        key = re.match(rf"{_KEY} ?= ?", known[number - 1]) if number else None
        if key and re.fullmatch(_VALUE, part):
            known[number] = key[0] + part
    return known


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


def _edits(alternative: str, finding: Finding) -> Iterator[Edit]:
    names = re.fullmatch(r"leave (?!the )(.+?) out(?:, and (.+))?", alternative)
    for name in _split(names[1], " and |, ") if names else ():
        yield _leave_out(name, finding)
    rest = names[2] if names else alternative
    for words in _split(rest, " with | and |, ") if rest else ():
        yield _edit(words, finding)


def _edit(words: str, finding: Finding) -> Edit:
    for pattern, make in FORMS:
        match = re.fullmatch(pattern, words)
        if match:
            return make(match.groupdict(), finding)
    raise UnreadableHelpError(f"{finding.code}: {words!r} of {finding.help!r}")


def _set(words: Mapping[str, str], finding: Finding) -> Edit:
    key = _resolve(words.get("key") or "", finding)
    key = f"{words['section']}.{words['key']}" if words.get("section") else key
    value = words["value"]
    return lambda before: before.set(key, repr(eval(value)) if " + " in value else value)


def _in_place_of(words: Mapping[str, str], finding: Finding) -> Edit:
    return lambda before: before.set(words["key"], words["value"]).without(finding.key)


def _leave_out(name: str, finding: Finding) -> Edit:
    if name == "it" and not finding.key:
        fix = finding.fix
        return lambda before: before.rewritten(*fix) if fix else _without_statement(before, finding.location)
    key = finding.key if name == "it" else _resolve(name, finding)
    return lambda before: before.without(key)


def _without_statement(before: Linted, place: Location) -> Linted:
    statement = next(node for node in ast.parse(before.text).body if (node.end_lineno or 0) >= place.line)
    lines = before.text.splitlines(keepends=True)
    return before._replace(text="".join(lines[: statement.lineno - 1] + lines[statement.end_lineno :]))


def _leave_entry(words: Mapping[str, str], finding: Finding) -> Edit:
    """Leave out the first or the second entry of a key in a dict."""

    def write(before: Linted) -> Linted:
        for node in ast.walk(ast.parse(before.text)):
            keys = [ast.unparse(key) for key in node.keys if key] if isinstance(node, ast.Dict) else []
            twice = [index for index, key in enumerate(keys) if keys.count(key) > 1]
            if isinstance(node, ast.Dict) and twice:
                whole = ast.get_source_segment(before.text, node) or ""
                left = twice[words["which"] == "second"]
                del node.keys[left], node.values[left]
                return before._replace(text=before.text.replace(whole, ast.unparse(node)))
        raise AssertionError(finding)

    return write


def _meant(words: Mapping[str, str], finding: Finding) -> Edit:
    def rewrite(before: Linted) -> Linted:
        if finding.location.path.startswith("--"):
            flag, hosts = before.hosts
            start, end = finding.location.column - 1, finding.location.end_column - 1
            return before._replace(hosts=(flag, hosts[:start] + words["name"] + hosts[end:]))
        quote = before.written(finding.location)[:1]
        return before.rewritten(finding.location, f"{quote}{words['name']}{quote}" if quote in "'\"" else words["name"])

    return rewrite


def _move(words: Mapping[str, str], finding: Finding) -> Edit:
    def move(before: Linted) -> Linted:
        return before.set(words["key"], before.value(finding.key)).without(finding.key)

    return move


def _start(words: Mapping[str, str], finding: Finding) -> Edit:
    return lambda before: before._replace(world=int(words["world"]))


def _trust(words: Mapping[str, str], finding: Finding) -> Edit:
    return lambda before: before._replace(trusted=(*before.trusted, words["package"]))


def _code(words: Mapping[str, str], finding: Finding) -> Edit:
    """Put a name, or Python in backticks, in place of the text that the finding marks."""
    return lambda before: before.rewritten(finding.location, words["code"])


def _slots(words: Mapping[str, str], finding: Finding) -> Edit:
    def write(before: Linted) -> Linted:
        assert before.hostfile is not None
        if words["each"] is None:
            return before.rewritten(finding.location, words["slots"])
        return before._replace(hostfile=re.sub(r"slots=\d+", f"slots={words['slots']}", before.hostfile))

    return write


def _resolve(name: str, finding: Finding) -> str:
    """Return the full key: from its section on, or beside the finding's."""
    if not name:
        return finding.key
    if name.partition(".")[0] in SECTIONS:
        return name
    owner, _, _ = finding.key.rpartition(".")
    assert finding.key, f"{name} is beside nothing: {finding}"
    return f"{owner or finding.key}.{name}"


_KEY = r"(?P<key>[a-z_][\w.]*)"
_NUMBERS = r"\[[^\]]*\](?: \* \d+)?"
_VALUE = (
    r"(?P<value>True|False|None|-?[\d.]+(?:e[+-]?\d+)?|'[^']*'|\(.*\)|\{.*\}|dict\(.*\)"
    rf"|{_NUMBERS}(?: \+ {_NUMBERS})*)"
)
FORMS: Sequence[tuple[str, Callable[[Mapping[str, str], Finding], Edit]]] = (
    (r"slots=(?P<slots>\d+) (?:or more|(?P<each>on each))", _slots),
    (rf"(?:at (?:most|least) |such as |add |write )?(?:{_KEY} ?= ?)?{_VALUE}(?: or more| without quotes)?", _set),
    (rf"{_KEY} at (?:most|least) {_VALUE}", _set),
    (rf"add {_KEY}={_VALUE} to (?P<section>[\w.]+)", _set),
    (rf"write {_KEY}={_VALUE} in its place", _in_place_of),
    (r"leave the (?P<which>first|second) out", _leave_entry),
    (r"did you mean '(?P<name>.*)'\?", _meant),
    (rf"(?:here that is|write it under) {_KEY}", _move),
    (r"(?:start (?:at least )?|--world-size )(?P<world>\d+)(?: ranks)?", _start),
    (r"add trusted = \['(?P<package>.*)'\] to \[tool\.dslpar\] of your pyproject\.toml", _trust),
    (r"--trust (?P<package>[\w.]+)", _trust),
    (r"--program", lambda words, finding: lambda before: before._replace(by_program=True)),
    (r"write (?P<code>[A-Za-z_][\w.]*)", _code),
    (r"write `(?P<code>[^`]*)`", _code),
)
