"""docs/mistakes.md: lint prints what the page shows, and nothing for each corrected config."""

from __future__ import annotations

import re

import pytest

from tests.support.mistakes_page import PAGE, Example, examples, rewritten, run

EXAMPLES = list(examples(PAGE.read_text()))
REWRITE = "docs/mistakes.md is out of date; write it anew with: python -m tests.support.mistakes_page"


def codes(printed: str) -> list[str]:
    return re.findall(r"^\S+:\d+:\d+: ([A-Z]+\d{3}) ", printed, re.MULTILINE)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.title)
def test_lint_prints_what_the_page_says(example: Example) -> None:
    status, printed = run(example.command, example.mistake)
    assert printed == example.printed, REWRITE
    assert status == 1 or "warning" in printed, "a mistake is told"


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.title)
def test_the_corrected_config_has_no_findings(example: Example) -> None:
    assert run(example.command, example.mistake | example.right) == (0, "no findings\n")


def test_ten_mistakes_of_ten_rules_each_of_an_issue() -> None:
    """The first finding of each is about another rule."""
    assert len({codes(example.printed)[0] for example in EXAMPLES}) == len(EXAMPLES) >= 10
    sections = PAGE.read_text().split("\n## ")[1:]
    assert all(re.search(r"\(https://github\.com/\S+/(issues|pull)/\d+\)", section) for section in sections)


def test_a_stale_page_would_be_seen_and_is_written_anew() -> None:
    page = PAGE.read_text()
    stale = page.replace("help:", "halp:", 1)
    assert stale != page
    first = next(examples(stale))
    assert run(first.command, first.mistake)[1] != first.printed
    assert rewritten(stale) == page
