"""Promise 1: every gradient, loss, norm and weight equals that of one process, on any layout.

Each row of a covering array is a call of `dslpar.parity.prove`, as in `dslpar prove`: two to nine layers in miniature,
three steps. `python -m tests.support.kill_matrix` shows the mistakes that these rows detect.
"""

from __future__ import annotations

import pytest

from dslpar.parity.prove import prove
from tests.properties.layouts import arrays
from tests.properties.layouts.arrays import ARRAYS, CONSTRAINTS, legal, missing, missing_of, repair, rows, world_size
from tests.support.compiled import TORCH_S_OWN_WARNINGS
from tests.support.layout_factors import OF_TRANSFORMERS, PLAIN, Row, describe, findings_of, job_of
from tests.support.sampling import greedy_cover
from tests.support.versions import HAS_TRANSFORMERS, NO_TRANSFORMERS

EXPERTS: list[Row] = [
    {**PLAIN, "data": 2, "expert": 2, "zero": 1, **more}
    for more in (
        {"family": "Mixtral", "data": 4, "expert": 2, "clip": 1.0, "accumulation": 2, "param_gather": True},
        {"family": "Qwen2-MoE", "mode": "1d 2", "zero": 2, "recompute": 1},
        {"family": "Qwen3-MoE", "mode": "2d 4", "zero": 0, "clip": 1.0, "optimizer": "SGD"},
        {"family": "OLMoE", "context": "ring 2", "data": 4, "expert": 2},
        {"family": "Mixtral", "pipe": 2, "schedule": "interleaved", "zero": 0, "adapters": True},
        {"family": "Mixtral", "mode": "1d 2 sequence", "pipe": 2, "schedule": "zero_bubble"},
        {"family": "Mixtral", "pipe": 2, "zero": 0},
    )
]
"""Mixtures whose tokens are sent to experts on other replicas."""
_OTHER_ROUTERS: list[Row] = [
    {**PLAIN, "family": family, "mode": "1d 2", "data": 2, "expert": 2, "zero": 2, "clip": 1.0}
    for family in ("DeepSeek-V3", "GPT-OSS", "GPT, experts")
]
_OF_GPT: list[Row] = [
    {**PLAIN, "family": "GPT, experts", "balance": True, "zero": 1, **more}
    for more in (
        {"mode": "1d 2", "data": 2, "zero": 3},
        {"mode": "3d 8", "loss_chunks": 3, "recompute": 2},
        {"mode": "2.5d 8", "tied": False},
        {"mode": "cuboid 2 3 1", "clip": 1.0},
        {"mode": "1d 2", "pipe": 3, "schedule": "interleaved", "accumulation": 2},
        {"data": 3, "expert": 3, "optimizer": "SGD", "accumulation": 2},
        {"mode": "1d 2", "context": "hybrid 4", "keep": "none"},
        {"mode": "1d 2", "compile": True},
    )
]
"""Levels that the array of mixtures has not."""


def _levels(row: Row) -> set[tuple[object, ...]]:
    """Return a row's levels, and those of families and of ZeRO with and without tensor parallelism."""
    is_cut = row["mode"] != "none"
    return {*row.items(), *((name, row[name], is_cut) for name in ("family", "zero"))}


def _cost(row: Row) -> float:
    """Return about how long a row takes: its ranks and the one process; ZeRO 3 and transformers' layers take longer."""
    return (world_size(row) + 1) * (1 + (row["zero"] == 3)) * (1 + 0.5 * (row["family"] in OF_TRANSFORMERS))


def _sample() -> list[Row]:
    """Return rows of the array "daily" that have all its levels, in little time."""
    row_of = {describe(row): row for row in rows("daily")}
    chosen = greedy_cover({name: _levels(row) for name, row in row_of.items()}, lambda name: _cost(row_of[name]))
    return [row for name, row in row_of.items() if name in chosen]


TEST = [*_sample(), EXPERTS[0], EXPERTS[3], EXPERTS[5], *_OTHER_ROUTERS]
"""A quarter of the rows of the array "daily" take a fifth of its CPU time: `make prove` runs them all."""
DAILY = [*TEST, *(row for row in (*rows("daily"), *EXPERTS) if row not in TEST)]
PROVE = [*rows("prove"), *rows("mixtures"), *rows("compiled"), *_OF_GPT]


def cases(of: list[Row], *marks: pytest.MarkDecorator) -> list[object]:
    return [pytest.param(row, id=describe(row).replace("/", " "), marks=[*marks, *marks_of(row)]) for row in of]


def marks_of(row: Row) -> list[pytest.MarkDecorator]:
    missing = row["family"] in OF_TRANSFORMERS and not HAS_TRANSFORMERS
    skip = [pytest.mark.skip(reason=NO_TRANSFORMERS)] if missing else []
    return [*skip, *(TORCH_S_OWN_WARNINGS if row["compile"] else [])]


