"""Follow the help of a finding to the letter. An author could not follow a help that `carry_out` cannot read.

The forms are those of `dslpar.linter.help_edits`. The caller has the answers to what only an author knows.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from dslpar.cluster.filter import filter_hosts
from dslpar.cluster.hostfile import parse
from dslpar.core.errors import Finding, Location
from dslpar.linter.check import lint, load_text
from dslpar.linter.help_edits import (
    CLAUSE_OF_ITS_OWN,
    ByProgram,
    Change,
    LeaveEntry,
    LeaveItOut,
    LeaveOut,
    Meant,
    Move,
    SetKey,
    Slots,
    Start,
    Trust,
    Write,
    alternatives,
    changes,
    explanations,
)
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


Edit = Callable[[Linted], Linted]


def carry_out(finding: Finding, before: Linted) -> Iterator[tuple[str, Linted]]:
    """Yield each alternative of a help without holes, and the result of carrying it out."""
    for clause in explanations(finding.help):
        assert not CLAUSE_OF_ITS_OWN.match(clause), f"a clause of its own: {finding.help}"
    for alternative in alternatives(finding.help):
        after = before
        for change in changes(alternative, finding):
            after = _edit(change, finding)(after)
        yield alternative, after


def _edit(change: Change, finding: Finding) -> Edit:
    match change:
        case SetKey(key, value):
            return lambda before: before.set(key, repr(eval(value)) if " + " in value else value)
        case LeaveOut(key):
            return lambda before: before.without(key)
        case LeaveItOut():
            fix = finding.fix
            return lambda before: before.rewritten(*fix) if fix else _without_statement(before, finding.location)
        case LeaveEntry(which):
            return lambda before: _without_entry(before, which, finding)
        case Meant(name):
            return lambda before: _meant(before, name, finding)
        case Write(code):
            return lambda before: before.rewritten(finding.location, code)
        case Move(key):
            return lambda before: before.set(key, before.value(finding.key)).without(finding.key)
        case Start(world):
            return lambda before: before._replace(world=world)
        case Trust(package):
            return lambda before: before._replace(trusted=(*before.trusted, package))
        case ByProgram():
            return lambda before: before._replace(by_program=True)
        case Slots(slots, each):
            return lambda before: _with_slots(before, slots, each, finding)


def _without_statement(before: Linted, place: Location) -> Linted:
    statement = next(node for node in ast.parse(before.text).body if (node.end_lineno or 0) >= place.line)
    lines = before.text.splitlines(keepends=True)
    return before._replace(text="".join(lines[: statement.lineno - 1] + lines[statement.end_lineno :]))


def _without_entry(before: Linted, which: str, finding: Finding) -> Linted:
    """Leave out the first or the second entry of a key in a dict."""
    for node in ast.walk(ast.parse(before.text)):
        keys = [ast.unparse(key) for key in node.keys if key] if isinstance(node, ast.Dict) else []
        twice = [index for index, key in enumerate(keys) if keys.count(key) > 1]
        if isinstance(node, ast.Dict) and twice:
            whole = ast.get_source_segment(before.text, node) or ""
            left = twice[which == "second"]
            del node.keys[left], node.values[left]
            return before._replace(text=before.text.replace(whole, ast.unparse(node)))
    raise AssertionError(finding)


def _meant(before: Linted, name: str, finding: Finding) -> Linted:
    if finding.location.path.startswith("--"):
        flag, hosts = before.hosts
        start, end = finding.location.column - 1, finding.location.end_column - 1
        return before._replace(hosts=(flag, hosts[:start] + name + hosts[end:]))
    quote = before.written(finding.location)[:1]
    return before.rewritten(finding.location, f"{quote}{name}{quote}" if quote in "'\"" else name)


def _with_slots(before: Linted, slots: int, each: bool, finding: Finding) -> Linted:
    assert before.hostfile is not None
    if not each:
        return before.rewritten(finding.location, str(slots))
    return before._replace(hostfile=re.sub(r"slots=\d+", f"slots={slots}", before.hostfile))
