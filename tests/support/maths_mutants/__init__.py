"""Mistakes in the maths, as data: what `tests.support.kill_matrix` shows to the tests and to `dslpar prove`."""

from __future__ import annotations

from functools import cache

from tests.support.maths_mutants import layers
from tests.support.maths_mutants.mutant import KINDS, Kind, Mutant, StaleMutantError

__all__ = ["KINDS", "Kind", "Mutant", "StaleMutantError", "all_mutants"]


@cache
def all_mutants() -> tuple[Mutant, ...]:
    """Return every mutant, each by a name of its own."""
    found = [
        *(mutant for table in vars(layers).values() if isinstance(table, list) for mutant in table),
    ]
    assert len({mutant.name for mutant in found}) == len(found), "two mutants of one name"
    return tuple(found)
