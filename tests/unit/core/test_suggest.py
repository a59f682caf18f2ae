"""Suggestions: the nearest name for a message, and the only possible one for a fix."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dslpar.core.errors import Fix, Location
from dslpar.core.suggest import did_you_mean, is_within, nearest, only_near, only_recased, rename_fix


@given(st.text("abc", max_size=6), st.text("abc", max_size=6), st.integers(0, 3))
def test_within_is_the_distance(one: str, other: str, most: int) -> None:
    """Compared with the plain table of Damerau's distance."""
    table = [[i + j if i * j == 0 else 0 for j in range(len(other) + 1)] for i in range(len(one) + 1)]
    for i in range(1, len(one) + 1):
        for j in range(1, len(other) + 1):
            swap = i > 1 and j > 1 and one[i - 1] == other[j - 2] and one[i - 2] == other[j - 1]
            table[i][j] = min(
                table[i - 1][j] + 1,
                table[i][j - 1] + 1,
                table[i - 1][j - 1] + (one[i - 1] != other[j - 1]),
                table[i - 2][j - 2] + 1 if swap else 99,
            )
    assert is_within(one, other, most) is (table[-1][-1] <= most)


def test_certain_spelling_corrections() -> None:
    assert only_near("pipline", ["pipeline", "data"]) == "pipeline"
    assert only_near("PIPELINE", ["pipeline", "data"]) == "pipeline"
    assert only_near("dta", ["data", "date"]) is None or only_near("dta", ["data"]) == "data"
    assert only_near("lt", ["lr", "x"]) == "lr"
    assert only_near("ab", ["cd"]) is None
    assert only_recased("1D", ["1d", "2d"]) == "1d"
    assert only_recased("adam", ["Adam", "ADAM"]) is None


def test_did_you_mean() -> None:
    known = ["pipeline", "data", "Tensor", 4, "x" * 200]
    assert did_you_mean("pipline", known) == "did you mean 'pipeline'?"
    assert did_you_mean("tensr", known, "; ") == "; did you mean 'Tensor'?"
    assert did_you_mean("zero", known) == did_you_mean("x" * 199, known) == ""
    assert nearest("DATA", known) == "data"
    assert nearest(4, known) is None


def test_a_fix_replaces_exactly_the_name() -> None:
    sources = {"a.py": "x = dict('pipline')\n"}
    bare, quoted = Location("a.py", 1, 11, 1, 18), Location("a.py", 1, 10, 1, 19)
    assert rename_fix(sources, bare, "pipline", "pipeline") == Fix(bare, "pipeline")
    assert rename_fix(sources, quoted, "pipline", "pipeline") == Fix(bare, "pipeline")
    assert rename_fix(sources, quoted, "pipelin", "pipeline") is None
    assert rename_fix(sources, bare, "pipline", None) is None
    assert rename_fix({}, bare, "pipline", "pipeline") is None
