"""Rule pages: the examples behave as the page says; codes and names are unique."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from dslpar.core.errors import Finding
from dslpar.linter.registry import RULES, page_of, pages
from dslpar.linter.rule import Rule
from dslpar.linter.rules.hosts import RULES as HOST_RULES
from tests.support.lint import MODEL, PATH, TOO_SMALL, findings
from tests.support.rule_pages import TWO, path_of, sections

PAGES = [page for page in pages() if not isinstance(page, Rule)]
SECTIONS = ("What it does", "Why", "Example", "Use instead")
FAMILIES = ("CFG", "PAR", "TEN", "PIP", "BAT", "ZER", "PRE", "DSC", "HST", "CKP", "FIT", "PERF", "DEAD", "FRN")


def lint_example(rule: Rule, example: str) -> list[str]:
    """Return the codes that lint finds in an example."""
    found = _findings(rule, example)
    assert all(finding.help for finding in found if finding.severity == "error"), found
    return [finding.code for finding in found]


def _findings(rule: Rule, example: str) -> list[Finding]:
    """Return the findings of an example: a hostfile for rules about hosts, else a config, with a model added if it has
    none.
    """
    if rule in HOST_RULES:
        given = {flag[2:]: hosts for flag, hosts in re.findall(r"(--(?:in|ex)clude) (\S+)", example)}
        return findings(MODEL + TWO, 8 if "--world-size 8" in example else None, hostfile=example, **given)
    world = None if "dslpar lint FILE\n" in example else 8
    path = path_of(example)
    text = example if path != PATH or re.search(r"^model\b", example, re.MULTILINE) else MODEL + example
    overrides = re.findall(r"^# override: (.*)$", text, re.MULTILINE)
    return findings(text, world, overrides, ignored=() if rule.code in TOO_SMALL else TOO_SMALL, path=path)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.code)
def test_page(rule: Rule) -> None:
    page = sections(rule)
    assert tuple(page) == SECTIONS
    assert rule.code.startswith(FAMILIES)
    assert rule.code in lint_example(rule, page["Example"])
    assert rule.code not in lint_example(rule, page["Use instead"])


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.code)
def test_use_instead_is_right(rule: Rule) -> None:
    allowed = {"CFG111", "CFG112"}  # infos
    assert set(lint_example(rule, sections(rule)["Use instead"])) <= allowed


def test_every_file_of_a_page_has_its_rule() -> None:
    files = [file.stem for file in (Path(__file__).parents[3] / "dslpar").rglob("pages/*.md")]
    assert sorted(files) == sorted(rule.code for rule in RULES)


def test_codes_and_names_are_unique() -> None:
    for field in ("code", "name"):
        counts = Counter(getattr(page, field) for page in (*RULES, *PAGES))
        assert [value for value, count in counts.items() if count > 1] == []
    assert page_of("par101") is page_of("world-not-a-multiple")
    assert page_of("nothing") is None


def test_removed_codes_are_not_reused() -> None:
    assert [page_of(code) for code in ("CFG109", "HST209", "HST210")] == [None] * 3


def test_every_code_in_the_sources_has_a_page() -> None:
    """Many files make findings by code; tests/unit/core/test_catalog.py checks those of a run."""
    root = Path(__file__).parents[3]
    files = [*(root / "dslpar").rglob("*.py"), *(root / "layers").rglob("*.py")]
    source = "\n".join(file.read_text() for file in files)
    used = set(re.findall(rf'(?m)(?:^|")((?:{"|".join(FAMILIES)})\d{{3}})["\s]', source))
    assert used == {page.code for page in (*RULES, *PAGES)}
