"""Which name is certain to be meant, and the change of the source that writes it.

A name may stand bare (a keyword, an attribute, a YAML key) or as a quoted string; the change replaces the characters
of the name alone. Distances are those of Damerau and Levenshtein: one inserted, missing, wrong or swapped character
each; ruff and rustc measure names so too. `did_you_mean` may guess, a change may not: it needs the only name that is
near.

    >>> meant("pipline", ["pipeline", "data", "tensor"])
    'pipeline'
    >>> meant("mim_lr", ["min_lr", "max_lr"]) is None    # one character from the first, two from the second
    True
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache

from dslpar.core.errors import Fix, Location

QUOTES = ("'", '"')


def meant(name: str, known: Iterable[str]) -> str | None:
    """The one known name within two characters of `name` (one, of names below five letters), in any case."""
    most = 1 if len(name) < 5 else 2
    near = {other for other in known if within(name.lower(), other.lower(), most)}
    return near.pop() if len(near) == 1 else None


def same_but_for_case(name: str, known: Iterable[str]) -> str | None:
    """The one known name that differs from `name` in the case of its letters alone."""
    same = {other for other in known if other != name and other.lower() == name.lower()}
    return same.pop() if len(same) == 1 else None


def written_anew(sources: Mapping[str, str], place: Location, name: str, new: str | None) -> Fix | None:
    """The change of `name` to `new`, if exactly that name stands at the place, bare or in quotes."""
    text = sources.get(place.path)
    if new is None or text is None or place.line != place.end_line:
        return None
    there = _lines(text)[place.line - 1][place.column - 1 : place.end_column - 1]
    if there == name:
        return Fix(place, new)
    quoted = len(there) == len(name) + 2 and there[0] == there[-1] and there[0] in QUOTES and there[1:-1] == name
    inner = place._replace(column=place.column + 1, end_column=place.end_column - 1)
    return Fix(inner, new) if quoted else None


@lru_cache(maxsize=4)
def _lines(text: str) -> list[str]:
    """The lines of a source, split once for all that is found in it."""
    return text.split("\n")


def within(one: str, other: str, most: int) -> bool:
    """Whether at most `most` characters are to be inserted, deleted, replaced or swapped with their neighbour."""
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
        if min(row) > most + 1:  # one row back may still swap
            return False
    return row[-1] <= most
