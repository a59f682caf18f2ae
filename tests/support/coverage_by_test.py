"""Find the rows of tests' tables that `make test` can leave to `make prove`: what they reach, other tests reach too.

    python -m tests.support.coverage_by_test measure    # runs the tests under coverage, about half an hour on two cores
    python -m tests.support.coverage_by_test choose     # writes the rows to tests/support/tables/rows_of_prove.txt

Of each table, these rows stay: those that take little CPU time, those that start programs (which are not measured),
those that killed a mutant (`tests.support.kill_matrix`), and of the others the quickest that together reach all
branches of the sources that any of them reaches, with each number or text that is an argument beside others, and at
least one. New rows are in `make test` until the next `choose`.

Coverage.py measures, with a context per test; it also measures in forked ranks, which end by `os._exit`.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import shutil
import sqlite3
import subprocess
import sys
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.paths import ROOT
from tests.support.sampling import ROWS_OF_PROVE, greedy_cover

FOLDER = Path(os.environ.get("COVERAGE_FOLDER", ROOT / "build" / "coverage"))
MEASURED = FOLDER / "measured.pickle"
CPU = FOLDER / "cpu.json"
LEAST_CPU_S = 0.3
"""Rows that take less always run. Under coverage they take about twice their time."""
SOURCES = [str(ROOT / name) for name in ("dslpar", "layers")]
TESTS = ("tests/unit", "tests/distributed", "tests/properties")
"""Those of tests/system start programs."""
NOT_BY_BRANCHES = (
    # samples by what their rows compute, or by the mutants that they kill
    "tests/distributed/checkpoint/test_folder.py",
    "tests/distributed/checkpoint/test_resume.py",
    "tests/distributed/engine/test_precision.py",
    "tests/distributed/layers/test_layers.py",
    "tests/distributed/layers/test_steps.py",
    "tests/distributed/layers/test_weight_prefetch.py",
    "tests/properties/invariance/",
    "tests/properties/layouts/",
    "tests/properties/reshape/",
    # a plain program reaches no branch
    "tests/distributed/engine/test_plain_deepspeed.py",
    # keys of frameworks, and hostile texts: rows differ in data
    "tests/properties/fuzz/",
    "tests/properties/test_foreign_keys.py",
    "tests/properties/test_migrate.py",
    "tests/unit/language/test_attacks.py",
    "tests/unit/migrate/",
)
"""Tables whose rows are chosen by hand."""


class Measured(NamedTuple):
    """Results of a run: what each test reaches, uses and starts, by its node id."""

    reached: Mapping[str, frozenset[int]]
    """Places in `branches`."""
    values: Mapping[str, Mapping[str, str]]
    """The values of a row's arguments, of those that are numbers or texts."""
    starts_programs: frozenset[str]
    branches: tuple[tuple[str, int, int], ...] = ()
    """(file, from line, to line)."""


def function_of(test: str) -> str:
    """Return the node id without the row's name."""
    return test.partition("[")[0]


# ---- measure ----


class _Meter:
    """A pytest plugin of one process: coverage of each test, in this process and in its forks."""

    def __init__(self) -> None:
        from coverage import Coverage

        self._coverage = Coverage(
            data_file=str(FOLDER / "data"), data_suffix=True, branch=True, source=SOURCES, config_file=False
        )
        self._test, self._pid = "", os.getpid()
        self._values: dict[str, dict[str, str]] = {}
        self._exit = os._exit

    def pytest_sessionstart(self) -> None:
        sys.addaudithook(self._audit)
        os._exit = self._save_and_exit
        self._coverage.start()

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        self._values = {item.nodeid: dict(_values(item)) for item in items}

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._test = nodeid
        self._coverage.switch_context(nodeid)

    def pytest_sessionfinish(self) -> None:
        if os.getpid() == self._pid:
            self._coverage.stop()
            self._coverage.save()
            FOLDER.joinpath(f"{self._pid}.values.json").write_text(json.dumps(self._values))

    def _audit(self, event: str, args: object) -> None:
        if event in ("subprocess.Popen", "os.exec", "os.posix_spawn", "os.system") and self._test:
            with FOLDER.joinpath(f"{os.getpid()}.programs").open("a") as file:
                file.write(f"{self._test}\n")

    def _save_and_exit(self, status: int) -> None:
        try:
            if os.getpid() != self._pid:
                self._coverage.stop()
                self._coverage.save()
        finally:
            self._exit(status)


def pytest_configure(config: pytest.Config) -> None:
    """Measure in each worker, or in the only process."""
    if hasattr(config, "workerinput") or not config.getoption("numprocesses"):
        config.pluginmanager.register(_Meter())


def _values(item: pytest.Item) -> Iterator[tuple[str, str]]:
    call = getattr(item, "callspec", None)
    for name, value in call.params.items() if call else ():
        if isinstance(value, (str, int, float)):
            yield name, repr(value)


