"""`# dslpar: ignore[CODE]`: what a comment in a config silences, and what it says in vain.

A comment acts on the findings of its own file that begin or end on its line, `ignore-file` on those of the whole file
(and, in the config itself, on what no file wrote, such as CFG112). It names codes or names, never all of them; a reason
may follow. Warnings and infos are silent wherever the config is read: in lint, launch and training. Errors never are.

A comment on the line itself is what ruff (`noqa`) and mypy (`type: ignore`) made usual; that it must name its code is
their stricter setting, and that one which silences nothing is a finding is mypy's `warn_unused_ignores`.

    >>> (found,) = read("x = 1  # dslpar: ignore[PERF101] one host only", "cfg.py")
    >>> [code.text for code in found.codes], found.spot
    (['PERF101'], ('cfg.py', 1))
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import cached_property
from typing import Any, NamedTuple

from dslpar.core.errors import COMMAND_LINE, WORLD, Finding, Fix, Location
from dslpar.language.load import YAML_ENDINGS, Config
from dslpar.linter.context import Context
from dslpar.linter.rule import Problem, Rule, UnknownValueError

_COMMENT = re.compile(r"#\s*dslpar:\s*ignore(?P<file>-file)?(?![\w-])[ \t]*(?:\[(?P<codes>[^\]#]*)\])?[^#]*")
_CODE = re.compile(r"[^\s,]+")
OWN = ("CFG114", "CFG115", "CFG116", "CFG117")
"""Rules of these comments: what they find may be ignored too, and is not asked whether it was."""


class Code(NamedTuple):
    """One code or name of a comment, as it is written, and where."""

    text: str
    place: Location


class Ignore(NamedTuple):
    """One comment."""

    place: Location
    """From its `#` to the end of its reason."""
    whole_file: bool
    codes: tuple[Code, ...]
    """What it names; nothing of a bare comment."""
    inside: Location
    """What stands between its brackets."""

    @property
    def spot(self) -> Spot:
        """Where it acts."""
        return (self.place.path, 0 if self.whole_file else self.place.line)


Spot = tuple[str, int]
"""A file and a line of it; line 0 is the whole file."""


# Reading comments -------------------------------------------------------------------------------------------------


def read(text: str, path: str) -> Iterator[Ignore]:
    """The comments of one file; a `#` within a string begins none. Of a file that is no syntax, those before it."""
    if "dslpar:" not in text:
        return
    comments = _of_yaml if path.endswith(YAML_ENDINGS) else _of_python
    for line, column, comment in comments(text):
        for match in _COMMENT.finditer(comment):
            yield _ignore(match, path, line, column)


def _ignore(match: re.Match[str], path: str, line: int, column: int) -> Ignore:
    def place(start: int, end: int) -> Location:
        return Location(path, line, column + start, line, column + end)

    start, end = match.span("codes")
    items = _CODE.finditer(match["codes"] or "")
    codes = tuple(Code(item[0], place(start + item.start(), start + item.end())) for item in items)
    whole = place(match.start(), match.start() + len(match[0].rstrip()))
    return Ignore(whole, bool(match["file"]), codes, place(start, end))


def _of_python(text: str) -> Iterator[tuple[int, int, str]]:
    """Line, column and text of each comment of a Python source."""
    import io
    import tokenize

    try:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT:
                yield token.start[0], token.start[1] + 1, token.string
    except (tokenize.TokenError, SyntaxError):
        return  # CFG001 says it


def _of_yaml(text: str) -> Iterator[tuple[int, int, str]]:
    """As `_of_python`; YAML's comments are the `#` after a blank that stand in no scalar."""
    import yaml

    scalars: list[tuple[tuple[int, int], tuple[int, int]]] = []
    try:
        for token in yaml.scan(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
            if isinstance(token, yaml.ScalarToken):
                start, end = token.start_mark, token.end_mark
                scalars.append(((start.line, start.column), (end.line, end.column)))
    except yaml.YAMLError:
        return  # CFG001 says it
    last = 0
    for number, line in enumerate(text.split("\n")):
        for match in re.finditer(r"(?<!\S)#.*", line) if "dslpar:" in line else ():
            at = (number, match.start())
            while last < len(scalars) and scalars[last][1] <= at:
                last += 1
            if last == len(scalars) or at < scalars[last][0]:
                yield number + 1, match.start() + 1, match[0]


# What they silence ------------------------------------------------------------------------------------------------


class Ignores:
    """The comments of a config's files, by the places where they act."""

    def __init__(self, config: Config, rules: Iterable[Rule]) -> None:
        self.config = config
        self.rules = {word: rule for rule in rules for word in (rule.code.lower(), rule.name)}
        self.all = [found for path, text in config.sources.items() for found in read(text, path)]
        self.silent: dict[Spot, set[str]] = {}
        for ignore in self.all:
            named = {rule.code for rule in map(self.rule, ignore.codes) if rule is not None}
            self.silent.setdefault(ignore.spot, set()).update(named)

    def rule(self, code: Code) -> Rule | None:
        """The rule of a code or of a name, in any case."""
        return self.rules.get(code.text.lower())

    def spots(self, finding: Finding) -> tuple[Spot, ...]:
        """Where a comment on the finding may stand; what no file wrote belongs to the config as a whole."""
        path, line, _, end_line, _ = finding.location
        return ((self.config.path, 0),) if path == WORLD else ((path, line), (path, end_line), (path, 0))

    def left(self, findings: Iterable[Finding]) -> set[Finding]:
        """The findings that no comment silences: all errors are among them."""
        return {item for item in findings if item.severity == "error" or not self._silences(item)}

    def _silences(self, finding: Finding) -> bool:
        return any(finding.code in self.silent.get(spot, ()) for spot in self.spots(finding))

    # What they say in vain -----------------------------------------------------------------------------------

    def bare(self, found: Iterable[Finding]) -> Iterator[Problem]:
        """CFG114: comments that name no code."""
        there = self._codes(found)
        for ignore in self.all:
            if not ignore.codes:
                codes = ", ".join(sorted(there.get(ignore.spot, ()))) or "CODE"
                word = "ignore-file" if ignore.whole_file else "ignore"
                message = "this comment names no code, and silences nothing"
                yield Problem(ignore.place, message, f"# dslpar: {word}[{codes}]")

    def unused(self, found: Iterable[Finding]) -> Iterator[Problem]:
        """CFG115: codes that silence nothing, as far as the file alone can tell."""
        there = self._codes(found)
        for ignore in self.all:
            useless = self._useless(ignore, there)
            fix = self._without(ignore, useless) if useless else None
            for code in useless:
                where = "in this file" if ignore.whole_file else "on this line"
                needed = code.text.lower() in (other.text.lower() for other in ignore.codes if other not in useless)
                message = f"{code.text} stands twice" if needed else f"there is no {code.text} {where} to ignore"
                yield Problem(code.place, message, "leave it out", fix=fix)

    def errors(self, found: Iterable[Finding]) -> Iterator[Problem]:
        """CFG116: codes of errors."""
        for code in (code for ignore in self.all for code in ignore.codes):
            rule = self.rule(code)
            if rule is not None and rule.severity == "error":
                message = f"{code.text} is an error, which no comment can ignore: nothing wrong starts"
                hint = f"correct it; `dslpar lint --ignore {rule.code}` leaves it out of a report"
                yield Problem(code.place, message, hint)

    def unknown(self, found: Iterable[Finding]) -> Iterator[Problem]:
        """CFG117: codes that no rule of the linter has."""
        there = self._codes(found)
        for ignore in self.all:
            for code in ignore.codes:
                if self.rule(code) is None:
                    close = self._family(code, there.get(ignore.spot, ())) or self._nearly(code)
                    fix = None if close else self._without(ignore, self._useless(ignore, there))
                    message = f"dslpar lint has no rule {code.text!r}"
                    yield Problem(code.place, message, close or "leave it out", fix=fix)

    def _codes(self, found: Iterable[Finding]) -> Mapping[Spot, set[str]]:
        """The codes of what might be silenced, by place."""
        there: dict[Spot, set[str]] = {}
        for finding in found:
            for spot in self.spots(finding) if finding.severity != "error" else ():
                there.setdefault(spot, set()).add(finding.code)
        return there

    def _useless(self, ignore: Ignore, there: Mapping[Spot, set[str]]) -> list[Code]:
        useless, before = [], set()
        for code in ignore.codes:
            rule = self.rule(code)
            if rule is None or rule.code in OWN or rule.severity == "error":
                continue
            idle = rule.code not in there.get(ignore.spot, ()) and self._follows_from_the_file(rule)
            if idle or rule.code in before:
                useless.append(code)
            before.add(rule.code)
        return useless

    def _follows_from_the_file(self, rule: Rule) -> bool:
        """Whether what the rule finds is the same in whatever world, on whatever hosts."""
        if rule.code not in self._by_file:
            self._by_file[rule.code] = self._alone is not None and _has_its_say(rule, self._alone)
        return self._by_file[rule.code]

    @cached_property
    def _by_file(self) -> dict[str, bool]:
        return {}

    @cached_property
    def _alone(self) -> Context | None:
        """The config without world and hosts; None where more or less than the file was linted."""
        overridden = COMMAND_LINE in self.config.sources
        return None if overridden or not self.config.complete else _Alone(self.config)

    # Fixes ---------------------------------------------------------------------------------------------------

    def _without(self, ignore: Ignore, useless: Collection[Code]) -> Fix:
        """The comment without all that it says in vain: one change a comment, so that no two overlap."""
        kept = [code.text for code in ignore.codes if code not in useless and self._may_stay(code)]
        if kept:
            return Fix(ignore.inside, ", ".join(kept))
        return _removal(self._lines[ignore.place.path], ignore.place)

    def _may_stay(self, code: Code) -> bool:
        """Whether a rule has the code, or one that is nearly the same, or that begins with it."""
        return self.rule(code) is not None or bool(self._family(code, ()) or self._nearly(code))

    def _family(self, code: Code, there: Collection[str]) -> str:
        """What to write in place of the first letters of codes: those that are found there, if any are."""
        begins = code.text.upper()
        if not any(rule.code.startswith(begins) for rule in self.rules.values()):
            return ""
        found = ", ".join(sorted(other for other in there if other.startswith(begins)))
        return f"a comment names whole codes: {found or f'`dslpar explain {begins}` lists them'}"

    def _nearly(self, code: Code) -> str:
        """'did you mean ...?', of the first unknown codes: a file of nothing else must not take long."""
        from dslpar.core.suggest import did_you_mean

        if code.text not in self._guesses:
            guess = len(self._guesses) < _GUESSES
            self._guesses[code.text] = did_you_mean(code.text, self.rules) if guess else ""
        return self._guesses[code.text]

    @cached_property
    def _guesses(self) -> dict[str, str]:
        return {}

    @cached_property
    def _lines(self) -> Mapping[str, list[str]]:
        return {path: text.split("\n") for path, text in self.config.sources.items()}


_GUESSES = 100


class _Alone(Context):
    """A config by itself: a rule that asks for the world or the hosts has no say."""

    def __getattribute__(self, name: str) -> Any:
        if name in ("world_size", "asked_world_size", "cluster"):
            raise UnknownValueError(name)
        return super().__getattribute__(name)


def _has_its_say(rule: Rule, cx: Context) -> bool:
    try:
        for _ in rule.check(cx):
            pass
    except UnknownValueError:
        return False
    return True


def _removal(lines: list[str], place: Location) -> Fix:
    """The comment goes, with the blanks before it; and with its line, where nothing else stands there."""
    line = lines[place.line - 1]
    before, after = line[: place.column - 1], line[place.end_column - 1 :]
    if after.strip():  # another comment follows
        return Fix(place._replace(end_column=len(line) - len(after.lstrip()) + 1), "")
    if before.strip():
        return Fix(place._replace(column=len(before.rstrip()) + 1, end_column=len(line) + 1), "")
    if place.line < len(lines):
        return Fix(place._replace(column=1, end_line=place.line + 1, end_column=1), "")
    return Fix(place._replace(column=1, end_column=len(line) + 1), "")


CHECKS: Mapping[str, Callable[[Ignores, Iterable[Finding]], Iterator[Problem]]] = {
    "CFG114": Ignores.bare,
    "CFG115": Ignores.unused,
    "CFG116": Ignores.errors,
    "CFG117": Ignores.unknown,
}
