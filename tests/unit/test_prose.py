"""tools/prose.py, which `make lint` runs: it reports what it is for, at its line, and nothing in code."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from tests.support.paths import ROOT


@pytest.fixture(scope="module")
def prose() -> Iterator[object]:
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        import prose  # type: ignore[import-not-found]

        prose.register()
        yield prose
    finally:
        sys.path.remove(str(ROOT / "tools"))


SOURCE = '''"""Which ranks hold what.

A message a rank is told, in the manner of transformers'.

    what a rank is told          # code
"""


def f() -> None:
    """Return `what a rank is told`: a line a rank, of one's own. It is very unique in 3-D, or 3D parallelism."""
    parser.add_argument("--x", help="the files that are none")
'''


def test_habits_are_reported_at_their_lines(prose: object) -> None:
    problems = prose.problems(prose.of_module("x.py", SOURCE))  # type: ignore[attr-defined]
    assert {(line, message.partition(":")[0]) for line, message in problems} == {
        (1, "a docstring begins with a verb, or names the thing"),
        (3, "'is told'"),
        (3, "'message a rank'"),
        (3, '"of transformers\'"'),
        (10, "'line a rank'"),
        (10, '"of one\'s own"'),
        (10, "'3-D'"),
        (10, "'3D parallel'"),
        (10, "uncomparables"),
        (10, "weasel_words.very"),
        (11, "'that are none'"),
    }


def test_plain_english_is_not_reported(prose: object) -> None:
    text = "Return the rank that was told to stop 3D tensor parallelism, in transformers' own words."
    source = f'"""{text}"""\n'
    assert [*prose.problems(prose.of_module("x.py", source))] == []  # type: ignore[attr-defined]


def test_code_in_a_page_is_no_prose(prose: object) -> None:
    page = prose.Page("x.md", prose.without_code("```\nWhich is told\n```\nRead `that are none`.\n"))  # type: ignore[attr-defined]
    assert [*prose.problems(page)] == []  # type: ignore[attr-defined]
