"""Texts that do not parse: replace what is broken, so that all other statements are evaluated, for an editor.

    text, broken, findings = recovered("model = dict(num_layers=4,\\nparallel = dict(pipeline=2)\\n", "cfg.py")
    # text: "model = dict(num_layers=4,)\\nparallel = dict(pipeline=2)\\n"; broken: {1}; findings: CFG001 at 1:13

Lines keep their numbers. A statement costs no other one. Within a statement, first open brackets are closed at its end,
and arguments without a value get one: `num_layers=` becomes a name that nothing defines, which the evaluator treats as
an unknown value. Then the line is replaced at which Python stops, or the one before it. If that does not help, the
statement's whole value becomes unknown.
Callers drop the findings on `broken` lines.

A new statement begins at a line without indentation that looks like one (`name =`, `import`), even within brackets:
an unclosed bracket would otherwise swallow the rest of the file. starpls and parso recover at such lines too.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import NamedTuple

from dslpar.core.errors import Finding, Location
from dslpar.language.errors import ConfigError, finding
from dslpar.language.load_session import parsed
from dslpar.language.source import Source, parse, parse_quietly

UNKNOWN = "_not_parsed"
"""A name that no config defines."""
_BEGIN = re.compile(
    r"(?:from|import|if|for|while|def|class|with|try|assert|del|pass|return|raise|global|@|else\b|elif\b|except\b)"
    r"|[^\W\d]\w*(?:\s*[.\[][^=\n]*)?\s*(?:[-+*/|&]?=(?!=)|:)"
)
"""Beginning of a statement at column 1; `name.key = `, `name["key"] = ` and `name: type = ` too."""
_ASSIGNED = re.compile(r"([^\W\d]\w*(?:\.\w+)*)\s*(?::[^=\n]*)?=(?!=)")
_ARGUMENT = re.compile(r"(\s*)(?:([^\W\d]\w*)\s*=(?!=)|(['\"]\w+['\"])\s*:)")
"""Begin of a line with one argument of a call, or one item of a dict."""
_PAIRS = {"(": ")", "[": "]", "{": "}"}
_MOST_JOINED = 12
"""The most parts that are tried as one statement, for statements with lines that look like new ones."""


class Recovered(NamedTuple):
    """A text that parses, the lines of the original, from 1, that were replaced or completed, and why."""

    text: str
    broken: frozenset[int]
    findings: tuple[Finding, ...] = ()
    """A syntax error for each statement that was changed."""


def recovered(text: str, path: str) -> Recovered:
    """Return the text of a file, with each statement that does not parse replaced as little as possible."""
    with suppress(ConfigError):
        parsed(path, Source(path, text).text)  # cached: the evaluation parses no second time
        return Recovered(text, frozenset())
    lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    made: list[str] = []
    broken, findings = set[int](), list[Finding]()
    for first, part in _statements(lines):
        replaced = _replaced(part)
        made += replaced
        broken |= {first + at + 1 for at, (old, new) in enumerate(zip(part, replaced, strict=True)) if old != new}
        if replaced != part:
            findings += _why("\n".join(part), path, first)
    return Recovered("\n".join(made), frozenset(broken), tuple(findings))


def _why(part: str, path: str, first: int) -> Iterator[Finding]:
    """Yield the syntax error of a statement that begins after `first` lines."""
    try:
        parse(Source(path, part))
    except ConfigError as error:
        at = error.location or Location(path)
        at = at._replace(line=at.line + first, end_line=at.end_line + first)
        yield finding(error.code, at, error.message, error.hint)


@lru_cache(maxsize=4096)
def _part_parses(part: str) -> bool:
    """Return whether a statement parses. From one key stroke to the next, all statements but one are the same."""
    return _parses(part)


def _parses(text: str) -> bool:
    try:
        parse_quietly(text, "")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


def _statements(lines: Sequence[str]) -> Iterator[tuple[int, list[str]]]:
    """Yield (index of the first line, lines) of each statement: joined parts that parse, or a single one."""
    begins = [index for index, line in enumerate(lines) if _BEGIN.match(line)]
    if not begins or begins[0]:
        begins.insert(0, 0)
    ends = [*begins[1:], len(lines)]
    at = 0
    while at < len(begins):
        first = begins[at]
        joined = next(
            (
                more
                for more in range(1, min(_MOST_JOINED, len(begins) - at) + 1)
                if _part_parses("\n".join(lines[first : ends[at + more - 1]]))
            ),
            1,
        )
        yield first, list(lines[first : ends[at + joined - 1]])
        at += joined


def _replaced(part: list[str]) -> list[str]:
    """Return the lines of a statement, changed so that they parse."""
    if _part_parses("\n".join(part)):
        return part
    for lines in _candidates(part):
        if _part_parses("\n".join(lines)):
            return lines
    assigned = _ASSIGNED.match(part[0])
    is_name = assigned is not None and not any(map(keyword.iskeyword, assigned[1].split(".")))
    first = f"{assigned[1]} = {UNKNOWN}" if assigned is not None and is_name else ""
    return [first, *[""] * (len(part) - 1)]


def _candidates(part: list[str]) -> Iterator[list[str]]:
    """Yield changed lines of a statement, from those with the smallest change."""
    closed = _closed(part)
    yield closed
    yield _filled("\n".join(closed)).split("\n")
    at = _error_line(part)
    for suspects in ([at], [at - 1], [at - 1, at], [_last_line(part)]):
        if all(0 < index < len(part) for index in suspects):  # without the first line no name is left
            lines = [_unknown(line) if index in suspects else line for index, line in enumerate(part)]
            yield lines
            yield _closed(lines)


_PARTS = re.compile(
    r"#[^\n]*|'''.*?'''|\"\"\".*?\"\"\"|'(?:\\.|[^'\\\n])*'|\"(?:\\.|[^\"\\\n])*\""
    r"|[^\W\d]\w*|[=!<>]=|\s+|.",
    re.DOTALL,
)


def _filled(text: str) -> str:
    """Return a statement in which each argument within brackets has a value: `dict(size=, mo)` lacks two.

    Commas without an argument become blanks.
    """
    made: list[str] = []
    arguments: list[list[str]] = [[]]
    """For each open bracket, the tokens since the last comma."""
    named = [False]
    """For each open bracket, whether an argument before this one has a name: then all that follow need one."""
    for match in _PARTS.finditer(text):
        token = match[0]
        if len(arguments) > 1 and token in (",", *_PAIRS.values()):
            last = arguments[-1][-1:]
            if last in (["="], [":"]):
                made.append(UNKNOWN)
            elif named[-1] and _is_name(arguments[-1]):
                made.append(f"={UNKNOWN}")
            named[-1] |= "=" in arguments[-1]
            if token == ",":
                token = token if arguments[-1] else " "
                arguments[-1] = []
            else:
                arguments.pop()
                named.pop()
        elif not token.isspace() and token[0] != "#":
            arguments[-1].append(token)
        if token in _PAIRS:
            arguments.append([])
            named.append(False)
        made.append(token)
    return "".join(made)


def _is_name(argument: Sequence[str]) -> bool:
    return len(argument) == 1 and argument[0].isidentifier() and not keyword.iskeyword(argument[0])


def _unknown(line: str) -> str:
    """Return a line of arguments whose value is not known; an empty line if it names none."""
    argument = _ARGUMENT.match(line)
    if not argument:
        return ""
    indent, name, item = argument.groups()
    return f"{indent}{name}={UNKNOWN}," if name and indent else f"{indent}{item}: {UNKNOWN}," if item and indent else ""


def _error_line(part: Sequence[str]) -> int:
    try:
        parse_quietly("\n".join(part), "")
    except SyntaxError as error:
        return min(max(error.lineno or 1, 1), len(part)) - 1
    except (ValueError, RecursionError, MemoryError):
        return 0
    return 0


def _last_line(part: Sequence[str]) -> int:
    """Return the last line with code."""
    return max((index for index, line in enumerate(part) if line.split("#")[0].strip()), default=0)


def _closed(part: list[str]) -> list[str]:
    """Return the lines with a closing bracket for each open one, after the last line with code."""
    stack, quote = _open_brackets("\n".join(part))
    at = _last_line(part)
    end = part[at].rstrip()
    if quote and len(quote) == 1:
        end += quote
    stop = end.rstrip()
    if stack and stop.endswith("="):
        stop += UNKNOWN
    return [*part[:at], stop + "".join(_PAIRS[each] for each in reversed(stack)), *part[at + 1 :]]


_TOKENS = re.compile(r"#[^\n]*|'''|\"\"\"|['\"]|[()\[\]{}]|\\.|\n", re.DOTALL)


def _open_brackets(text: str) -> tuple[list[str], str]:
    """Return the brackets that are open at the end of a text, and the quotation mark of an open string."""
    stack, quote = list[str](), ""
    for match in _TOKENS.finditer(text):
        token = match[0]
        if quote:
            if token == quote or (token == "\n" and len(quote) == 1):
                quote = ""
        elif token in ("'", '"', "'''", '"""'):
            quote = token
        elif token in _PAIRS:
            stack.append(token)
        elif token in _PAIRS.values() and stack and _PAIRS[stack[-1]] == token:
            stack.pop()
    return stack, quote
