"""Suggestions for misspelt names: the nearest known name for a message, and the only possible name for a fix.

`did_you_mean` may guess. A fix may not: it needs the only name that is near by Damerau-Levenshtein distance, which
counts each inserted, missing, wrong or swapped character as one. ruff and rustc compare names in the same way. The name
may be bare in the source (a keyword, an attribute, a YAML key) or a quoted string. The fix replaces only the characters
of the name.

    >>> did_you_mean("pipline", ["pipeline", "data", "tensor"])
    "did you mean 'pipeline'?"
    >>> only_near("pipline", ["pipeline", "data", "tensor"])
    'pipeline'
    >>> only_near("mim_lr", ["min_lr", "max_lr"]) is None    # one character from the first, two from the second
    True
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache

from dslpar.core.errors import Fix, Location

QUOTES = ("'", '"')
MAX_LENGTH = 100
"""Names of this length or longer are not compared: comparing takes time proportional to the product of two lengths."""


def did_you_mean(name: object, known: Iterable[object], before: str = "", cutoff: float = 0.75) -> str:
    """Return "did you mean 'x'?" for the nearest known name, prefixed with `before`; empty if none is near."""
    close = nearest(name, known, cutoff)
    return f"{before}did you mean {close!r}?" if close is not None else ""


def nearest(name: object, known: Iterable[object], cutoff: float = 0.75) -> str | None:
    """Return the known name most similar to `name`, ignoring case; None if none is similar."""
    return next(iter(nearest_first(name, known, 1, cutoff)), None)


def nearest_first(name: object, known: Iterable[object], most: int, cutoff: float = 0.75) -> list[str]:
    """Return at most `most` known names that are similar to `name`, ignoring case, the most similar first."""
    word = str(name).lower()
    if len(word) >= MAX_LENGTH:
        return []
    by_lower = {item.lower(): item for item in known if isinstance(item, str) and len(item) < MAX_LENGTH}
    return [by_lower[close] for close in _close(word, tuple(by_lower), most, cutoff)]


@lru_cache(maxsize=1024)
def _close(word: str, known: tuple[str, ...], most: int, cutoff: float) -> list[str]:
    """Return the similar names. An editor asks for the same misspelt ones at each key stroke."""
    import difflib  # imported here: only a mistake needs it

    return difflib.get_close_matches(word, known, n=most, cutoff=cutoff)


def only_near(name: str, known: Iterable[str]) -> str | None:
    """Return the only known name within two edits of `name` (one edit below five letters), ignoring case."""
    most = 1 if len(name) < 5 else 2
    near = {other for other in known if is_within(name.lower(), other.lower(), most)}
    return near.pop() if len(near) == 1 else None


def only_recased(name: str, known: Iterable[str]) -> str | None:
    """Return the only known name that differs from `name` just in the case of its letters."""
    same = {other for other in known if other != name and other.lower() == name.lower()}
    return same.pop() if len(same) == 1 else None


def rename_fix(sources: Mapping[str, str], location: Location, name: str, new: str | None) -> Fix | None:
    """Make the fix that renames `name` to `new`, if exactly that name is at the location, bare or in quotes."""
    source = sources.get(location.path)
    if new is None or source is None or location.line != location.end_line:
        return None
    written = _lines(source)[location.line - 1][location.column - 1 : location.end_column - 1]
    if written == name:
        return Fix(location, new)
    if written[:1] in QUOTES and written == f"{written[0]}{name}{written[0]}":
        return Fix(location._replace(column=location.column + 1, end_column=location.end_column - 1), new)
    return None


@lru_cache(maxsize=4)
def _lines(text: str) -> list[str]:
    return text.split("\n")


def is_within(one: str, other: str, most: int) -> bool:
    """Return whether at most `most` insertions, deletions, replacements or swaps of neighbours make the names equal."""
    if abs(len(one) - len(other)) > most:
        return False
    before, row = [0] * (len(other) + 1), list(range(len(other) + 1))
    for i, left in enumerate(one, 1):
        before, last, row = row, before, [i]
        for j, right in enumerate(other, 1):
            cost = min(row[j - 1] + 1, before[j] + 1, before[j - 1] + (left != right))
            if i > 1 and j > 1 and left == other[j - 2] and one[i - 2] == right:
                cost = min(cost, last[j - 2] + 1)
            row.append(cost)
        if min(row) > most + 1:  # a swap uses the row before this one
            return False
    return row[-1] <= most
