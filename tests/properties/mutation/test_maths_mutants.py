"""Mutants of the maths: each still applies to the code, and `dslpar prove` finds some of them.

Each is a mistake that a layout invites. `python -m tests.support.kill_matrix` runs tests and proofs on all of them,
which takes hours.
"""

from __future__ import annotations

import os
import time
from collections import Counter

import pytest

from dslpar.parity import certificate
from tests.support.kill_matrix.child import ChildError, ChildTimeoutError, in_child
from tests.support.kill_matrix.cover import cover
from tests.support.maths_mutants import KINDS, Mutant, StaleMutantError, all_mutants
from tests.support.maths_mutants.mutant import met_by
from tests.support.sampling import sampled
from tests.support.versions import HAS_TRANSFORMERS

LEAST = 200


def test_there_are_enough_of_each_kind_and_package() -> None:
    kinds = Counter(mutant.kind for mutant in all_mutants())
    packages = Counter(mutant.package for mutant in all_mutants())
    assert sum(kinds.values()) >= LEAST
    assert min(kinds[kind] for kind in KINDS) >= 5, kinds
    named = ("layers", "distributed", "engine", "checkpoint", "data", "models", *["policies"] * HAS_TRANSFORMERS)
    assert min(packages[name] for name in named) >= 10, packages


def test_every_mutant_is_another_function_that_knows_its_names() -> None:
    """Each `old` occurs once in its function, and the changed text compiles to other code with the same closure."""
    wrong = []
    for mutant in all_mutants():
        code, before = mutant.code(), mutant.target().__code__
        if (code.co_code, code.co_consts, code.co_names) == (before.co_code, before.co_consts, before.co_names):
            wrong.append(f"{mutant.name} changes nothing")
        if code.co_freevars != before.co_freevars:
            wrong.append(f"{mutant.name} has another closure")
        wrong += [f"{mutant.name} reads {name}, which nobody has defined" for name in mutant.unknown_names()]
    assert not wrong, "\n".join(wrong)


@pytest.mark.prove  # the kill matrix alone asks for it
def test_every_mutant_can_be_told_when_it_is_met() -> None:
    functions = [function for function, _ in met_by(all_mutants())]
    assert len(functions) == len({(mutant.module, mutant.function) for mutant in all_mutants()})


@pytest.mark.parametrize(
    ("function", "old", "says"),
    [
        ("all_reduce", "no such text", "'no such text' does not stand in dslpar.distributed.collectives.all_reduce"),
        ("all_reduce", "axis", r"stands \d times"),
        ("no_such_function", "x", "dslpar.distributed.collectives has no no_such_function"),
    ],
)
def test_a_mutant_of_other_source_is_an_error(function: str, old: str, says: str) -> None:
    mutant = Mutant("stale", "reduction", "dslpar.distributed.collectives", function, old, "y", "nothing")
    with pytest.raises(StaleMutantError, match=says):
        mutant.code()


FOUND = [
    ("layers.linear: w-grad-twice", "blocks.1.mlp.down.weight", "y"),
    ("layers.norm: local-eps", "norm.bias", None),
    ("engine.vector_reduction: not-summed", "norm.bias", "y"),
]
"""Mutants and what prove names: the wrong parameter nearest to the loss, and the axis if one is needed."""


@pytest.mark.parametrize(("name", "parameter", "axis"), sampled(FOUND, {FOUND[1], FOUND[2]}, named=lambda row: row[0]))
def test_prove_finds_the_mistake(name: str, parameter: str, axis: str | None) -> None:
    from tests.support.kill_matrix.by_proof import LayoutProof
    from tests.support.kill_matrix.layouts import LAYOUTS

    mutant = next(each for each in all_mutants() if each.name == name)
    proof = LayoutProof("1d-sequence", LAYOUTS["1d-sequence"]).prove(mutant.apply)
    assert proof.verdict == certificate.DIFFERS
    assert proof.first_difference is not None
    assert (proof.first_difference.parameter, proof.first_difference.axis) == (parameter, axis)


def test_a_child_gives_its_value_or_says_why_not() -> None:
    assert in_child(lambda: os.getpid(), 20) != os.getpid()
    with pytest.raises(ChildError, match="ZeroDivisionError: "):
        in_child(lambda: 1 // 0, 20)
    with pytest.raises(ChildTimeoutError):
        in_child(lambda: time.sleep(60), 0.2)


def test_a_cover_kills_all_that_any_test_kills() -> None:
    kills = {"a": {1, 2}, "b": {2, 3}, "c": {3}, "d": {2}}
    assert cover(kills, {"a": 1.0, "b": 1.0, "c": 0.1, "d": 0.01}) == ["c", "a"]
    assert cover({}, {}) == []