def measure(pytest_args: Iterable[str]) -> int:
    """Run tests under coverage and keep what each reaches; return pytest's exit status."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    cpu = ["-p", "tests.support.cpu_by_test", "--cpu-by-test", str(CPU)]
    plugins = ["--all-rows", "-p", "tests.support.coverage_by_test", *cpu]
    status = subprocess.call([sys.executable, "-m", "pytest", "-q", *plugins, *pytest_args], cwd=ROOT)
    if status == 0:  # a row that fails reaches less
        MEASURED.write_bytes(pickle.dumps(tuple(_read())))
    for path in FOLDER.glob("data.*"):
        path.unlink()
    return status


def _read() -> Measured:
    """Return what all processes wrote."""
    numbers: dict[tuple[str, int, int], int] = {}
    reached: defaultdict[str, set[int]] = defaultdict(set)
    for path in FOLDER.glob("data.*"):
        for test, branch in _branches(path):
            reached[test].add(numbers.setdefault(branch, len(numbers)))
    values: dict[str, dict[str, str]] = {}
    for path in FOLDER.glob("*.values.json"):
        values |= json.loads(path.read_text())
    programs = {line for path in FOLDER.glob("*.programs") for line in path.read_text().splitlines()}
    by_test = {test: frozenset(seen) for test, seen in reached.items()}
    return Measured(by_test, values, frozenset(programs), tuple(numbers))


def _branches(path: Path) -> list[tuple[str, tuple[str, int, int]]]:
    """Return (test, (file, from line, to line)) of one process. A process that was killed as it wrote left nothing."""
    query = (
        "select context, path, fromno, tono from arc join file on file.id = file_id "
        "join context on context.id = context_id where context != ''"
    )
    connection = sqlite3.connect(path)
    try:
        return [(test, (file, start, end)) for test, file, start, end in connection.execute(query)]
    except sqlite3.DatabaseError as error:
        print(f"{path.name}: {error}", file=sys.stderr)
        return []
    finally:
        connection.close()


# ---- choose ----


def choose(measured: Measured, cpu_s: Mapping[str, float], killers: Iterable[str] = ()) -> list[str]:
    """Return the rows that `make test` does not need, sorted."""
    stay = {*measured.starts_programs, *killers}
    costly = {
        test
        for test in measured.reached
        if "[" in test
        and str(ROOT) not in test
        and test not in stay
        and not test.startswith(NOT_BY_BRANCHES)
        and cpu_s.get(test, 0.0) >= LEAST_CPU_S
    }
    reached = set[Hashable]()
    for test in measured.reached.keys() - costly:
        reached |= _items(test, measured)
    new = {test: items for test in sorted(costly) if (items := _items(test, measured) - reached)}
    return sorted(costly.difference(greedy_cover(new, cpu_s.__getitem__)))


def _items(test: str, measured: Measured) -> set[Hashable]:
    """Return the branches that a test reaches, its function, and the values of its arguments if it has several."""
    function, values = function_of(test), measured.values.get(test, {})
    levels = {(function, *item) for item in values.items()} if len(values) > 1 else set()
    return {*measured.reached[test], (function,), *levels}


def killers() -> set[str]:
    """Return the tests that killed a mutant, of the results that there are."""
    from tests.support.kill_matrix.results import Results

    return {result.by for result in Results("tests").known.values() if result.kills}


_HEAD = """\
# Rows that `make test` leaves to `make prove`: what they reach, other tests reach too.
# Made by `python -m tests.support.coverage_by_test choose`.
"""


def main(argv: list[str]) -> int:
    """Measure or choose."""
    raw = argparse.RawDescriptionHelpFormatter
    prog = "python -m tests.support.coverage_by_test"
    parser = argparse.ArgumentParser(prog, description=__doc__, formatter_class=raw)
    parser.add_argument("command", choices=("measure", "choose"), help="measure takes pytest's arguments, too")
    args, pytest_args = parser.parse_known_args(argv)
    if args.command == "measure":
        return measure(pytest_args or ["-n", "auto", "--dist", "worksteal", *TESTS])
    if pytest_args:
        parser.error(f"choose takes no {pytest_args[0]}")
    if not MEASURED.exists():
        parser.error(f"no {MEASURED}: run `python -m tests.support.coverage_by_test measure` first")
    cpu_s = json.loads(CPU.read_text())
    chosen = choose(Measured(*pickle.loads(MEASURED.read_bytes())), cpu_s, killers())
    ROWS_OF_PROVE.write_text(_HEAD + "".join(f"{test}\n" for test in chosen))
    print(f"{len(chosen)} rows, {sum(cpu_s[test] for test in chosen):.0f} of {sum(cpu_s.values()):.0f} CPU seconds")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
