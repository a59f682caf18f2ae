"""Overrides: every form, and every mistake at its location."""

from __future__ import annotations

import ast
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dslpar.core.errors import COMMAND_LINE
from dslpar.language.load import load_text

TEXT = """\
parallel = dict(pipeline=2, tensor=dict(size=4, mode='1d'), data=None)
optimizer = dict(type='AdamW', betas=(0.9, 0.95))
items = [1, [2, 3], dict(a=4)]
zero = 0
numbers = {0: 'a', 1: 'b'}
"""
SHORTHANDS = {"parallel.pipeline": "size", "parallel.data": "size", "zero": "stage"}


def plain(*overrides: str) -> dict[str, Any]:
    config = load_text(TEXT, "cfg.py", overrides, SHORTHANDS)
    assert not config.findings, config.findings
    found: dict[str, Any] = config.root.plain()
    return found


GOOD: dict[str, tuple[str, str, Any]] = {
    "an int": ("parallel.pipeline=4", "parallel.pipeline", 4),
    "a float": ("optimizer.lr=1e-4", "optimizer.lr", 1e-4),
    "negative": ("optimizer.lr=-3", "optimizer.lr", -3),
    "a bare string": ("parallel.tensor.mode=2.5d", "parallel.tensor.mode", "2.5d"),
    "a quoted string": ("parallel.tensor.mode='3d'", "parallel.tensor.mode", "3d"),
    "a number in quotes": ("x='3'", "x", "3"),
    "none": ("parallel.tensor=None", "parallel.tensor", None),
    "true": ("x=True", "x", True),
    "true of other languages": ("x=true", "x", "true"),
    "a list": ("x=[0, 0, 1]", "x", [0, 0, 1]),
    "a tuple": ("x=(1, 2)", "x", (1, 2)),
    "a dict": ("x={'a': [1]}", "x", {"a": [1]}),
    "an expression is text": ("x=2*3", "x", "2*3"),
    "a call is text": ("x=open('a')", "x", "open('a')"),
    "a path": ("x=/data/a b.txt", "x", "/data/a b.txt"),
    "an equals sign": ("x=a=b", "x", "a=b"),
    "empty": ("x=", "x", ""),
    "spaces": ("x= 4 ", "x", 4),
    "unicode": ("x=größe", "x", "größe"),
    "nothing there": ("train.dist.size=4", "train.dist.size", 4),
    "within None": ("parallel.data.size=4", "parallel.data.size", 4),
    "dotted index": ("items.0=9", "items.0", 9),
    "bracketed index": ("items[1][0]=9", "items.1.0", 9),
    "negative index": ("items[-1].a=9", "items.2.a", 9),
    "within a list": ("items.2.b.c=9", "items.2.b.c", 9),
    "within a tuple": ("optimizer.betas.1=0.99", "optimizer.betas", (0.9, 0.99)),
    "shorthand": ("parallel.pipeline.stage_ids=[0, 1]", "parallel.pipeline", {"size": 2, "stage_ids": [0, 1]}),
    "shorthand itself": ("zero.stage=1", "zero", {"stage": 1}),
    "int key": ("numbers.1=c", "numbers", {0: "a", 1: "c"}),
    "python names are text": ("x=inf", "x", "inf"),
    "bytes are text": ("x=b'a'", "x", "b'a'"),
    "sets are text": ("x={1}", "x", "{1}"),
    "newline": ("x=a\nb", "x", "a b"),
}


@pytest.mark.parametrize("case", GOOD)
def test_good(case: str) -> None:
    override, path, expected = GOOD[case]
    found: Any = plain(override)
    for part in path.split("."):
        found = found[int(part) if isinstance(found, (list, tuple)) else part]
    assert found == expected
    assert type(found) is type(expected)


def test_delete() -> None:
    found = plain("~parallel.tensor", "~items.0", "~items[0][1]", "~zero")
    assert found["parallel"] == {"pipeline": 2, "data": None}
    assert found["items"] == [[2], {"a": 4}]
    assert "zero" not in found


