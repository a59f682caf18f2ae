"""Texts that do not parse: what is broken costs its own statement, and hides nothing else."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dslpar.language.load import load_text
from dslpar.language.recovery import UNKNOWN, recovered
from dslpar.language.source import parse_quietly
from dslpar.linter.check import check
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
        ("from .x import a, b as c, \n", "from .x import a, b as c\n", {1}),
        ("from .x import (\n    a,  # why\n    b x,\n)\n", "from .x import a, b, x\n\n\n\n", {1, 2, 3, 4}),
        ("a, b = c = 1 1\n", f"a, b = c = {UNKNOWN}\n", {1}),
        ("a['b'].c = (1 1\n", f"a['b'].c = {UNKNOWN}\n", {1}),
        ("a += 1 1\n", f"a = {UNKNOWN}\n", {1}),
        ("a: int = 1 1\n", f"a = {UNKNOWN}\n", {1}),
        ("def f(:\n    b = 1\n", f"f = b = {UNKNOWN}\n\n", {1, 2}),
        ("for i in:\n    a.b = 1\n", f"i = a.b = {UNKNOWN}\n\n", {1, 2}),
        ("if x:\n    a = 1 1\n    b = 2\n", f"if x:\n    a = {UNKNOWN}\n    b = 2\n", {2}),
        ("def f(x):\n    return 1 1\n", f"def f(x):\n    return {UNKNOWN}\n", {2}),
        ("a = dict(\n    b=1 c=dict(d=2),\n)\n", f"a = dict(\n    b={UNKNOWN}, c={UNKNOWN},\n)\n", {2}),
        ("a = {\n    1, 'c': 2,\n}\n", f"a = {{\n    'c': {UNKNOWN},\n}}\n", {2}),
        ("a = [\n    1 1, 2,\n    3,\n]\n", f"a = [\n    {UNKNOWN}, {UNKNOWN}, \n    3,\n]\n", {2}),
        ("a = [1,, 2]\n", f"a = [1,{UNKNOWN}, 2]\n", {1}),
        ("a = f(1,, b=2)\n", "a = f(1,  b=2)\n", {1}),
        ("a = dict(b=1  # why, so\n", "a = dict(b=1)  # why, so\n", {1}),
        (
            "a = dict(\n    b=dict(c=1,  # why\n    d=2,\n)\n",
            "a = dict(\n    b=dict(c=1,),  # why\n    d=2,\n)\n",
            {2},
        ),
        ("a = dict(\n    b=dict(\n        c=[1,\n)\n", "a = dict(\n    b=dict(\n        c=[1,])\n)\n", {3}),
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


@pytest.mark.parametrize(
    "line", ["a[" + " " * 30_000 + "b", "a" + "[b " * 10_000, "a." + "b" * 30_000, "a" + " " * 30_000]
)
def test_a_long_line_takes_no_longer_than_its_length(line: str) -> None:
    began = time.process_time()
    recovered(f"{line}\nx = (\n", "cfg.py")
    assert time.process_time() - began < 2, "it took 20 s"


def test_an_else_of_a_broken_if_is_no_second_mistake() -> None:
    made = recovered("if x:\n    a = 1 1\nelif y:\n    b = 2\nelse:\n    a = 3\n", "cfg.py")
    assert [item.location.line for item in made.findings] == [2]
    assert made.text == f"if x:\n    a = {UNKNOWN}\nb = {UNKNOWN}\n\na = {UNKNOWN}\n\n"
    assert recovered("if x ==\n    a = 1\n", "cfg.py").text == f"a = {UNKNOWN}\n\n"
    assert [item.location.line for item in recovered("else:\n    a = 1\n", "cfg.py").findings] == [1]


def test_each_broken_statement_says_where_it_breaks() -> None:
    made = recovered("a = 1\nb = dict(\n    c=3\nd = (\n", "cfg.py")
    assert [(item.location.line, item.location.column) for item in made.findings] == [(2, 9), (4, 5)]
    assert all("was never closed" in item.message for item in made.findings)


MODEL = "model = dict(type='GPT', num_layers=8, hidden_size=64, num_heads=8, vocab_size=256, max_seq_len=64)\n"
TENSOR = "tensor=dict(size=8, mode='1d')"


@pytest.mark.parametrize(
    "broken",
    [
        f"from .common import {{}}, parallel, \n{MODEL}",
        f"from .common import {{}} parallel\n{MODEL}",
        f"parallel = dict(\n    schedule='1f1b' {TENSOR},\n)\n{MODEL}",
        f"parallel = dict(\n    schedule '1f1b', {TENSOR},\n)\n{MODEL}",
        f"parallel = dict(\n    pipeline=dict(size=1,\n    {TENSOR},\n)\n{MODEL}",
        f"if True:\n    {TENSOR} x\nparallel = dict(tensor=tensor)\n{MODEL}",
        f"size, mode = 8, '1d' x\nparallel = dict(tensor=dict(size=size, mode=mode))\n{MODEL}",
        f"parallel = dict(tensor=dict(size=1, mode='1d'))\nparallel['tensor']['size'] = 8 8\n{MODEL}",
    ],
)
def test_a_value_that_does_not_parse_is_no_default(tmp_path: Path, broken: str) -> None:
    """Eight data ranks, as without tensor parallelism, would be an error of `batch`."""
    (tmp_path / "common.py").write_text(f"x = 1\nparallel = dict({TENSOR})\n")
    path = str(tmp_path / "cfg.py")
    text = broken.replace("{}", "x") + "batch = dict(global_size=4, micro_size=1)\n"
    made = recovered(text, path)
    assert made.findings
    found = check(load_text(made.text, path), 8, errors_only=True).findings
    assert not [item for item in found if item.location.line not in made.broken and UNKNOWN not in item.message]
