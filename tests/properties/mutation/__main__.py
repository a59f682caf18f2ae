"""`python -m tests.properties.mutation`: print the mutants of the rules that the linter's tests miss.

    python -m tests.properties.mutation                         every mutant; prints those that no test notices
    python -m tests.properties.mutation linter/rules/zero.py    of some files
    python -m tests.properties.mutation --sample 100 --seed 1   of a hundred
    python -m tests.properties.mutation --disabled              each rule disabled in turn: CODE, by its page, by others

The tests run once unchanged, and the configs that they lint are recorded. A mutant is a child process in which one
function has other code. It lints the recorded configs with the rules that could differ. If all findings are equal, no
test could notice ("weak mutation", Howden 1982). If one differs, the tests that linted that config run until one fails.
So a mutant costs milliseconds, and each verdict is still that of the real tests.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import pytest
from _pytest.runner import runtestprotocol

from dslpar.core.errors import has_errors
from dslpar.linter.context import Context
from dslpar.linter.engine import run_rules
from dslpar.linter.registry import RULES
from dslpar.linter.rule import Rule
from dslpar.linter.rules import comments
from dslpar.schema.sections_reader import read
from tests.properties.mutation.mutants import PACKAGE, Mutant, mutants

ROOT = PACKAGE.parent
TESTS = ("tests/unit/linter", "tests/unit/layout/test_divisors.py", "tests/unit/layout/test_listed_layers.py")
LEFT_OUT = ("*mutation*", "*speed*", "*typed_rules*", "*readme*", "*oracle*", "*fuzz*")
"""Tests whose configs other tests also lint, or that lint far too many."""
QUICK = tuple(
    f"tests/unit/linter/test_{name}.py"
    for name in ("rule_pages", "locations", "messages", "rule_boundaries", "performance", "no_effect")
)
"""Enough tests to notice a disabled rule."""
SLOW_S = 1.0
"""Tests that take longer are tried last."""
CPU_S = 3
LEGAL = "legal"
"""Recorded beside a config's findings: some rules look at legal configs only."""
MOST_TRIED = 80
"""Largest number of tests per mutant."""


class Call(NamedTuple):
    """A linted config, and the tests that linted it."""

    arguments: tuple[Any, ...]
    """Arguments of the Context: the config, its reading, and the world."""
    findings: dict[str, object]
    """Findings by the rule's code, and whether none is an error."""
    tests: list[pytest.Item]


class Suite:
    """The tests and the configs that they lint."""

    def __init__(self, items: Sequence[pytest.Item]) -> None:
        self.calls: dict[object, Call] = {}
        self.seconds: dict[str, float] = {}
        self.direct: list[pytest.Item] = []
        for item in items:
            self._record(item)
        for call in self.calls.values():
            found = run_rules(Context(*call.arguments))
            call.findings[LEGAL] = not has_errors(each for each in found if not each.code.startswith("FIT"))
            call.findings.update({rule.code: findings_of(rule, call) for rule in RULES})

    def _record(self, item: pytest.Item) -> None:
        began, linted, remembered = time.process_time(), [], Context.__init__

        def remember(self: Context, *arguments: Any, **options: bool) -> None:
            remembered(self, *arguments, **options)
            if not options.get("by_program"):
                linted.append(arguments)

        Context.__init__ = remember  # type: ignore[method-assign, assignment]
        passed = passes(item)
        Context.__init__ = remembered  # type: ignore[method-assign]
        self.seconds[item.nodeid] = time.process_time() - began
        if not passed:
            print(f"left out, since it fails as it is: {item.nodeid}", file=sys.stderr)
            return
        if item.path.parent.name == "layout":
            self.direct.append(item)
        for arguments in linted:
            call = self.calls.setdefault(_key(arguments), Call(arguments, {}, []))
            call.tests.append(item)

    def tests_that_differ(self, rules: Sequence[Rule], read_anew: bool) -> Iterator[pytest.Item]:
        """Yield tests whose config has other findings of one of the rules now, the quick tests first."""
        seen, late = set(), []
        for call in self.calls.values():
            if all(findings_of(rule, call, read_anew) == call.findings[rule.code] for rule in rules):
                continue
            for item in call.tests:
                if item.nodeid not in seen:
                    seen.add(item.nodeid)
                    if self.seconds[item.nodeid] < SLOW_S:
                        yield item
                    else:
                        late.append(item)
        yield from late


def _key(arguments: tuple[Any, ...]) -> object:
    config, _, *rest = arguments
    return (config.path, tuple(config.sources.items()), repr(rest))


def findings_of(rule: Rule, call: Call, read_anew: bool = False) -> object:
    """Run one rule on a linted config."""
    config, reading, *world = call.arguments
    cx = Context(config, read(config) if read_anew else reading, *world)
    cx.is_legal = lambda: bool(call.findings[LEGAL])
    try:
        if rule in comments.RULES and "dslpar:" in "".join(config.sources.values()):
            return [finding for finding in run_rules(cx) if finding.code == rule.code]  # they need what others found
        return list(rule.findings(cx))
    except Exception as error:  # noqa: BLE001 (a mutant may fail in any way)
        return repr(error)


def passes(item: pytest.Item) -> bool:
    """Return whether a test passes now."""
    return not any(report.failed for report in runtestprotocol(item, log=False, nextitem=None))


# Verdicts ---------------------------------------------------------------------------------------------------------

