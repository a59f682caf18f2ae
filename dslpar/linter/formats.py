"""Findings as text, with the line and a caret as rustc prints them, and as JSON.

::

    configs/gpt_3d.py:14:34: TEN103 not-a-cube: size 6, and mode '3d' needs q*q*q ranks
       14 | parallel = dict(tensor=dict(size=6, mode='3d'))
          |                                  ^
    help: nearest legal: 1 or 8
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from dslpar.errors import Finding

Sources = Mapping[str, str]

_WIDTH = 160
_WORDS = {"error": ("error", "errors"), "warning": ("warning", "warnings"), "info": ("note", "notes")}


def text(findings: Sequence[Finding], sources: Sources) -> str:
    """Each finding with its line, a caret under what is wrong, and what to write instead; a count at the end."""
    blocks = [block(finding, sources) for finding in findings]
    return "\n".join([*blocks, summary(findings)]) + "\n"


def concise(findings: Sequence[Finding], sources: Sources) -> str:
    """One line a finding."""
    return "".join(finding.concise() + "\n" for finding in findings)


def as_json(findings: Sequence[Finding], sources: Sources) -> str:
    """The list of records of DESIGN, section 8."""
    import json

    return json.dumps([finding.as_json() for finding in findings], indent=2) + "\n"


FORMATS: Mapping[str, Callable[[Sequence[Finding], Sources], str]] = {
    "text": text,
    "concise": concise,
    "json": as_json,
}


def block(finding: Finding, sources: Sources) -> str:
    """One finding in full."""
    label = "" if finding.severity == "error" else f" [{finding.severity}]"
    head = f"{finding.location}: {finding.code} {finding.name}{label}: {finding.message}"
    lines = [head, *_excerpt(finding, sources)]
    if finding.help:
        lines.append(f"help: {finding.help}")
    return "\n".join(lines)


def summary(findings: Sequence[Finding]) -> str:
    """'2 errors, 1 warning', or that there is nothing to say."""
    counts = {severity: sum(finding.severity == severity for finding in findings) for severity in _WORDS}
    parts = [f"{count} {_WORDS[severity][count > 1]}" for severity, count in counts.items() if count]
    return ", ".join(parts) if parts else "no findings"


def _excerpt(finding: Finding, sources: Sources) -> list[str]:
    """The line of the finding and carets below it; nothing where the source is not known."""
    place = finding.location
    text = sources.get(place.path, "")
    lines = text.split("\n") if text else []  # as Python counts lines, not as `splitlines` does
    if not 1 <= place.line <= len(lines):
        return []
    line = lines[place.line - 1].rstrip("\r")
    last = place.end_column if place.end_line == place.line else len(line) + 1
    start = max(0, place.column - _WIDTH // 2) if len(line) > _WIDTH else 0
    shown, column = line[start : start + _WIDTH], place.column - start
    carets = max(1, min(last - start, len(shown) + 1) - column)
    number = f"{place.line:5}"
    indent = "".join("\t" if char == "\t" else " " for char in shown[: column - 1])
    return [f"{number} | {shown}", f"{' ' * len(number)} | {indent}{'^' * carets}"]
