"""Run the tests that meet each mutant, quickest first, until one fails.

Both passes run in forks of one pytest process, which runs no test itself. So no cached value was computed without the
mistake. The first pass runs each test once, and records its time and the mutants it meets. The second runs, for each
mutant, the tests that meet it. Tests that start other programs are left out, since those programs import the code
without the mistake.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from _pytest.runner import runtestprotocol

from dslpar.distributed import forked_ranks
from tests.support import ranks, warm
from tests.support.kill_matrix.child import ChildError, ChildTimeoutError, in_child
from tests.support.kill_matrix.recorder import install_recorder, met, prepare
from tests.support.kill_matrix.results import FOLDER, Result, Results
from tests.support.maths_mutants.mutant import Mutant
from tests.support.versions import HAS_TRANSFORMERS

TESTS = (
    *(f"tests/unit/{name}" for name in ("layers", "data", "models", "policies", "checkpoint", "distributed", "layout")),
    *("tests/distributed", "tests/properties/reshape", "tests/properties/schedules"),
    *(f"tests/properties/{name}" for name in ("context_parallel", "layouts", "invariance", "families")),
)
"""Tests that can meet the maths in forks of their own process."""
IDLE_S = 15.0
LONGEST_S = 300.0
LEAST_S = 20.0
"""Shortest time limit of a test with a mutant, however fast it is without."""


@dataclass(frozen=True)
class Recorded:
    """The record of one test without a mutant."""

    test: str
    passed: bool
    seconds: float
    met: tuple[str, ...]
    """Names of mutants."""


class Matrix:
    """A pytest plugin that collects as pytest does, and then records and kills instead of running the tests."""

    def __init__(
        self, mutants: Sequence[Mutant], results: Results, *, every: bool, most: int, only_record: bool
    ) -> None:
        self.mutants, self.results = mutants, results
        self.every, self.most, self.only_record = every, most, only_record
        """`every`: run all tests, not until the first kill. `most`: the largest number of tests per mutant."""

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Record and kill instead of running the tests."""
        warm.import_deepspeed()
        if HAS_TRANSFORMERS:
            warm.import_transformers("LlamaForCausalLM")
        for fn in (forked_ranks.run_on_ranks, ranks.on_ranks):
            assert fn.__kwdefaults__ is not None
            fn.__kwdefaults__["idle_s"] = IDLE_S
        recorded = self._recorded(session.items)
        if not self.only_record:
            items = {item.nodeid: item for item in session.items}
            for mutant in self.mutants:
                self._kill(mutant, [each for each in recorded if each.test in items], items)
        return True

    # ---- the first pass ----

    def _recorded(self, items: Sequence[pytest.Item]) -> list[Recorded]:
        from tests.support.maths_mutants import all_mutants

        path = FOLDER / "recorded.jsonl"
        known = {each.test: each for each in read_recorded(path)}
        prepare(all_mutants())
        for count, item in enumerate(items):
            if item.nodeid not in known:
                known[item.nodeid] = _record(item, all_mutants())
                with path.open("a") as file:
                    file.write(json.dumps(asdict(known[item.nodeid])) + "\n")
            if count % 50 == 49:
                print(f"recorded {count + 1} of {len(items)} tests", flush=True)
        return [known[item.nodeid] for item in items]

    # ---- the second pass ----

    def _kill(self, mutant: Mutant, recorded: Sequence[Recorded], items: dict[str, pytest.Item]) -> None:
        meet = sorted((each for each in recorded if mutant.name in each.met), key=lambda each: each.seconds)
        if not meet and not any(name == mutant.name for name, _ in self.results.known):
            self.results.add(Result(mutant.name, "no test", "not met"))
        for each in meet[: self.most]:
            if not self.every and self.results.killers(mutant.name):
                return
            if (mutant.name, each.test) not in self.results.known:
                result = _shown(mutant, items[each.test], max(LEAST_S, min(10 * each.seconds, LONGEST_S)))
                self.results.add(result)
                print(f"{result.verdict:9}{result.seconds:5.1f} s  {mutant.name}: {each.test}", flush=True)


def read_recorded(path: Path = FOLDER / "recorded.jsonl") -> Iterator[Recorded]:
    """Yield the records of tests that pass without a mutant."""
    for line in path.read_text().splitlines() if path.exists() else ():
        values = json.loads(line)
        yield Recorded(**{**values, "met": tuple(values["met"])})


def _record(item: pytest.Item, mutants: Sequence[Mutant]) -> Recorded:
    with TemporaryDirectory() as folder:
        path = Path(folder, "met")

        def run() -> tuple[bool, float]:
            install_recorder(mutants, path)
            began = time.monotonic()
            return _passes(item), time.monotonic() - began

        try:
            passed, seconds = in_child(run, LONGEST_S)
        except ChildError:
            passed, seconds = False, LONGEST_S
        # a test that fails unchanged, or with the recorder installed, shows nothing
        return Recorded(item.nodeid, passed, seconds, tuple(sorted(met(path))) if passed else ())


def _shown(mutant: Mutant, item: pytest.Item, seconds: float) -> Result:
    def run() -> bool:
        mutant.apply()
        return _passes(item)

    began = time.monotonic()
    made = partial(Result, mutant.name, item.nodeid)
    try:
        passed = in_child(run, seconds)
    except ChildTimeoutError as error:
        return made("timeout", guess=str(error), seconds=time.monotonic() - began)
    except ChildError as error:
        return made("stopped", guess=str(error)[:300], seconds=time.monotonic() - began)
    return made("survived" if passed else "killed", seconds=time.monotonic() - began)


def _passes(item: pytest.Item) -> bool:
    return not any(report.failed for report in runtestprotocol(item, log=False, nextitem=None))