KILLED, SURVIVED, UNSEEN = 1, 2, 3
VERDICTS = {SURVIVED: "no test fails  ", UNSEEN: "nothing differs"}


def in_child(judge: Callable[[], int]) -> int:
    """Return a child's verdict. A child that dies or takes too long has killed its mutant."""
    pid = os.fork()
    if pid == 0:
        status = KILLED
        try:
            resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
            silent = os.open(os.devnull, os.O_WRONLY)
            os.dup2(silent, 1), os.dup2(silent, 2)
            status = judge()
        finally:
            os._exit(status)
    status = os.waitpid(pid, 0)[1]
    return os.WEXITSTATUS(status) if os.WIFEXITED(status) else KILLED


def verdict(suite: Suite, mutant: Mutant) -> int:
    """Return whether a test notices the mutant, judged in a child process."""
    mutant.function.__code__ = mutant.code
    of_rules = mutant.file.startswith("linter/") or mutant.file.endswith("/rules.py")  # a family has its own rules
    rules = [rule for rule in RULES if not of_rules or _knows(rule, mutant)]
    verdict = UNSEEN
    tests = suite.tests_that_differ(rules, read_anew=not of_rules)
    for _, item in zip(range(MOST_TRIED), tests, strict=False):
        if not passes(item):
            return KILLED
        verdict = SURVIVED
    if not of_rules and any(not passes(item) for item in suite.direct):
        return KILLED
    return verdict


def _knows(rule: Rule, mutant: Mutant) -> bool:
    """Return whether the rule is in the mutant's module, or in one that imports from it."""
    names, module = rule.check.__globals__, mutant.function.__module__
    return names["__name__"] == module or any(getattr(value, "__module__", None) == module for value in names.values())


def disabled(suite: Suite, rule: Rule) -> int:
    """Return 1 if the page of the disabled rule notices, 2 if another test does, 3 if both do; in a child process."""
    rule.check.__code__ = _nothing.__code__
    by_page, by_others = 0, 0
    items = [item for call in suite.calls.values() if call.findings[rule.code] for item in call.tests]
    for item in {item.nodeid: item for item in items}.values():
        is_page = item.path.name == "test_rule_pages.py"
        if (by_page if is_page else by_others) == 0 and not passes(item):
            by_page, by_others = by_page or is_page, by_others or not is_page
        if by_page and by_others:
            break
    return by_page + 2 * by_others


def _nothing(cx: Context) -> Iterator[Any]:
    yield from ()


# The command ------------------------------------------------------------------------------------------------------


def files() -> list[str]:
    """Return the modules with rules, and the tables that rules read."""
    of_rules = {rule.check.__module__.removeprefix("dslpar.").replace(".", "/") + ".py" for rule in RULES}
    return [*sorted(of_rules), "layout/divisors.py", "layout/listed_layers.py"]


class Run:
    """A pytest plugin that collects as pytest does, and then judges mutants instead of running the tests."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.survivors = 0

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Judge mutants instead of running the tests."""
        suite = Suite(sorted(session.items, key=lambda item: item.path.name != "test_rule_pages.py"))
        gc.freeze()
        self._disabled(suite) if self.arguments.disabled else self._mutants(suite)
        return True

    def _disabled(self, suite: Suite) -> None:
        for rule in RULES:
            found = in_child(lambda rule=rule: disabled(suite, rule))  # type: ignore[misc]
            print(rule.code, int(found & 1 > 0), int(found & 2 > 0), flush=True)

    def _mutants(self, suite: Suite) -> None:
        print(f"{len(suite.seconds)} tests in {sum(suite.seconds.values()):.0f} s, {len(suite.calls)} configs")
        made = [mutant for file in self.arguments.files or files() for mutant in mutants(file)]
        if self.arguments.sample:
            made = random.Random(self.arguments.seed).sample(made, min(len(made), self.arguments.sample))
        for count, mutant in enumerate(made):
            if count and count % 100 == 0:
                print(f"so far {count - self.survivors} of {count} are noticed", file=sys.stderr, flush=True)
            found = in_child(lambda mutant=mutant: verdict(suite, mutant))  # type: ignore[misc]
            if found != KILLED:
                self.survivors += 1
                print(f"{VERDICTS[found]}  {mutant}", flush=True)
        killed = len(made) - self.survivors
        print(f"{killed} of {len(made)} mutants are noticed: {100 * killed / max(1, len(made)):.1f} %")


def main(argv: Sequence[str]) -> int:
    """Judge the selected mutants. The exit status is 0 unless the tests cannot be collected."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="python -m tests.properties.mutation", description=__doc__, formatter_class=raw
    )
    parser.add_argument("files", nargs="*", metavar="FILE", help="below dslpar/; by default every module with rules")
    parser.add_argument("--sample", type=int, metavar="N", help="so many mutants, drawn at random")
    parser.add_argument("--seed", type=int, default=0, metavar="S")
    parser.add_argument("--tests", nargs="+", metavar="PATH", help="by default the linter's")
    parser.add_argument("--disabled", action="store_true", help="each rule in turn says nothing")
    run = Run(parser.parse_args(argv))
    os.chdir(ROOT)
    options = ["-qq", "-s", "--no-header", "--no-summary", "-p", "no:cacheprovider"]
    options += [f"--ignore-glob={pattern}" for pattern in LEFT_OUT]
    paths = run.arguments.tests or (QUICK if run.arguments.disabled else TESTS)
    return int(pytest.main([*options, *paths], plugins=[run]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
