"""Texts that do not parse: replace what is broken, so that all other statements are evaluated, for an editor.

    text, broken, findings = recovered("model = dict(num_layers=4,\\nparallel = dict(pipeline=2)\\n", "cfg.py")
    # text: "model = dict(num_layers=4,)\\nparallel = dict(pipeline=2)\\n"; broken: {1}; findings: CFG001 at 1:13

Lines keep their numbers. A statement costs no other one. Within a statement, first open brackets are closed at its end,
and arguments without a value get one: `num_layers=` becomes a name that nothing defines, which the evaluator treats as
an unknown value. Then the line is replaced at which Python stops, or the one before it. If that does not help, the
statement's whole value becomes unknown. No value is left out: the default in its place would be an invented one, with
findings in other statements.
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
    r"|[^\W\d]\w*(?:\s*[.\[](?:[^=\n]*[^=\s])?)?\s*(?:[-+*/|&]?=(?!=)|:)"
)
"""Beginning of a statement at column 1; `name.key = `, `name["key"] = ` and `name: type = ` too."""
_ASSIGNED = re.compile(r"([^\W\d]\w*(?:\.\w+)*)\s*(?::[^=\n]*)?=(?!=)")
_EQUALS = re.compile(r"(?<![=!<>])=(?!=)")
_IMPORT = re.compile(r"(from\s+[.\w]+\s+import)\b([^;]*)")
_IMPORTED = re.compile(r"(\*|[^\W\d]\w*)(?:\s+as\s+[^\W\d]\w*)?")
_DEFINED = re.compile(r"\s*(?:def|class)\s+([^\W\d]\w*)")
_BLOCK = re.compile(r"(?:if|for|while|def|class|with|try|else|elif|except|finally)\b")
_GOES_ON = re.compile(r"(?:else|elif|except|finally)\b")
_LOOP = re.compile(r"\s*for\s+([^=:]+?)\s+in\b")
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
    is_broken = False
    for first, part in _statements(lines):
        replaced = _replaced(part)
        # Without its `if`, which is broken, an `else` is no mistake of its own.
        goes_on = is_broken and _GOES_ON.match(part[0]) is not None
        is_broken = replaced != part
        made += replaced
        broken |= {first + at + 1 for at, (old, new) in enumerate(zip(part, replaced, strict=True)) if old != new}
        if is_broken and not goes_on:
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
    return [_all_unknown(part), *[""] * (len(part) - 1)]


def _all_unknown(part: list[str]) -> str:
    """Return a line in which each name that a statement assigns to is unknown; an empty line if it assigns to none."""
    targets = dict.fromkeys(target for line in part for target in _targets(line))
    # The lines after the first one are arguments, if it is no block.
    found = [*targets] if _BLOCK.match(part[0]) else [*dict.fromkeys(_targets(part[0]))]
    line = "".join(f"{target} = " for target in found) + UNKNOWN
    if found and _part_parses(line):
        return line
    assigned = _ASSIGNED.match(part[0])
    is_name = assigned is not None and not any(map(keyword.iskeyword, assigned[1].split(".")))
    return f"{assigned[1]} = {UNKNOWN}" if assigned is not None and is_name else ""


def _targets(line: str) -> Iterator[str]:
    """Yield what a line assigns to, defines or loops over: names, tuples of them, attributes and items."""
    if match := _DEFINED.match(line) or _LOOP.match(line):
        yield match[1]
        return
    text = line.strip()
    start = 0
    for match in _EQUALS.finditer(text):
        target = re.sub(r"(?:[-+*/|&%]|//|\*\*|:.*)\Z", "", text[start : match.start()].strip()).strip()
        if not target or not _part_parses(f"{target} = {UNKNOWN}"):
            return
        yield target
        start = match.end()


def _candidates(part: list[str]) -> Iterator[list[str]]:
    """Yield changed lines of a statement, from those with the smallest change."""
    indented = _closed_by_indentation(part)
    yield indented
    yield _closed(indented)
    closed = _closed(part)
    yield closed
    if imported := _imported(part):
        yield [imported, *[""] * (len(part) - 1)]
        return  # without one of its lines it would leave names out
    yield _filled("\n".join(closed)).split("\n")
    at = _error_line(part)
    for suspects in ([at], [at - 1], [at - 1, at], [_last_line(part)]):
        if all(0 < index < len(part) for index in suspects):  # without the first line no name is left
            lines = [_unknown(part, index) if index in suspects else line for index, line in enumerate(part)]
            yield lines
            yield _closed(lines)


def _imported(part: list[str]) -> str:
    """Return the import of all names that a broken import lists; an empty line if it is none, or lists none."""
    match = _IMPORT.match("\n".join(line.split("#")[0] for line in part))
    if match is None:
        return ""
    names = match[2] if match[2].lstrip().startswith("(") else match[2].partition("\n")[0]
    found = [each[0] for each in _IMPORTED.finditer(names) if not keyword.iskeyword(each[1])]
    return f"{match[1]} {', '.join(found)}" if found else ""


_PARTS = re.compile(
    r"#[^\n]*|'''.*?'''|\"\"\".*?\"\"\"|'(?:\\.|[^'\\\n])*'|\"(?:\\.|[^\"\\\n])*\""
    r"|[^\W\d]\w*|[=!<>]=|\s+|.",
    re.DOTALL,
)


def _filled(text: str) -> str:
    """Return a statement in which each argument within brackets has a value: `dict(size=, mo)` lacks two.

    Commas without an argument become blanks; in a list or tuple the item between them is unknown.
    """
    made: list[str] = []
    arguments: list[list[str]] = [[]]
    """For each open bracket, the tokens since the last comma."""
    named = [False]
    """For each open bracket, whether an argument before this one has a name: then all that follow need one."""
    items = [False]
    """For each open bracket, whether it is that of a list or tuple, whose items have places."""
    last_token = ""
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
                if not arguments[-1]:
                    token = f"{UNKNOWN}," if items[-1] else " "
                arguments[-1] = []
            else:
                arguments.pop()
                named.pop()
                items.pop()
        elif not token.isspace() and token[0] != "#":
            arguments[-1].append(token)
        if token in _PAIRS:
            arguments.append([])
            named.append(False)
            is_call = last_token.isidentifier() or last_token in (")", "]")
            items.append(token != "{" and not is_call)
        last_token = last_token if token.isspace() else token
        made.append(token)
    return "".join(made)


def _is_name(argument: Sequence[str]) -> bool:
    return len(argument) == 1 and argument[0].isidentifier() and not keyword.iskeyword(argument[0])


def _unknown(part: Sequence[str], index: int) -> str:
    """Return a line of a statement with unknown values; an empty line if it has none.

    Such a line is a statement of a block, or has arguments of a call, or items of a dict or list.
    """
    line = part[index]
    indent = line[: len(line) - len(line.lstrip())]
    stack, _ = _open_brackets("\n".join(part[:index]))
    if not line.split("#")[0].strip():
        return ""
    if not stack:
        targets = [*_targets(line)]
        if targets:
            return indent + "".join(f"{target} = " for target in targets) + UNKNOWN
        return f"{indent}return {UNKNOWN}" if line.startswith(f"{indent}return") else f"{indent}pass"
    names, items = _arguments(line)
    if stack[-1] == "[" and not names:
        return indent + f"{UNKNOWN}, " * items
    return f"{indent}{' '.join(names)}" if names else ""


def _arguments(line: str) -> tuple[list[str], int]:
    """Return the arguments and items of dicts that a line begins, each with an unknown value; how many items it has."""
    made: dict[str, None] = {}
    depth, commas, last = 0, 0, ""
    for match in _PARTS.finditer(line):
        token = match[0]
        if token.isspace() or token[0] == "#":
            continue
        depth += (token in _PAIRS) - (token in _PAIRS.values())
        if depth == 0 and token == "=" and last.isidentifier():
            made[f"{last}={UNKNOWN},"] = None
        elif depth == 0 and token == ":" and last[:1] in ("'", '"'):
            made[f"{last}: {UNKNOWN},"] = None
        commas += depth == 0 and token == ","
        last = token or last
    return [*made], commas + (last != ",")


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


def _closed_by_indentation(part: list[str]) -> list[str]:
    """Return the lines with brackets closed before the first line that is indented no more than where they opened.

    What follows `tensor=dict(size=2,` in a column is of the section around it, and no key of `tensor`.
    """
    made = [*part]
    opened: list[tuple[str, int]] = []
    """Brackets, and the indentation of their lines."""
    end = 0
    for index, line in enumerate(part):
        code = line.split("#")[0].strip()
        if not code:
            continue
        indent = len(line) - len(line.lstrip())
        closes = code[0] in _PAIRS.values()
        closed = ""
        # The first bracket is the statement's own.
        while len(opened) > 1 and (indent < opened[-1][1] or (indent == opened[-1][1] and not closes)):
            closed += _PAIRS[opened.pop()[0]]
        if closed:
            made[end] = _with_end(made[end], closed + ("" if closes else ","))
        for token in _TOKENS_OF_CODE.findall(line):
            if token in _PAIRS:
                opened.append((token, indent))
            elif token in _PAIRS.values() and opened:
                opened.pop()
        end = index
    return made


def _with_end(line: str, end: str) -> str:
    """Return a line with something behind its code, before its comment."""
    comment = next((match for match in _TOKENS_OF_CODE.finditer(line) if match[0][0] == "#"), None)
    at = comment.start() if comment is not None else len(line)
    code = line[:at].rstrip()
    return code + end + line[len(code) :].rstrip()


_TOKENS_OF_CODE = re.compile(r"'(?:\\.|[^'\\])*'|\"(?:\\.|[^\"\\])*\"|#.*|[()\[\]{}]")


def _closed(part: list[str]) -> list[str]:
    """Return the lines with a closing bracket for each open one, after the last line with code."""
    stack, quote = _open_brackets("\n".join(part))
    at = _last_line(part)
    brackets = "".join(_PAIRS[each] for each in reversed(stack))
    if quote and len(quote) == 1:
        return [*part[:at], part[at].rstrip() + quote + brackets, *part[at + 1 :]]
    is_open = stack and part[at].split("#")[0].rstrip().endswith("=")
    return [*part[:at], _with_end(part[at], (UNKNOWN if is_open else "") + brackets), *part[at + 1 :]]


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
