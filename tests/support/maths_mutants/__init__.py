"""Mutants of the maths, as data, which `tests.support.kill_matrix` shows to the tests and to `dslpar prove`."""

from __future__ import annotations

from functools import cache

from tests.support.maths_mutants import (
    attention,
    checkpoints,
    distributed,
    engine,
    experts,
    generated,
    layers,
    models,
    parameters,
    policies,
)
from tests.support.maths_mutants.mutant import KINDS, Kind, Mutant, StaleMutantError
from tests.support.versions import HAS_TRANSFORMERS

__all__ = ["KINDS", "Kind", "Mutant", "StaleMutantError", "all_mutants"]


@cache
def all_mutants() -> tuple[Mutant, ...]:
    """Return every mutant, with unique names; mutants of policies only if transformers is installed."""
    found = [
        mutant
        for tables in (layers, attention, parameters, distributed, engine, experts, checkpoints, models, policies)
        for table in vars(tables).values()
        if isinstance(table, list)
        for mutant in table
    ]
    written = {(mutant.module, mutant.function, mutant.old, mutant.new) for mutant in found}
    found += [each for each in generated.generated() if (each.module, each.function, each.old, each.new) not in written]
    found = [mutant for mutant in found if HAS_TRANSFORMERS or mutant.package != "policies"]
    assert len({mutant.name for mutant in found}) == len(found), "two mutants of one name"
    return tuple(found)
