"""The linter's tests notice a disabled rule and a small change; see tests/properties/mutation/__main__.py."""

from __future__ import annotations

import ast
import re
import subprocess
import sys

import pytest

from dslpar.linter.registry import RULES
from dslpar.linter.rule import Rule
from tests.properties.mutation.mutants import mutants, mutated
from tests.support.paths import ROOT

SAMPLE, SHARE = 60, 0.85


def mutation(*arguments: str) -> str:
    """Return the command's output."""
    command = [sys.executable, "-m", "tests.properties.mutation", *arguments]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-2000:]
    return ran.stdout


@pytest.fixture(scope="module")
def noticed() -> dict[str, tuple[bool, bool]]:
    """Return code -> (whether the rule's page, whether another test fails while the rule is disabled)."""
    lines = re.findall(r"^(\w+) ([01]) ([01])$", mutation("--disabled"), re.MULTILINE)
    return {code: (page == "1", others == "1") for code, page, others in lines}


@pytest.mark.prove  # `make test` checks each rule's page: tests/unit/linter/test_rule_pages.py
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.code)
def test_a_disabled_rule_is_noticed(rule: Rule, noticed: dict[str, tuple[bool, bool]]) -> None:
    by_page, by_others = noticed[rule.code]
    assert by_page or by_others, f"every test passes without {rule.code}"


@pytest.mark.prove  # `make test` checks each rule's page: tests/unit/linter/test_rule_pages.py
def test_most_rules_are_noticed_by_more_than_their_page(noticed: dict[str, tuple[bool, bool]]) -> None:
    by_page_alone = [code for code, (_, by_others) in noticed.items() if not by_others]
    assert len(by_page_alone) < len(noticed) / 2, by_page_alone


@pytest.mark.prove
def test_most_small_changes_of_rules_are_noticed() -> None:
    """A sample is checked. The surviving mutants have no visible effect, or lack a test."""
    output = mutation("--sample", str(SAMPLE), "--seed", "1")
    killed, made = map(int, re.findall(r"^(\d+) of (\d+) mutants", output, re.MULTILINE)[0])
    assert made == SAMPLE
    assert killed >= SHARE * made, output


def changes(function: str) -> list[str]:
    node = ast.parse(function).body[0]
    assert isinstance(node, ast.FunctionDef)
    return [change for _, change, _ in mutated(node)]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("return a < b", ["<= for <", ">= for <"]),
        ("return a == b", ["!= for =="]),
        ("return a in b and not c", ["or for and", "without a in b", "without not c", "not in for in", "c for not c"]),
        ("return 2 if a else True", ["not (a)", "3 for 2", "1 for 2", "False for True"]),
        ("return [x for x in a if x]", ["without if x"]),
        ("return max(a, b) + b", ["- for +", "min for max"]),
        ("if a:\n        return\n    yield b", ["not (a)", "without return"]),
        ("for x in a:\n        yield x", ["without yield x"]),
    ],
)
def test_the_changes(line: str, expected: list[str]) -> None:
    assert changes(f"def f(a, b, c):\n    {line}\n") == expected


def test_each_mutant_is_another_code() -> None:
    made = mutants("linter/rules/zero.py")
    assert len(made) > 50
    for mutant in made:
        before = mutant.function.__code__
        assert mutant.code.co_name == before.co_name
        assert (mutant.code.co_code, mutant.code.co_consts, mutant.code.co_names) != (
            before.co_code,
            before.co_consts,
            before.co_names,
        ), mutant
