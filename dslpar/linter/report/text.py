"""Findings as text, with the line and a caret as rustc prints them, and as JSON; see `github` and `sarif` for others.

::

    configs/gpt_3d.py:14:34: TEN103 not-a-cube: size 6, and mode '3d' needs q*q*q ranks
       14 | parallel = dict(tensor=dict(size=6, mode='3d'))
          |                                  ^
    help: nearest legal: 1 or 8
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache

from dslpar.core.errors import Finding

Sources = Mapping[str, str]

_WIDTH = 160
_BOLD, _HELP, _DIM = "1", "1;36", "2"
_COLORS: Mapping[str, str] = {"error": "1;31", "warning": "1;33", "info": "1;34"}
_WORDS = {"error": ("error", "errors"), "warning": ("warning", "warnings"), "info": ("note", "notes")}


def text(findings: Sequence[Finding], sources: Sources, color: bool = False) -> str:
    """Each finding with its line, a caret under what is wrong, and what to write instead; a count at the end."""
    blocks = [block(finding, sources, color) for finding in findings]
    return "\n".join([*blocks, summary(findings)]) + "\n"


def concise(findings: Sequence[Finding], sources: Sources, color: bool = False) -> str:
    """One line a finding."""
    if not color:
        return "".join(finding.concise() + "\n" for finding in findings)
    return "".join(f"{_head(finding, '', color)}\n" for finding in findings)


def as_json(findings: Sequence[Finding], sources: Sources, color: bool = False) -> str:
    """The list of records of `dslpar lint`, the contract with other programs."""
    import json

    return json.dumps([finding.as_json() for finding in findings], indent=2) + "\n"


FORMATS: Mapping[str, Callable[[Sequence[Finding], Sources, bool], str]] = {
    "text": text,
    "concise": concise,
    "json": as_json,
}


def block(finding: Finding, sources: Sources, color: bool = False) -> str:
    """One finding in full."""
    label = "" if finding.severity == "error" else f" [{finding.severity}]"
    lines = [_head(finding, label, color), *_excerpt(finding, sources, color)]
    if finding.help:
        lines.append(f"{_paint('help:', _HELP, color)} {finding.help}")
    return "\n".join(lines)


def _head(finding: Finding, label: str, color: bool) -> str:
    """`path:line:column: CODE name [severity]: message`; colour changes no letter of it."""
    code = _paint(f"{finding.code} {finding.name}{label}:", _COLORS[finding.severity], color)
    return f"{_paint(f'{finding.location}:', _BOLD, color)} {code} {finding.message}"


def _paint(text: str, style: str, color: bool) -> str:
    """The text between the codes of a terminal's style."""
    return f"\x1b[{style}m{text}\x1b[0m" if color else text


def statistics(findings: Sequence[Finding]) -> list[dict[str, object]]:
    """A row a code, the most frequent first: how often it was found, and how many of those have a fix."""
    by_code: dict[str, list[Finding]] = {}
    for finding in findings:
        by_code.setdefault(finding.code, []).append(finding)
    rows = sorted(by_code.values(), key=lambda items: (-len(items), items[0].code))
    return [
        {"code": items[0].code, "name": items[0].name, "severity": items[0].severity, "count": len(items)}
        | {"fixable": sum(item.fix is not None for item in items)}
        for items in rows
    ]


def table(findings: Sequence[Finding]) -> str:
    """The statistics as lines of text."""
    lines = []
    for row in statistics(findings):
        more = f", {row['fixable']} with a fix" if row["fixable"] else ""
        lines.append(f"{row['count']:5}  {row['code']:8} {row['name']} ({row['severity']}){more}\n")
    return "".join(lines)


def wants_color(choice: str, terminal: bool, environ: Mapping[str, str]) -> bool:
    """Whether to colour: as asked for; else as NO_COLOR, FORCE_COLOR and CLICOLOR_FORCE say; else on a terminal."""
    if choice != "auto" or environ.get("NO_COLOR"):
        return choice == "always"
    if any(environ.get(name, "0") not in ("", "0") for name in ("FORCE_COLOR", "CLICOLOR_FORCE")):
        return True
    return terminal and environ.get("TERM") != "dumb"


def summary(findings: Sequence[Finding]) -> str:
    """'2 errors, 1 warning', or that there is nothing to say."""
    counts = {severity: sum(finding.severity == severity for finding in findings) for severity in _WORDS}
    parts = [f"{count} {_WORDS[severity][count > 1]}" for severity, count in counts.items() if count]
    return ", ".join(parts) if parts else "no findings"


def _excerpt(finding: Finding, sources: Sources, color: bool = False) -> list[str]:
    """The line of the finding and carets below it; nothing where the source is not known."""
    place = finding.location
    lines = _lines(sources.get(place.path, ""))
    if not 1 <= place.line <= len(lines):
        return []
    line = lines[place.line - 1].rstrip("\r")
    last = place.end_column if place.end_line == place.line else len(line) + 1
    start = max(0, place.column - _WIDTH // 2) if len(line) > _WIDTH else 0
    shown, column = line[start : start + _WIDTH], place.column - start
    carets = max(1, min(last - start, len(shown) + 1) - column)
    number = f"{place.line:5}"
    indent = "".join("\t" if char == "\t" else " " for char in shown[: column - 1])
    bar = _paint(" |", _DIM, color)
    under = _paint("^" * carets, _COLORS[finding.severity], color)
    return [f"{_paint(number, _DIM, color)}{bar} {visible(shown)}", f"{' ' * len(number)}{bar} {indent}{under}"]


@lru_cache(maxsize=1)
def _lines(text: str) -> list[str]:
    """The lines as Python counts them, not as `splitlines` does; kept for the next finding of the same file."""
    return text.split("\n") if text else []


def visible(line: str) -> str:
    """A line as it may be printed: a control character of somebody's file would command the terminal."""
    if line.isprintable():
        return line
    return "".join(char if char.isprintable() or char == "\t" else _picture(char) for char in line)


def _picture(char: str) -> str:
    """The sign that stands for a character which is not printed; of the same width."""
    return chr(0x2400 + ord(char)) if ord(char) < 32 else "\N{REPLACEMENT CHARACTER}"
