"""`--select` and `--ignore`: which findings a report of `dslpar lint` holds.

A word is a code, a name, or the first letters of codes (`PERF`, `TEN2`). The most precise word decides, and of two
equally precise ones `--ignore`, as in ruff. What says that something was not looked at stays in a report that selects
other rules, since its silence would be taken for praise; only `--ignore` leaves it out.

    >>> chosen = Selection(select=("PERF",), ignore=("PERF101",))
    >>> [chosen.includes(code) for code in ("PERF101", "PERF102", "CFG101", "CFG112")]
    [False, True, False, True]
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from dslpar.linter.registry import RULES, page_of

NOT_LOOKED_AT = ("CFG001", "CFG005", "CFG009", "CFG111", "CFG112")
"""Files that could not be read to their end, and rules that were skipped."""


class Selection(NamedTuple):
    """Codes, or first letters of codes."""

    select: Sequence[str] = ()
    ignore: Sequence[str] = ()

    def includes(self, code: str) -> bool:
        """Whether findings of that code are reported."""
        chosen = _precision(code, self.select) if self.select else 0
        if chosen < 0 and code in NOT_LOOKED_AT:
            chosen = 0
        return chosen > _precision(code, self.ignore)


def selection(select: Iterable[str], ignore: Iterable[str]) -> Selection:
    """A selection from words of the command line, each with commas or without.

    Raises:
        ValueError: a word is no code, no name, and begins no code.
    """
    return Selection(tuple(_codes(select)), tuple(_codes(ignore)))


def _codes(words: Iterable[str]) -> Iterable[str]:
    for word in (part.strip() for text in words for part in text.split(",")):
        if word:
            yield _code(word)


def _code(word: str) -> str:
    by_name = {rule.name: rule.code for rule in RULES}
    if word.lower() in by_name:
        return by_name[word.lower()]
    if any(rule.code.startswith(word.upper()) for rule in RULES):
        return word.upper()
    raise ValueError(f"no rule of lint is {word!r}" + _why(word, list(by_name)))


def _why(word: str, names: list[str]) -> str:
    from dslpar.core.suggest import did_you_mean

    page = page_of(word)
    if page is not None:
        return f"; {page.code} is found while a job starts or runs"
    families = sorted({rule.code.rstrip("0123456789") for rule in RULES})
    close = did_you_mean(word, [*(rule.code for rule in RULES), *names, *families])
    return "; " + (close or f"the families are {', '.join(families)}")


def _precision(code: str, words: Iterable[str]) -> int:
    """The length of the longest word that begins the code; -1 for none."""
    return max((len(word) for word in words if code.startswith(word)), default=-1)
