"""`dslpar lint --fix` and `--diff`: changes that are certain to be meant, in files that were given.

A file is changed from its end to its start, and every other byte of it stays: byte order mark, line ends, blanks. What
is linted again must have lost the finding and got no new error; else the change is tried by itself, and refused. That
fixes are applied in rounds, until nothing is left to change, is as in ruff; that each is checked by linting its result
is not.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from dslpar.core.errors import Finding, Fix

Relint = Callable[[Mapping[str, str]], list[Finding]]
"""The findings of the configs that read a file, with these texts in place of files at real paths."""

MARK = b"\xef\xbb\xbf"
_ROUNDS = 10
_TRIALS = 100
_LINE = re.compile(r"[^\r\n]*(?:\r\n|\r|\n|$)")


class Repair(NamedTuple):
    """What became of one file."""

    path: str
    before: str
    after: str
    refused: tuple[tuple[Finding, str], ...]
    """Findings whose change was not made, and why."""
    changes: int
    """Changes that were made."""


def repair(path: str, text: str, relint: Relint, texts: Mapping[str, str]) -> Repair:
    """Make every change of the file at `path` that holds; `texts` are those of files repaired before."""
    trial = _Trial(path, relint, texts)
    whole, count = trial.in_rounds(text)
    if not trial.refusal(text, whole, trial.fixable(text)):
        return Repair(path, text, whole, (), count)
    return trial.one_by_one(text)


class _Trial:
    """Changes of one file, each linted."""

    def __init__(self, path: str, relint: Relint, texts: Mapping[str, str]) -> None:
        self.path, self.relint, self.texts = path, relint, texts
        self.real = os.path.realpath(path)
        self.known: dict[str, list[Finding]] = {}

    def findings(self, text: str) -> list[Finding]:
        """What is found with that text in the file."""
        if text not in self.known:
            self.known[text] = self.relint({**self.texts, self.real: text})
        return self.known[text]

    def fixable(self, text: str) -> list[Finding]:
        """Findings that a change of this file takes away; configs may call the file by several paths."""
        found = []
        for item in self.findings(text):
            if item.fix is not None and os.path.realpath(item.fix.location.path) == self.real:
                place = item.fix.location._replace(path=self.path)
                found.append(item._replace(fix=Fix(place, item.fix.text)))
        return found

    def in_rounds(self, text: str) -> tuple[str, int]:
        """The text with all changes, those among them that others bring to light; and their number."""
        count = 0
        for _ in range(_ROUNDS):
            fixes = _fixes(self.fixable(text))
            changed = applied(text, fixes)
            if changed == text:
                break
            text, count = changed, count + len(fixes)
        return text, count

    def refusal(self, before: str, after: str, taken: Iterable[Finding]) -> str:
        """Why the changed text may not stand; nothing if it may."""
        old, new = self.findings(before), self.findings(after)
        errors = {_what(item) for item in old if item.severity == "error"}
        for item in new:
            if item.severity == "error" and _what(item) not in errors:
                return f"it would bring {item.code} {item.name}: {item.message}"
        counts, left = Counter(map(_said, old)), Counter(map(_said, new))
        stays = next((item for item in taken if left[_said(item)] >= counts[_said(item)]), None)
        return f"{stays.code} would stay" if stays else ""

    def one_by_one(self, text: str) -> Repair:
        """The text with each change that holds by itself, after those before it."""
        taken: list[Fix] = []
        refused = []
        for number, item in enumerate(self.fixable(text)):
            assert item.fix is not None
            if item.fix in taken:
                continue
            before, after = applied(text, taken), applied(text, [*taken, item.fix])
            why = "there are too many to try" if number >= _TRIALS else self.refusal(before, after, [item])
            if why:
                refused.append((item, why))
            else:
                taken.append(item.fix)
        return Repair(self.path, text, applied(text, taken), tuple(refused), len(taken))


def _fixes(findings: Iterable[Finding]) -> set[Fix]:
    return {item.fix for item in findings if item.fix is not None}


def _what(finding: Finding) -> tuple[str, str, str]:
    return finding.code, finding.location.path, finding.key


def _said(finding: Finding) -> tuple[str, ...]:
    return (*_what(finding), finding.message)


def applied(text: str, fixes: Iterable[Fix]) -> str:
    """The text with these changes, from its end to its start; of two that overlap, the later one is made."""
    starts = [match.start() for match in _LINE.finditer(text)]
    ends = len(text) + 1
    for start, end, new in sorted((_span(starts, fix) for fix in fixes), reverse=True):
        if end <= ends:
            text, ends = text[:start] + new + text[end:], start
    return text


def _span(starts: Sequence[int], fix: Fix) -> tuple[int, int, str]:
    place = fix.location
    start, end = starts[place.line - 1] + place.column - 1, starts[place.end_line - 1] + place.end_column - 1
    return start, end, fix.text


def text_of(data: bytes) -> str:
    """The text of a file, line ends as they are, without its byte order mark.

    Raises:
        UnicodeDecodeError: it is not UTF-8.
    """
    return data.removeprefix(MARK).decode("utf-8")


def bytes_of(text: str, before: bytes) -> bytes:
    """A changed text as bytes, with a byte order mark if there was one."""
    return (MARK if before.startswith(MARK) else b"") + text.encode("utf-8")


def write(path: str, before: bytes, text: str) -> None:
    """Replace a file at once by its changed text; its mode and its owner stay, and a link to it.

    Raises:
        OSError: the file cannot be written (read-only is read-only, though its folder may be written), or is not what
            was linted any more.
    """
    import tempfile

    real = os.path.realpath(path)
    with open(real, "rb") as file:
        if file.read() != before:
            raise OSError("it was changed meanwhile")
        was = os.fstat(file.fileno())
    if not was.st_mode & 0o222:
        raise OSError("it is read-only")
    descriptor, name = tempfile.mkstemp(dir=os.path.dirname(real), prefix=".dslpar-")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(bytes_of(text, before))
        with contextlib.suppress(PermissionError):  # root alone gives files away
            os.chown(name, was.st_uid, was.st_gid)
        os.chmod(name, was.st_mode & 0o7777)
        os.replace(name, real)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def diff(repairs: Iterable[Repair]) -> Iterator[str]:
    """Lines of a unified diff, as `patch` takes them."""
    import difflib

    for path, before, after, _, _ in repairs:
        old, new = (re.findall(r"[^\n]*\n|[^\n]+", text) for text in (before, after))
        for line in difflib.unified_diff(old, new, path, path):
            yield line if line.endswith("\n") else line + "\n\\ No newline at end of file\n"
