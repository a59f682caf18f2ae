"""Findings with their locations, and `DslparError`, the exception that carries them to the user.

There is only one class of exception. The codes of its findings identify what went wrong. A user's mistake is always a
`Finding`; `assert` is for dslpar's own invariants. The text form follows ruff's one-line
`path:line:column: CODE message` and rustc's excerpt with a caret and a `help:` line.

    >>> location = Location("cfg.py", 3, 12, 3, 14)
    >>> print(Finding("PAR102", "world-not-a-multiple", "error", "6 ranks", "use 8", location).concise())
    cfg.py:3:12: PAR102 world-not-a-multiple: 6 ranks
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from dslpar.core.visible import visible

COMMAND_LINE = "<command line>"
"""Path of locations on the command line."""
WORLD = "<world>"
"""Path of findings that concern no file."""

Severity = Literal["error", "warning", "info"]


class Location(NamedTuple):
    """Range of characters in a source. Lines and columns count from 1, and the end is exclusive."""

    path: str
    line: int = 1
    column: int = 1
    end_line: int = 1
    end_column: int = 1

    def __str__(self) -> str:
        return f"{self.path}:{self.line}:{self.column}"


class Fix(NamedTuple):
    """Unambiguous change of a source: `text` replaces the characters at `location`."""

    location: Location
    text: str


class Related(NamedTuple):
    """Another place that a finding is about: where a value that it names was written."""

    location: Location
    message: str


class Finding(NamedTuple):
    """Message about one location: an error, a warning or a note. `help` says what to write instead."""

    code: str
    name: str
    severity: Severity
    message: str
    help: str
    location: Location
    key: str = ""
    """Dotted path of the config key that the finding is about; empty if there is none."""
    fix: Fix | None = None
    """The change that `dslpar lint --fix` makes; None if the intended change is ambiguous."""
    details: tuple[str, ...] = ()
    """Items that the message lists, one per line: corrupted files, keys that differ."""
    related: tuple[Related, ...] = ()
    """Other places, for reports that show them; `dslpar.linter.related` finds them, and lint itself does not."""

    def line(self) -> str:
        """Return the message and its details on one line."""
        return visible(f"{self.message} {'; '.join(self.details)}".rstrip())

    def lines(self) -> str:
        """Return the message, followed by one line per detail."""
        return "\n    ".join(map(visible, (self.message, *self.details)))

    def concise(self) -> str:
        """Format as one line: `path:line:column: CODE name: message`."""
        return visible(f"{self.location}: {self.code} {self.name}: ") + self.line()

    def text(self) -> str:
        """Format in full: the message, its details and the help."""
        head = visible(f"{self.location}: {self.code} {self.name}: ")
        return head + self.lines() + (f"\nhelp: {visible(self.help)}" if self.help else "")

    def as_json(self) -> dict[str, object]:
        """Return the record that `dslpar lint --format json` prints; its fields are part of the command's contract."""
        record: dict[str, object] = {
            field: getattr(self, field) for field in ("code", "name", "severity", "message", "help")
        }
        record["message"] = "\n    ".join((self.message, *self.details))
        edits = [self.fix.location._asdict() | {"text": self.fix.text}] if self.fix is not None else []
        places = [place.location._asdict() | {"message": place.message} for place in self.related]
        return record | self.location._asdict() | {"key": self.key, "fix": edits, "related": places}

    def sort_key(self) -> tuple[object, ...]:
        """Return a key that sorts by file and line, then by code."""
        return (*self.location, self.code, self.key, self.message)


class DslparError(Exception):
    """A run cannot continue; `findings` has every reason, at least one."""

    def __init__(self, findings: Iterable[Finding]) -> None:
        self.findings: Sequence[Finding] = tuple(findings)
        assert self.findings, "an error without a reason"
        super().__init__("\n".join(finding.text() for finding in self.findings))

    def __reduce__(self) -> tuple[type[DslparError], tuple[Sequence[Finding]]]:
        """Pickle the findings. The default is to pickle the text, from which the error cannot be rebuilt."""
        return type(self), (self.findings,)


def has_errors(findings: Iterable[Finding]) -> bool:
    """Return whether any finding is an error; warnings and infos do not stop a run."""
    return any(finding.severity == "error" for finding in findings)
