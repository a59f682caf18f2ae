"""What dslpar says to the person at the keyboard: findings, each with its place, and the errors that carry them.

The tree of errors::

    DslparError                 a run of dslpar cannot go on; holds the findings that say why
    `-- (no subclasses: what went wrong is in the findings' codes)

A user's mistake is always a `Finding`; `assert` is for dslpar's own invariants. The text form follows ruff's one-line
`path:line:column: CODE message` and rustc's excerpt with a caret and a `help:` line.

    >>> place = Location("cfg.py", 3, 12, 3, 14)
    >>> print(Finding("PAR102", "world-not-a-multiple", "error", "6 ranks", "use 8", place).concise())
    cfg.py:3:12: PAR102 world-not-a-multiple: 6 ranks
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from dslpar.core.named_tuple import NamedTuple

COMMAND_LINE = "<command line>"
WORLD = "<world>"

Severity = Literal["error", "warning", "info"]


class Location(NamedTuple):
    """A range of characters in a source; lines and columns count from 1, the end is exclusive."""

    path: str
    line: int = 1
    column: int = 1
    end_line: int = 1
    end_column: int = 1

    def __str__(self) -> str:
        return f"{self.path}:{self.line}:{self.column}"


class Fix(NamedTuple):
    """A change of the source that is certain to be meant: the characters of `location` become `text`."""

    location: Location
    text: str


class Finding(NamedTuple):
    """One thing that is wrong, slow or worth knowing, at its place; `help` says what to write instead."""

    code: str
    name: str
    severity: Severity
    message: str
    help: str
    location: Location
    key: str = ""
    """Dotted path of the config key that it is about; empty where there is none."""
    fix: Fix | None = None
    """What `dslpar lint --fix` writes; only where there is one thing that can be meant."""

    def concise(self) -> str:
        """One line: `path:line:column: CODE name: message`."""
        return f"{self.location}: {self.code} {self.name}: {self.message}"

    def as_json(self) -> dict[str, object]:
        """The record of `dslpar lint --format json` (DESIGN, section 8)."""
        record: dict[str, object] = {
            field: getattr(self, field) for field in ("code", "name", "severity", "message", "help")
        }
        return record | self.location._asdict() | {"key": self.key}

    def sort_key(self) -> tuple[object, ...]:
        """File order: findings of one place keep the order of their codes."""
        return (*self.location, self.code, self.key, self.message)


class DslparError(Exception):
    """A run cannot go on. `findings` holds every reason, and never is empty."""

    def __init__(self, findings: Iterable[Finding]) -> None:
        self.findings: Sequence[Finding] = tuple(findings)
        assert self.findings, "an error without a reason"
        super().__init__("\n".join(_with_help(finding) for finding in self.findings))


def has_errors(findings: Iterable[Finding]) -> bool:
    """Whether any of the findings is an error; warnings and infos stop nothing."""
    return any(finding.severity == "error" for finding in findings)


def _with_help(finding: Finding) -> str:
    return finding.concise() + (f"\nhelp: {finding.help}" if finding.help else "")
