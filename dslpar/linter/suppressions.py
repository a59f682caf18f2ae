"""`# dslpar: ignore[CODE]`: apply the comments that silence findings, and report wrong and unused comments.

A comment silences findings of its own file that begin or end on its line. `ignore-file` silences those of the whole
file, and in the config itself also findings without a file, such as CFG112. A comment must name codes or rules; a
reason may follow. Warnings and infos are silenced wherever the config is read: in lint, launch and training. Errors are
never silenced.

Comments on the finding's line are ruff's `noqa` and mypy's `type: ignore`. Both can be set to require a code, as here.
Reporting unused comments is mypy's `warn_unused_ignores`.

    >>> (comment,) = read("x = 1  # dslpar: ignore[PERF101] one host only", "cfg.py")
    >>> [code.text for code in comment.codes], comment.spot
    (['PERF101'], ('cfg.py', 1))
"""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cached_property
from typing import NamedTuple

from dslpar.core.errors import COMMAND_LINE, WORLD, Finding, Fix, Location
from dslpar.core.suggest import did_you_mean
from dslpar.language.load import YAML_ENDINGS
from dslpar.linter.context import Context
from dslpar.linter.problem import Problem, UnknownValueError
from dslpar.linter.rule import Rule

_COMMENT = re.compile(r"#\s*dslpar:\s*ignore(?P<file>-file)?(?![\w-])[ \t]*(?:\[(?P<codes>[^\]#]*)\])?[^#]*")
_CODE = re.compile(r"[^\s,]+")
OWN_CODES = ("CFG114", "CFG115", "CFG116", "CFG117")
"""The rules about `# dslpar:` comments. A comment may name them too, and is then not reported as unused."""
_MOST_SUGGESTIONS = 100
"""Unknown codes that get a "did you mean": bounded, so that a file full of them does not take long."""

Spot = tuple[str, int]
"""(path, line); line 0 stands for the whole file."""


class Code(NamedTuple):
    """One code or name in a comment, as written, and its location."""

    text: str
    location: Location


class Comment(NamedTuple):
    """One `# dslpar: ignore` or `ignore-file`."""

    location: Location
    """From the `#` to the end of the reason."""
    whole_file: bool
    codes: tuple[Code, ...]
    """The codes in the brackets; empty without brackets."""
    inside: Location
    """The text between the brackets."""

    @property
    def spot(self) -> Spot:
        """The line on which the comment acts, or line 0 for the whole file."""
        return (self.location.path, 0 if self.whole_file else self.location.line)


# Reading comments -------------------------------------------------------------------------------------------------


def read(text: str, path: str) -> Iterator[Comment]:
    """Read the ignore comments of one file, up to the first syntax error; a `#` within a string is no comment."""
    if not _COMMENT.search(text):
        return  # the usual case: cutting a text into tokens takes longer than all rules
    comments = _yaml_comments if path.endswith(YAML_ENDINGS) else _python_comments
    for line, column, comment in comments(text):
        for match in _COMMENT.finditer(comment):
            yield _parsed(match, path, line, column)


def _parsed(match: re.Match[str], path: str, line: int, column: int) -> Comment:
    def location(start: int, end: int) -> Location:
        return Location(path, line, column + start, line, column + end)

    start, end = match.span("codes")
    items = _CODE.finditer(match["codes"] or "")
    codes = tuple(Code(item[0], location(start + item.start(), start + item.end())) for item in items)
    whole = location(match.start(), match.start() + len(match[0].rstrip()))
    return Comment(whole, bool(match["file"]), codes, location(start, end))


def _python_comments(text: str) -> Iterator[tuple[int, int, str]]:
    """Yield the line, column and text of each comment of a Python source."""
    try:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT:
                yield token.start[0], token.start[1] + 1, token.string
    except (tokenize.TokenError, SyntaxError):
        return  # CFG001 reports it


