"""Texts that do not parse: what is broken costs its own statement, and hides nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dslpar.language.load import load_text
from dslpar.language.recovery import UNKNOWN, recovered
from dslpar.language.source import parse_quietly
from tests.support.paths import ROOT

CONFIGS = [path.read_text() for path in sorted((ROOT / "configs").glob("*.py"))]


@pytest.mark.parametrize(
    ("text", "expected", "broken"),
    [
        ("a = 1\n", "a = 1\n", set()),
        ("model = dict(num_layers=4,\nparallel = 2\n", "model = dict(num_layers=4,)\nparallel = 2\n", {1}),
        ("model = dict(\n    num_layers=4\nb = 1", "model = dict(\n    num_layers=4)\nb = 1", {2}),
        (
            "model = dict(\n    hidden_size=\n    num_layers=4,\n)\nb = 1\n",
            f"model = dict(\n    hidden_size={UNKNOWN},\n    num_layers=4,\n)\nb = 1\n",
            {2},
        ),
        ("model = dict(type='GPT, n=4)\nb = 1\n", "model = dict(type='GPT, n=4)')\nb = 1\n", {1}),
        ("model = dict(type='GPT\nb = 1\n", "model = dict(type='GPT')\nb = 1\n", {1}),
        ("a = [1, 2\nb = {'c': 3\nd = 4\n", "a = [1, 2]\nb = {'c': 3}\nd = 4\n", {1, 2}),
        ("a = dict(b=, c=2)\n", f"a = dict(b={UNKNOWN}, c=2)\n", {1}),
        ("a = dict(b=1, c)\n", f"a = dict(b=1, c={UNKNOWN})\n", {1}),
        ("a = dict(b=1, c", f"a = dict(b=1, c={UNKNOWN})", {1}),
        ("a = dict(b=dict(c=1, d), e=", f"a = dict(b=dict(c=1, d={UNKNOWN}), e={UNKNOWN})", {1}),
        ("a = dict(b=1, , c=2)\n", "a = dict(b=1,   c=2)\n", {1}),
        ("a = {'b': , 'c': ',='}\n", f"a = {{'b': {UNKNOWN}, 'c': ',='}}\n", {1}),
        ("a = dict(b=  # why, so\n, c=2)\n", f"a = dict(b=  # why, so\n{UNKNOWN}, c=2)\n", {2}),
        ("parallel = dict(tensor=\nb = 1\n", f"parallel = dict(tensor={UNKNOWN})\nb = 1\n", {1}),
        ("a = 1\nmod\nb = )\nc = 2\n", f"a = 1\nmod\nb = {UNKNOWN}\nc = 2\n", {3}),
        ("from .x import\nb = 1\n", "\nb = 1\n", {1}),
        (
            "a = dict(\n    # comment (\n    b=1\n\n# end\nc = 2\n",
            "a = dict(\n    # comment (\n    b=1)\n\n# end\nc = 2\n",
            {3},
        ),
    ],
)
def test_the_smallest_part_is_replaced(text: str, expected: str, broken: set[int]) -> None:
    made = recovered(text, "cfg.py")
    assert (made.text, made.broken) == (expected, broken)
    assert [item.code for item in made.findings] == ["CFG001"] * len(made.findings)
    assert bool(made.findings) == bool(broken)
    assert all(item.location.path == "cfg.py" for item in made.findings)


def test_lines_that_look_like_statements_may_be_part_of_one() -> None:
    text = "model = dict(\nnum_layers=4,\nhidden_size=8,\n)\nbroken = (\nlast = 1\n"
    assert recovered(text, "cfg.py").text == "model = dict(\nnum_layers=4,\nhidden_size=8,\n)\nbroken = ()\nlast = 1\n"


def test_other_statements_keep_their_values_and_places() -> None:
    text = Path(ROOT / "configs" / "gpt_3d.py").read_text()
    whole = load_text(text, "cfg.py")
    config = load_text(recovered(f"{text}\nzero = dict(stage=(1\ntrain = dict(steps=3)\n", "cfg.py").text, "cfg.py")
    assert config.complete
    assert config.root.value["model"].plain() == whole.root.value["model"].plain()
    assert config.at("model") == whole.at("model")
    assert config.root.value["train"].plain() == {"steps": 3}


@settings(deadline=None)
@given(st.data())
def test_any_cut_parses_and_keeps_its_lines(data: st.DataObject) -> None:
    text = data.draw(st.sampled_from(CONFIGS))
    begin = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(begin, min(len(text), begin + 40)))
    cut = (
        text[:begin]
        + data.draw(st.sampled_from(["", "(", ")", "'", "=", "dict(", '"""', "\\", "\n", ":"]))
        + text[end:]
    )
    made = recovered(cut, "cfg.py")
    parse_quietly(made.text, "cfg.py")
    assert made.text.count("\n") == cut.count("\n")
    lines, old = made.text.split("\n"), cut.split("\n")
    assert {at + 1 for at in range(len(lines)) if lines[at] != old[at]} == made.broken


def test_each_broken_statement_says_where_it_breaks() -> None:
    made = recovered("a = 1\nb = dict(\n    c=3\nd = (\n", "cfg.py")
    assert [(item.location.line, item.location.column) for item in made.findings] == [(2, 9), (4, 5)]
    assert all("was never closed" in item.message for item in made.findings)
