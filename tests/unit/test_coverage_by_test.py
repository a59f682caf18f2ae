"""Rows of tables that `make test` leaves to `make prove`."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import coverage_by_test
from tests.support.coverage_by_test import Measured, choose
from tests.support.paths import ROOT
from tests.support.sampling import rows_of_prove

CPU_S = {"a.py::t[1]": 0.4, "a.py::t[2]": 0.5, "a.py::t[3]": 0.6, "a.py::t[4]": 0.1, "a.py::one": 3.0}


def measured(values: dict[str, dict[str, str]] | None = None, programs: frozenset[str] = frozenset()) -> Measured:
    reached = {"a.py::t[1]": {1, 2}, "a.py::t[2]": {1, 2}, "a.py::t[3]": {2, 3}, "a.py::t[4]": {1}, "a.py::one": {1}}
    return Measured({test: frozenset(seen) for test, seen in reached.items()}, values or {}, programs)


def test_a_row_that_reaches_what_a_quicker_one_reaches_is_left_out() -> None:
    assert choose(measured(), CPU_S) == ["a.py::t[1]", "a.py::t[2]"]


def test_a_row_stays_that_killed_a_mutant_or_starts_a_program() -> None:
    assert choose(measured(), CPU_S, ["a.py::t[1]"]) == ["a.py::t[2]"]
    assert choose(measured(programs=frozenset({"a.py::t[1]", "a.py::t[2]"})), CPU_S) == []


def test_one_row_of_a_table_stays() -> None:
    reached = {"a.py::t[1]": frozenset({1}), "a.py::t[2]": frozenset({1}), "b.py::t": frozenset({1})}
    assert choose(Measured(reached, {}, frozenset()), CPU_S) == ["a.py::t[2]"]


def test_each_value_of_an_argument_stays() -> None:
    values = {"a.py::t[1]": {"zero": "1", "dtype": "'fp32'"}, "a.py::t[2]": {"zero": "2", "dtype": "'fp32'"}}
    assert choose(measured(values), CPU_S) == []


def test_a_table_whose_rows_differ_in_data_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coverage_by_test, "NOT_BY_BRANCHES", ("a.py",))
    assert choose(measured(), CPU_S) == []


@pytest.mark.prove  # it starts pytest
def test_forked_ranks_are_measured_and_programs_are_noticed(tmp_path: Path) -> None:
    tests = "tests/distributed/collectives/test_collectives.py", "tests/unit/cli/test_completion.py"
    command = [sys.executable, "-m", "tests.support.coverage_by_test", "measure", "-n", "1", *tests]
    subprocess.run(command, cwd=ROOT, env={**os.environ, "COVERAGE_FOLDER": str(tmp_path)}, check=True, timeout=600)
    found = Measured(*pickle.loads((tmp_path / "measured.pickle").read_bytes()))
    ranks = [test for test in found.reached if test.startswith(f"{tests[0]}::test_values_and_objects")]
    files = {found.branches[branch][0] for test in ranks for branch in found.reached[test]}
    assert str(ROOT / "dslpar/distributed/collectives.py") in files
    assert found.starts_programs
    assert not found.starts_programs.intersection(ranks)


@pytest.mark.prove  # it collects all tests
def test_every_listed_row_is_there() -> None:
    """Otherwise run `python -m tests.support.coverage_by_test choose`, or delete its line."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "prove", "tests"]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, timeout=600)
    assert rows_of_prove() - set(done.stdout.splitlines()) == set()