def _yaml_comments(text: str) -> Iterator[tuple[int, int, str]]:
    """Yield as `_python_comments`, for YAML: a comment begins with a `#` after a blank, outside all scalars."""
    import yaml  # only configs in YAML

    scalars: list[tuple[int, int]] = []
    try:
        for token in yaml.scan(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
            if isinstance(token, yaml.ScalarToken):
                scalars.append((token.start_mark.index, token.end_mark.index))
    except (yaml.YAMLError, UnicodeEncodeError):
        return  # CFG001 reports it
    last, start = 0, 0
    for number, line in enumerate(text.split("\n")):
        for match in re.finditer(r"(?<!\S)#.*", line) if "dslpar:" in line else ():
            at = start + match.start()
            while last < len(scalars) and scalars[last][1] <= at:
                last += 1
            if last == len(scalars) or at < scalars[last][0]:
                yield number + 1, match.start() + 1, match[0]
        start += len(line) + 1


# Silencing findings -----------------------------------------------------------------------------------------------


class Suppressions:
    """The comments of a config's files, by the spot on which each acts."""

    def __init__(self, cx: Context, rules: Iterable[Rule]) -> None:
        self._cx = cx
        self._rules = {name: rule for rule in rules for name in (rule.code.lower(), rule.name)}
        self._comments = [comment for path, text in cx.config.sources.items() for comment in read(text, path)]
        self._silenced: dict[Spot, set[str]] = {}
        for comment in self._comments:
            known = {rule.code for rule in map(self._rule, comment.codes) if rule is not None}
            self._silenced.setdefault(comment.spot, set()).update(known)
        self._by_file: dict[str, bool] = {}
        self._suggestions: dict[str, str] = {}

    def unsilenced(self, findings: Iterable[Finding]) -> set[Finding]:
        """Return the findings that no comment silences; these include all errors."""
        return {
            item
            for item in findings
            if item.severity == "error"
            or not any(item.code in self._silenced.get(spot, ()) for spot in self._spots(item))
        }

    def _spots(self, finding: Finding) -> tuple[Spot, ...]:
        """Return the spots at which a comment silences the finding; without a file, this is the whole config file."""
        path, line, _, end_line, _ = finding.location
        return ((self._cx.config.path, 0),) if path == WORLD else ((path, line), (path, end_line), (path, 0))

    def _rule(self, code: Code) -> Rule | None:
        """Return the rule with that code or name; the letters' case does not matter."""
        return self._rules.get(code.text.lower())

    # Comments that are wrong or unused -----------------------------------------------------------------------

    def problems(self, code: str, findings: Iterable[Finding]) -> Iterator[Problem]:
        """Yield the problems of one rule about comments; `findings` are those of all other rules."""
        codes_at: dict[Spot, set[str]] = {}
        for finding in findings:
            for spot in self._spots(finding) if finding.severity != "error" else ():
                codes_at.setdefault(spot, set()).add(finding.code)
        check = {
            "CFG114": self._without_code,
            "CFG115": self._unused,
            "CFG116": self._of_errors,
            "CFG117": self._unknown,
        }[code]
        for comment in self._comments:
            yield from check(comment, codes_at)

    def _without_code(self, comment: Comment, codes_at: Mapping[Spot, set[str]]) -> Iterator[Problem]:
        if not comment.codes:
            codes = ", ".join(sorted(codes_at.get(comment.spot, ()))) or "..."
            message = "this comment has no code in brackets, and silences nothing"
            yield Problem(comment.location, message, f"write `# dslpar: ignore{'-file' * comment.whole_file}[{codes}]`")

    def _unused(self, comment: Comment, codes_at: Mapping[Spot, set[str]]) -> Iterator[Problem]:
        unused = self._unused_codes(comment, codes_at)
        fix = self._without(comment, unused) if unused else None
        for code in unused:
            where = "in this file" if comment.whole_file else "on this line"
            twice = code.text.lower() in (other.text.lower() for other in comment.codes if other not in unused)
            message = f"duplicate {code.text}" if twice else f"there is no {code.text} {where} to ignore"
            yield Problem(code.location, message, "leave it out", fix=fix)

    def _of_errors(self, comment: Comment, codes_at: Mapping[Spot, set[str]]) -> Iterator[Problem]:
        for code in comment.codes:
            rule = self._rule(code)
            if rule is not None and rule.severity == "error":
                message = f"{code.text} is an error, and errors cannot be ignored: the config would not run"
                hint = f"correct the error; `dslpar lint --ignore {rule.code}` leaves it out of a report"
                yield Problem(code.location, message, hint)

    def _unknown(self, comment: Comment, codes_at: Mapping[Spot, set[str]]) -> Iterator[Problem]:
        for code in comment.codes:
            if self._rule(code) is None:
                close = self._family(code, codes_at.get(comment.spot, ())) or self._suggestion(code)
                fix = None if close else self._without(comment, self._unused_codes(comment, codes_at))
                yield Problem(code.location, f"unknown rule {code.text!r}", close or "leave it out", fix=fix)

    def _unused_codes(self, comment: Comment, codes_at: Mapping[Spot, set[str]]) -> list[Code]:
        """Return the codes that are duplicates, or that silence nothing for any world size and hosts."""
        unused, before = [], set()
        for code in comment.codes:
            rule = self._rule(code)
            if rule is None or rule.code in OWN_CODES or rule.severity == "error":
                continue
            silences = rule.code in codes_at.get(comment.spot, ()) or not self._depends_on_the_file_alone(rule)
            if not silences or rule.code in before:
                unused.append(code)
            before.add(rule.code)
        return unused

    def _depends_on_the_file_alone(self, rule: Rule) -> bool:
        """Return whether the rule runs to its end without reading the world size or the hosts."""
        if rule.code not in self._by_file:
            self._by_file[rule.code] = self._file_alone is not None and _completes(rule, self._file_alone)
        return self._by_file[rule.code]

    @cached_property
    def _file_alone(self) -> Context | None:
        """The context without a world size and hosts; None with overrides, or if the file was not read to its end."""
        overridden = COMMAND_LINE in self._cx.config.sources
        return None if overridden or not self._cx.config.complete else self._cx.of_any_world()

    # Fixes ---------------------------------------------------------------------------------------------------

    def _without(self, comment: Comment, unused: Collection[Code]) -> Fix:
        """Return the fix that removes all useless codes of a comment. One fix per comment: several would overlap."""
        # Keep codes of rules, codes that resemble a rule's (the author has to correct them), and beginnings of codes.
        kept = [
            code.text
            for code in comment.codes
            if code not in unused and (self._rule(code) or self._family(code, ()) or self._suggestion(code))
        ]
        if kept:
            return Fix(comment.inside, ", ".join(kept))
        return _removal(self._lines[comment.location.path], comment.location)

    def _family(self, code: Code, codes_here: Collection[str]) -> str:
        """Return the hint for a code that is only the beginning of codes; empty if it is not.

        `codes_here`: codes of the findings at the comment's spot. The hint lists those that begin with this text.
        """
        prefix = code.text.upper()
        if not any(rule.code.startswith(prefix) for rule in self._rules.values()):
            return ""
        matching = ", ".join(sorted(other for other in codes_here if other.startswith(prefix)))
        return f"write whole codes: {matching or f'`dslpar explain {prefix}` lists them'}"

    def _suggestion(self, code: Code) -> str:
        """Return "did you mean ...?", or an empty string."""
        if code.text not in self._suggestions:
            suggest = len(self._suggestions) < _MOST_SUGGESTIONS
            self._suggestions[code.text] = did_you_mean(code.text, self._rules) if suggest else ""
        return self._suggestions[code.text]

    @cached_property
    def _lines(self) -> Mapping[str, list[str]]:
        return {path: text.split("\n") for path, text in self._cx.config.sources.items()}


def _completes(rule: Rule, cx: Context) -> bool:
    try:
        for _ in rule.check(cx):
            pass
    except UnknownValueError:
        return False
    return True


def _removal(lines: list[str], location: Location) -> Fix:
    """Return the fix that removes a comment and the blanks before it, and its line if nothing else is on it."""
    line = lines[location.line - 1]
    before, after = line[: location.column - 1], line[location.end_column - 1 :]
    if after.strip():  # another comment follows
        return Fix(location._replace(end_column=len(line) - len(after.lstrip()) + 1), "")
    if before.strip():
        return Fix(location._replace(column=len(before.rstrip()) + 1, end_column=len(line) + 1), "")
    if location.line < len(lines):
        return Fix(location._replace(column=1, end_line=location.line + 1, end_column=1), "")
    return Fix(location._replace(column=1, end_column=len(line) + 1), "")
