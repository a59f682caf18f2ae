"""transformers' families through DeepSpeed: three steps equal plain transformers, or lint refuses them."""

from __future__ import annotations

from itertools import combinations

import pytest

import dslpar
from tests.support.sampling import sampled
from tests.support.versions import HAS_TRANSFORMERS, NO_TRANSFORMERS

if not HAS_TRANSFORMERS:
    pytest.skip(NO_TRANSFORMERS, allow_module_level=True)

from tests.properties.families import record
from tests.properties.families.measure import BOUND, deviation, reference, run
from tests.properties.families.table import FAMILIES, REFUSED, ROWS, TIES, cells, refusal

QUICK = "gemma: 1d 2, pipe 2, data 1, ZeRO 0, tied, recompute"
"""Sample of `make test`: stages, tensor ranks, a tied and scaled table, and recomputation."""


def of_each_family() -> list[str]:
    """Return two rows per family: one with two stages and tensor ranks, one with ZeRO 3.

    The arrays of tests/properties/layouts compare one process with plain transformers, and the layout with one process.
    These rows compare the layout with plain transformers directly. `python -m tests.properties.families` runs and
    records all rows.
    """
    found = {QUICK: None}
    for family in FAMILIES:
        rows = [row for row in ROWS.values() if row.family == family and row.world > row.pipe * row.data]
        for fits in (lambda row: row.pipe == 2, lambda row: row.zero == 3):
            found |= dict.fromkeys(each.name for each in list(filter(fits, rows))[:1])
    return list(found)


@pytest.mark.parametrize("name", sampled(of_each_family(), {QUICK}))
def test_three_steps_are_those_of_plain_transformers(name: str) -> None:
    off = deviation(ROWS[name], run(ROWS[name]))
    assert all(value <= most for value, most in zip(off, BOUND, strict=True)), f"{off} is out of {BOUND}"


@pytest.mark.parametrize("family", sampled(FAMILIES, {"mistral"}))
def test_what_does_not_train_is_refused_by_name(family: str) -> None:
    rows = [row for row in REFUSED.values() if row.family == family]
    assert rows
    for row in rows:
        found = dslpar.lint(row.config(), world_size=row.world)
        errors = {finding.code for finding in found if finding.severity == "error"}
        assert refusal(row) in errors, row.name
        assert errors <= {"TEN134", "ZER101"}, row.name


@pytest.mark.parametrize("family", ["llama", "mistral", "t5"])
def test_every_pair_of_values_that_may_meet_meets(family: str) -> None:
    may = [row for row in cells(family, TIES.get(family, (True, False))) if not refusal(row)]
    rows = [row for row in ROWS.values() if row.family == family]
    assert {pair for row in rows for pair in combinations(enumerate(row), 2)} == {
        pair for row in may for pair in combinations(enumerate(row), 2)
    }
    assert len(rows) < 0.2 * len(may)


def test_the_record_is_of_the_rows_that_there_are() -> None:
    """Pages show recorded results: each row ran, within its bound."""
    seen = record.read()
    assert list(seen) == list(ROWS), "out of date: python -m tests.properties.families --left"
    bounds = BOUND._asdict()
    out = {name for name, each in seen.items() if not all(each[what] <= most for what, most in bounds.items())}
    assert out == set()


@pytest.mark.prove
def test_a_weight_that_is_another_is_seen() -> None:
    row = ROWS[QUICK]
    curve = reference(row.problem)
    weights = {name: weight.clone() for name, weight in curve.weights.items()}
    assert deviation(row, curve) == (0, 0, 0)
    changed = weights["model.layers.1.mlp.down_proj.weight"]
    changed[3, 2] += 2.1e-6 * changed.abs().max()
    assert deviation(row, curve._replace(weights=weights)).weights > BOUND.weights
