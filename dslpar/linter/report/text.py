"""Findings as text, with the line and a caret as rustc prints them, and as JSON.

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
from dslpar.core.visible import json_text, visible, visible_lines

Sources = Mapping[str, str]

_WIDTH = 160
_BOLD, _HELP, _DIM = "1", "1;36", "2"
_COLORS: Mapping[str, str] = {"error": "1;31", "warning": "1;33", "info": "1;34"}
_NOUNS = {"error": ("error", "errors"), "warning": ("warning", "warnings"), "info": ("note", "notes")}


def text(findings: Sequence[Finding], sources: Sources, color: bool = False) -> str:
    """Return each finding with its source line, a caret and its help; the last line counts the findings."""
    blocks = [block(finding, sources, color) for finding in findings]
    return "\n".join([*blocks, summary(findings)]) + "\n"


def concise(findings: Sequence[Finding], sources: Sources, color: bool = False) -> str:
    """Return one line per finding."""
    return "".join(f"{_head(finding, '', finding.line(), color)}\n" for finding in findings)


def as_json(findings: Sequence[Finding], sources: Sources, color: bool = False) -> str:
    """Return the list of records that other programs read."""
    from dslpar.linter.registry import url_of  # a report without findings needs no rules

    return json_text([finding.as_json() | {"url": url_of(finding.code)} for finding in findings])


FORMATS: Mapping[str, Callable[[Sequence[Finding], Sources, bool], str]] = {
    "text": text,
    "concise": concise,
    "json": as_json,
}


def block(finding: Finding, sources: Sources, color: bool = False) -> str:
    """Return one finding in full."""
    label = "" if finding.severity == "error" else f" [{finding.severity}]"
    lines = [_head(finding, label, finding.lines(), color), *_excerpt(finding, sources, color)]
    if finding.help:
        lines.append(f"{_paint('help:', _HELP, color)} {visible(finding.help)}")
    return "\n".join(lines)


def _head(finding: Finding, label: str, message: str, color: bool) -> str:
    """Return `path:line:column: CODE name [severity]: message`."""
    code = _paint(f"{finding.code} {finding.name}{label}:", _COLORS[finding.severity], color)
    return f"{_paint(visible(f'{finding.location}:'), _BOLD, color)} {code} {message}"


def _paint(text: str, style: str, color: bool) -> str:
    """Wrap a text in the terminal's escape codes for a style."""
    return f"\x1b[{style}m{text}\x1b[0m" if color else text


def statistics(findings: Sequence[Finding]) -> list[dict[str, object]]:
    """Count the findings of each code and how many have a fix, the most frequent code first."""
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
    """Return the statistics as lines of text."""
    lines = []
    for row in statistics(findings):
        more = f", {row['fixable']} with a fix" if row["fixable"] else ""
        lines.append(f"{row['count']:5}  {row['code']:8} {row['name']} ({row['severity']}){more}\n")
    return "".join(lines)


def wants_color(choice: str, terminal: bool, environ: Mapping[str, str]) -> bool:
    """Return whether to use colour: by `choice`, else NO_COLOR, FORCE_COLOR and CLICOLOR_FORCE, else on a terminal."""
    if choice != "auto" or environ.get("NO_COLOR"):
        return choice == "always"
    if any(environ.get(name, "0") not in ("", "0") for name in ("FORCE_COLOR", "CLICOLOR_FORCE")):
        return True
    return terminal and environ.get("TERM") != "dumb"


def summary(findings: Sequence[Finding]) -> str:
    """Return '2 errors, 1 warning', or 'no findings'."""
    counts = {severity: sum(finding.severity == severity for finding in findings) for severity in _NOUNS}
    parts = [f"{count} {_NOUNS[severity][count > 1]}" for severity, count in counts.items() if count]
    return ", ".join(parts) if parts else "no findings"


def _excerpt(finding: Finding, sources: Sources, color: bool = False) -> list[str]:
    """Return the source line of a finding and the carets below it; empty if the source is unknown."""
    path, number, column, end_line, end_column = finding.location
    lines = _lines(sources.get(path, ""))
    if not 1 <= number <= len(lines):
        return []
    line = lines[number - 1].rstrip("\r")
    last = end_column if end_line == number else len(line) + 1
    start = max(0, column - _WIDTH // 2) if len(line) > _WIDTH else 0  # a long line is cut around the caret
    shown, column = line[start : start + _WIDTH], column - start
    before, marked = map(visible_lines, (shown[: column - 1], shown[column - 1 : max(column, last - start) - 1]))
    margin = f"{number:5}"
    indent = "".join("\t" if char == "\t" else " " for char in before)
    bar = _paint(" |", _DIM, color)
    under = _paint("^" * max(1, len(marked)), _COLORS[finding.severity], color)
    return [f"{_paint(margin, _DIM, color)}{bar} {visible_lines(shown)}", f"{' ' * len(margin)}{bar} {indent}{under}"]


@lru_cache(maxsize=1)
def _lines(text: str) -> list[str]:
    """Split into lines as Python counts them, not as `splitlines` does; cached for the next finding of the file."""
    return text.split("\n") if text else []