@pytest.mark.parametrize("row", [*cases(TEST), *cases([*DAILY[len(TEST) :], *PROVE], pytest.mark.prove)])
def test_the_layout_does_not_change_the_maths(row: Row) -> None:
    job = job_of(row)
    assert job is not None, "lint passes it"
    proof = prove(job, max_ranks=max(2, job.mesh.world_size))
    assert proof.verdict == "proved", (proof.first_difference, [each for each in proof.checks if not each.holds])


_CUT = {"mode": "1d 2", "data": 2, "expert": 2, "zero": 2}
RESUMES: list[Row] = [
    {"family": "GPT, sigmoid", **_CUT},
    {"family": "Mixtral", **_CUT},
    {"family": "Mixtral", "data": 2, "pipe": 2, "expert": 0},
    {"family": "Mixtral", "data": 2, "mode": "1d 2", "pipe": 2, "expert": 1, "zero": 0},
    {"family": "GPT, sigmoid", "data": 2, "mode": "1d 2", "pipe": 2, "expert": 1, "zero": 0},
    {"family": "GPT, experts", "data": 8, "expert": 8},
]


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(row, id=describe({**PLAIN, **row}), marks=[pytest.mark.prove] * (at > 0))
        for at, row in enumerate(RESUMES)
    ],
)
def test_a_mixture_resumes_with_its_experts_on_other_ranks(other: Row) -> None:
    """Experts, and the biases of their routers, are there again."""
    if other["family"] in OF_TRANSFORMERS and not HAS_TRANSFORMERS:
        pytest.skip(NO_TRANSFORMERS)
    row = {**PLAIN, "family": other["family"], "data": 4, "expert": 4, "zero": 1}
    one, then = job_of(row), job_of({**row, **other})
    assert one is not None
    assert then is not None
    proof = prove(one, resume_on=then, max_ranks=8)
    assert proof.verdict == "proved", (proof.first_difference, [each for each in proof.checks if not each.holds])


# ---- the arrays are what they promise ----


NAMES = [pytest.param(name, marks=[] if name == "daily" else [pytest.mark.prove]) for name in ARRAYS]


@pytest.mark.parametrize("name", NAMES)
def test_every_pair_of_levels_meets(name: str) -> None:
    """And of the factors that divide a model, every triple."""
    assert list(missing(name)) == []


@pytest.mark.parametrize("name", NAMES)
def test_rows_are_legal(name: str) -> None:
    for row in rows(name):
        assert legal(row, ARRAYS[name])
        assert findings_of(row) == [], describe(row)


def test_the_sample_has_every_level_whole_and_cut() -> None:
    """And `make prove` runs what the sample leaves out."""
    seen = [set().union(*map(_levels, of)) for of in (TEST, rows("daily"))]
    assert seen[1] <= seen[0]
    assert {("zero", stage, cut) for stage in range(4) for cut in (False, True)} <= seen[0]
    assert all(row in DAILY for row in (*rows("daily"), *EXPERTS, *_OTHER_ROUTERS))


@pytest.mark.prove  # six seconds, of a tool that is run by hand: what it has written is checked above
def test_an_array_that_lost_rows_is_repaired(monkeypatch: pytest.MonkeyPatch) -> None:
    """An array that lacks nothing is unchanged."""
    kept = rows("daily")
    assert repair("daily") == kept
    monkeypatch.setattr(arrays, "rows", lambda name: [{**kept[0], "zero": 9}, *kept[1:-9]])
    assert list(missing_of(kept[1:-9], ARRAYS["daily"]))
    repaired = repair("daily")
    assert list(missing_of(repaired, ARRAYS["daily"])) == []
    assert all(legal(row, ARRAYS["daily"]) and row["zero"] != 9 for row in repaired)


def test_what_constraints_leave_out_is_refused_or_means_nothing() -> None:
    """Each constraint excludes rows that lint refuses, or reports as without effect: none hides a layout that runs."""
    violations: list[Row] = [
        {"mode": "1d 2", "residual": "hidden"},
        {"mode": "ring 2", "overlap": True},
        {"mode": "ring 2", "context": "ring 2"},
        {"pipe": 2, "zero": 2},
        {"offload": True},
        {"family": "Mixtral", "data": 3, "expert": 2},
        {"family": "DeepSeek-V3", "balance": True},
        {"family": "GPT-OSS", "context": "ring 2"},
        {"family": "GPT-OSS", "mode": "ring 2"},
        {"family": "Mixtral", "data": 2, "expert": 2, "zero": 3},
        {"family": "Mixtral", "data": 2, "expert": 2, "zero": 1, "offload": True},
        {"zero": 3, "compile": True},
        {"family": "BERT", "schedule": "zero_bubble", "pipe": 2, "compile": True},
        {"family": "T5", "context": "ring 2"},
        {"family": "MoCo", "pipe": 2},
        {"family": "MoCo", "accumulation": 2},
        {"family": "layers_cfg", "mode": "1d 2"},
        {"family": "ViT", "mode": "1d 2 sequence"},
        {"family": "one key head", "mode": "2d 4"},
    ]
    for violation in violations:
        row = {**PLAIN, **violation}
        assert not all(each.holds(row) for each in CONSTRAINTS), violation
        assert findings_of(row), violation
