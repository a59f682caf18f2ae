"""`dslpar lint --fix` and `--diff`: apply the fixes of findings to the files on the command line.

Fixes change only their own text; byte order mark, line ends and blanks stay. First all fixes of a file are applied
together, in rounds until no fix is left (as in ruff). The result is linted: the findings must be gone, and there must
be no new error. If this fails, each fix is tried by itself, and refused if linting fails again.
"""

from __future__ import annotations

import contextlib
import difflib
import os
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from dslpar.core.errors import Finding, Fix, Location
from dslpar.core.visible import visible

Relint = Callable[[Mapping[str, str]], list[Finding]]
"""Function that lints all configs that read the file; its argument maps real paths to texts that replace the files."""

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_MAX_ROUNDS = 10
_MAX_SINGLE_TRIALS = 100
_LINE = re.compile(r"[^\r\n]*(?:\r\n|\r|\n|$)")


class Repair(NamedTuple):
    """The result of fixing one file."""

    path: str
    before: str
    after: str
    refused: tuple[tuple[Finding, str], ...]
    """Findings that were not fixed, each with the reason."""
    changes: int
    """Number of fixes that were applied."""


def repair(path: str, text: str, relint: Relint, texts: Mapping[str, str]) -> Repair:
    """Apply every fix of the file at `path` that passes linting; `texts` maps files fixed earlier to their new text."""
    trial = _Trial(path, relint, texts)
    # All fixes at once first: mostly they all pass, and every trial has to lint all configs that read the file.
    after, count = trial.all_in_rounds(text)
    if not trial.objection(text, after, trial.fixable(text)):
        return Repair(path, text, after, (), count)
    return trial.one_by_one(text)


class _Trial:
    """Fixes of one file, each tried by linting its result."""

    def __init__(self, path: str, relint: Relint, texts: Mapping[str, str]) -> None:
        self.path, self.relint, self.texts = path, relint, texts
        self.real = os.path.realpath(path)
        self.linted: dict[str, list[Finding]] = {}
        """Cache, text of the file -> findings: most texts are needed several times."""

    def findings(self, text: str) -> list[Finding]:
        """Lint with that text in place of the file."""
        if text not in self.linted:
            self.linted[text] = self.relint({**self.texts, self.real: text})
        return self.linted[text]

    def fixable(self, text: str) -> list[tuple[Finding, Fix]]:
        """Return the findings whose fix changes this file, and the fixes; configs may use other paths of the file."""
        fixes = ((item, item.fix) for item in self.findings(text) if item.fix is not None)
        return [
            (item, fix._replace(location=fix.location._replace(path=self.path)))
            for item, fix in fixes
            if os.path.realpath(fix.location.path) == self.real
        ]

    def all_in_rounds(self, text: str) -> tuple[str, int]:
        """Apply all fixes, then the fixes of new findings, and so on; return the text and the number of fixes."""
        count = 0
        for _ in range(_MAX_ROUNDS):
            fixes = {fix for _, fix in self.fixable(text)}
            changed = apply(text, fixes)
            if changed == text:
                break
            text, count = changed, count + len(fixes)
        return text, count

    def objection(self, before: str, after: str, resolved: Iterable[tuple[Finding, Fix]]) -> str:
        """Return why the changed text is refused: a new error, or a finding that stays; empty if it is accepted."""
        old, new = self.findings(before), self.findings(after)
        old_errors = {_subject(item) for item in old if item.severity == "error"}
        for item in new:
            if item.severity == "error" and _subject(item) not in old_errors:
                return f"it would cause {item.code} {item.name}: {item.message}"
        counts, left = (Counter((_subject(item), item.message) for item in findings) for findings in (old, new))
        for item, _ in resolved:
            if left[_subject(item), item.message] >= counts[_subject(item), item.message]:
                return f"{item.code} would stay"
        return ""

    def one_by_one(self, text: str) -> Repair:
        """Try the fixes one after the other, and keep each one that passes."""
        made: list[Fix] = []
        refused = []
        for number, (item, fix) in enumerate(self.fixable(text)):
            if fix in made:
                continue
            before, after = apply(text, made), apply(text, [*made, fix])
            why = "too many changes to try" if number >= _MAX_SINGLE_TRIALS else ""
            why = why or self.objection(before, after, [(item, fix)])
            if why:
                refused.append((item, why))
            else:
                made.append(fix)
        return Repair(self.path, text, apply(text, made), tuple(refused), len(made))


def _subject(finding: Finding) -> tuple[str, str, str]:
    """Return the parts of a finding that stay the same when a fix moves it: code, file and key."""
    return finding.code, finding.location.path, finding.key


def apply(text: str, fixes: Iterable[Fix]) -> str:
    """Apply fixes from the end of a text to its start; of two that overlap, only the later one."""
    starts = [match.start() for match in _LINE.finditer(text)]

    def span(location: Location) -> tuple[int, int]:
        start = starts[location.line - 1] + location.column - 1
        return start, starts[location.end_line - 1] + location.end_column - 1

    changed_from = len(text) + 1  # from the end, so that the spans of the remaining fixes stay valid
    for (start, end), new in sorted(((span(fix.location), fix.text) for fix in fixes), reverse=True):
        if end <= changed_from:
            text, changed_from = text[:start] + new + text[end:], start
    return text


# ---- files ----


def decode(data: bytes) -> str:
    """Decode a file without its byte order mark; line ends stay as they are.

    Raises:
        UnicodeDecodeError: it is not UTF-8.
    """
    return data.removeprefix(BYTE_ORDER_MARK).decode("utf-8")


def write(path: str, before: bytes, text: str) -> None:
    """Replace a file atomically by its changed text; keep its mode and owner, and links to it.

    Raises:
        OSError: the file is read-only (even in a writable folder), or has changed since it was linted.
    """
    real = os.path.realpath(path)
    with open(real, "rb") as file:
        if file.read() != before:
            raise OSError("it was changed meanwhile")
        stat = os.fstat(file.fileno())
    if not stat.st_mode & 0o222:
        raise OSError("it is read-only")
    # The temporary file is in the same folder: os.replace is atomic only within one file system.
    descriptor, name = tempfile.mkstemp(dir=os.path.dirname(real), prefix=".dslpar-")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(BYTE_ORDER_MARK if before.startswith(BYTE_ORDER_MARK) else b"")
            file.write(text.encode("utf-8"))
        with contextlib.suppress(PermissionError):  # only root may change the owner of a file
            os.chown(name, stat.st_uid, stat.st_gid)
        os.chmod(name, stat.st_mode & 0o7777)
        os.replace(name, real)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def diff(repairs: Iterable[Repair]) -> Iterator[str]:
    """Yield the lines of a unified diff, as `patch` takes them."""
    for repair in repairs:
        # Not splitlines(), which also splits at form feeds and the like.
        before, after = (re.findall(r"[^\n]*\n|[^\n]+", text) for text in (repair.before, repair.after))
        name = visible(repair.path)  # a line break in the path could forge a header that patches another file
        for line in difflib.unified_diff(before, after, name, name):
            yield line if line.endswith("\n") else line + "\n\\ No newline at end of file\n"
