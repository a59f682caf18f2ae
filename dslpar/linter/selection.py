"""Select the findings that `dslpar lint` reports, by `--select` and `--ignore` and by `[tool.dslpar]`.

A pattern is a code, a rule's name, or the beginning of codes (`PERF`, `TEN2`). The longest pattern that matches a
finding's code decides, and `--ignore` wins a tie, as in ruff. `--select` replaces the project's `select`, and wins a
tie with the project's `ignore`. `--ignore` adds to the project's `ignore`. Some findings report files and rules that
could not be checked (`UNCHECKED`). They are reported even if only other rules are selected, since a report without
them would look like approval. Only an `ignore` leaves them out.

    >>> selection = Selection(select=("PERF",), ignore=("PERF101",))
    >>> [selection.includes(code) for code in ("PERF101", "PERF102", "CFG101", "CFG112")]
    [False, True, False, True]
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from dslpar.core.project import Project
from dslpar.core.suggest import did_you_mean
from dslpar.linter.registry import RULES, page_of

UNCHECKED = ("CFG001", "CFG005", "CFG009", "CFG111", "CFG112")
"""Rules that report incomplete checks: files that could not be read to their end, and rules that were skipped."""


class Selection(NamedTuple):
    """The patterns of --select and --ignore and of the project: codes, or beginnings of codes."""

    select: Sequence[str] = ()
    ignore: Sequence[str] = ()
    project_ignore: Sequence[str] = ()
    """The project's `ignore` if --select is given; --select wins a tie with it."""

    @classmethod
    def parse(cls, select: Iterable[str], ignore: Iterable[str], project: Project | None = None) -> Selection:
        """Parse the values of the two flags (each one pattern, or several with commas) and the project's settings.

        Raises:
            ValueError: a pattern is neither a rule's name nor the beginning of a code.
        """
        flags, ignored = tuple(_patterns(select)), tuple(_patterns(ignore))
        if project is None:
            return cls(flags, ignored)
        try:
            own, of_project = tuple(_patterns(project.select)), tuple(_patterns(project.ignore))
            tuple(_patterns(code for codes in project.per_file_ignores.values() for code in codes))
        except ValueError as error:
            raise ValueError(f"{project.path}: {error}") from None
        return cls(flags, ignored, of_project) if flags else cls(own, (*ignored, *of_project))

    def includes(self, code: str, ignored_in_file: Iterable[str] = ()) -> bool:
        """Return whether findings with that code are reported.

        ignored_in_file: the file's patterns of per-file-ignores.
        """
        selected = _longest_match(code, self.select) if self.select else 0
        if selected < 0 and code in UNCHECKED:
            selected = 0
        wins = selected > _longest_match(code, self.ignore) and selected >= _longest_match(code, self.project_ignore)
        return wins and _longest_match(code, tuple(_patterns(ignored_in_file))) < 0


def _longest_match(code: str, patterns: Iterable[str]) -> int:
    """Return the length of the longest pattern that the code begins with; -1 if there is none."""
    return max((len(pattern) for pattern in patterns if code.startswith(pattern)), default=-1)


def _patterns(values: Iterable[str]) -> Iterator[str]:
    """Yield each pattern in upper case; a rule's name is replaced by its code."""
    codes = {rule.name: rule.code for rule in RULES}
    for pattern in filter(None, (part.strip() for value in values for part in value.split(","))):
        if pattern.lower() in codes:
            yield codes[pattern.lower()]
        elif any(code.startswith(pattern.upper()) for code in codes.values()):
            yield pattern.upper()
        else:
            raise ValueError(_not_of_lint(pattern, codes))


def _not_of_lint(pattern: str, codes: dict[str, str]) -> str:
    if page := page_of(pattern):
        return f"{page.code} is found while a job starts or runs, not by lint"
    families = sorted({code.rstrip("0123456789") for code in codes.values()})
    hint = did_you_mean(pattern, [*codes.values(), *codes, *families]) or f"the families are {', '.join(families)}"
    return f"unknown rule {pattern!r}; {hint}"