def test_later_ones_win() -> None:
    assert plain("x.a=1", "x.b=2", "x.a=3", "~x.b")["x"] == {"a": 3}


# Case: the overrides, the text of the only finding, the text that it marks.
BAD: dict[str, tuple[list[str], str, str]] = {
    "no equals sign": (["x=1", "nothing"], "neither", "nothing"),
    "delete with a value": (["~x=3"], "neither", "~x=3"),
    "no key": (["=3"], "not a key", ""),
    "two dots": (["a..b=3"], "not a key", "a..b"),
    "open bracket": (["a[0=3"], "not a key", "a[0"),
    "no index": (["a[x]=3"], "not a key", "a[x]"),
    "a space": (["a b=3"], "not a key", "a b"),
    "a flag": (["--x=3"], "not a key", "--x"),
    "a number first": (["0.a=3"], "not a key", "0.a"),
    "into a scalar": (["optimizer.type.x=3"], "optimizer.type is 'AdamW', not a mapping", "optimizer.type.x"),
    "past the end": (["items.7=3"], "not in a list of 3", "items.7"),
    "a name of a list": (["items.first=3"], "not in a list of 3", "items.first"),
    "delete what is not there": (["~parallel.tensr"], "did you mean 'tensor'", "~parallel.tensr"),
    "delete below nothing": (["~train.steps"], "not a mapping", "train.steps"),
    "too long": (["x=" + "a" * 200_000], "100,000", "x=" + "a" * 200_000),
}


@pytest.mark.parametrize("case", BAD)
def test_bad(case: str) -> None:
    overrides, words, marked = BAD[case]
    config = load_text(TEXT, "cfg.py", overrides, SHORTHANDS)
    (item,) = config.findings
    assert item.code == "CFG011"
    assert words in item.message
    assert item.help
    assert item.location.path == COMMAND_LINE
    line = config.sources[COMMAND_LINE]
    assert line[item.location.column - 1 : item.location.end_column - 1] == marked


def test_of_unknown_values_nothing_is_said() -> None:
    config = load_text("x = open('a')\ny = dict(z=1 / 0)", "cfg.py", ["x.a=1", "y.z.w=2", "y.v=3"])
    assert [item.code for item in config.findings] == ["CFG003", "CFG004"]
    assert config.root.plain() == {"y": {"v": 3}}


def test_shared_values_stay_shared_as_at_the_end_of_the_file() -> None:
    config = load_text("a = dict(n=1)\nb = a", "cfg.py", ["b.n=2"])
    assert config.root.plain() == {"a": {"n": 2}, "b": {"n": 2}}


@pytest.mark.parametrize("text", ["[" * 5000, "-" * 5000 + "1", "9" * 5000, "'\\ud800'", "\0"])
def test_odd_values_are_text(text: str) -> None:
    config = load_text("", "cfg.py", [f"x={text}"])
    assert len(config.findings) <= 1
    assert config.root.plain() in ({"x": text}, {})


LITERALS = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**9), 10**9)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs", "Cc"])),
    lambda inner: st.lists(inner, max_size=3) | st.tuples(inner) | st.dictionaries(st.text("abc"), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=100, derandomize=True, deadline=None)
@given(LITERALS)
def test_any_literal(value: object) -> None:
    config = load_text("", "cfg.py", [f"x={value!r}"])
    assert not config.findings
    assert repr(config.root.plain()["x"]) == repr(ast.literal_eval(repr(value)))


@settings(max_examples=100, derandomize=True, deadline=None)
@given(st.text(max_size=20))
def test_any_text_is_no_crash(text: str) -> None:
    config = load_text(TEXT, "cfg.py", [text, f"x{text}", f"x={text}", f"~{text}"], SHORTHANDS)
    assert {item.code for item in config.findings} <= {"CFG011"}
