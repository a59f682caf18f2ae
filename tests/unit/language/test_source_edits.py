"""Edits that set a key or leave it out: the smallest change, in the author's form."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dslpar.language.load import load_text
from dslpar.language.source_edits import leave_out, set_key
from dslpar.linter.fixes import apply
from tests.support.paths import ROOT

CONFIGS = [path.read_text() for path in sorted((ROOT / "configs").glob("gpt*.py"))]


def edited(text: str, key: str, value: str | None) -> str | None:
    config = load_text(text, "cfg.py")
    fix = leave_out(config, text, key) if value is None else set_key(config, text, key, value)
    return None if fix is None else apply(text, [fix])


@pytest.mark.parametrize(
    ("text", "key", "value", "expected"),
    [
        ("a = dict(b=1, c=2)\n", "a.b", "3", "a = dict(b=3, c=2)\n"),
        ("a = dict(b=1)\n", "a.c", "3", "a = dict(b=1, c=3)\n"),
        ("a = dict(b=1,)\n", "a.c", "3", "a = dict(b=1, c=3,)\n"),
        ("a = dict()\n", "a.c", "3", "a = dict(c=3)\n"),
        ("a = dict(\n    b=1,\n    d=2,\n)\n", "a.c", "3", "a = dict(\n    b=1,\n    d=2,\n    c=3,\n)\n"),
        ("a = {'b': 1}\n", "a.c", "3", "a = {'b': 1, 'c': 3}\n"),
        ("a = dict(b=dict(c=1))\n", "a.b.d.e", "3", "a = dict(b=dict(c=1, d=dict(e=3)))\n"),
        ("a = 1\n", "zero.stage", "2", "a = 1\nzero = dict(stage=2)\n"),
        ("a = 1", "b", "2", "a = 1\nb = 2\n"),
        ("a = dict(b=[1, 2])\n", "a.b", "[3]", "a = dict(b=[3])\n"),
        ("n = 2\na = dict(b=2 * n)\n", "a.b", "3", None),
        ("é = 'ü'; a = dict(b='ö', c=1)\n", "a.c", "3", "é = 'ü'; a = dict(b='ö', c=3)\n"),
        ("n = 2\na = dict(b=n)\nc = dict(d=n)\n", "a.b", "3", None),
        ("n = dict(c=2)\na = dict(b=n)\n", "a.b.c", "3", None),
        ("n = dict(c=2)\na = dict(b=n)\n", "a.b.d", "3", None),
        ("n = dict(c=2)\na = dict(b=n)\n", "a.b.c", None, None),
        ("a: dict = {'b': 1}\n", "a", "dict(b=2)", "a: dict = dict(b=2)\n"),
        ("a = dict(\n    b=1,  # why\n)\n", "a.c", "3", "a = dict(\n    b=1,  # why\n    c=3,\n)\n"),
        ("a = dict(\n    b=1  # why\n)\n", "a.c", "3", "a = dict(\n    b=1,  # why\n    c=3\n)\n"),
        (
            "a = dict(\n    b=1,  # why\n    # of c\n    c=2,  # and\n)\n",
            "a.b",
            None,
            "a = dict(\n    # of c\n    c=2,  # and\n)\n",
        ),
        (
            "a = dict(\n    b=1,  # why\n    # of c\n    c=2,  # and\n)\n",
            "a.c",
            None,
            "a = dict(\n    b=1,  # why\n    # of c\n)\n",
        ),
        ("x = 1; a = dict(b=1); y = 2\n", "a", None, None),
        ("a = dict(b=1, c=2)\n", "a.b", None, "a = dict(c=2)\n"),
        ("a = dict(b=1, c=2)\n", "a.c", None, "a = dict(b=1)\n"),
        ("a = dict(b=1)\n", "a.b", None, "a = dict()\n"),
        ("a = dict(\n    b=1,\n    c=2,\n)\nd = 1\n", "a.b", None, "a = dict(\n    c=2,\n)\nd = 1\n"),
        ("a = {'b': 1, 'c': 2}\n", "a.c", None, "a = {'b': 1}\n"),
        ("a = dict(b=1)\nc = 2\n", "a", None, "c = 2\n"),
        ("a = dict(b=1)\na.c = 2\n", "a.c", None, None),
    ],
)
def test_the_smallest_change(text: str, key: str, value: str | None, expected: str | None) -> None:
    assert edited(text, key, value) == expected


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_an_edit_changes_one_key_of_a_shipped_config(data: st.DataObject) -> None:
    text = data.draw(st.sampled_from(CONFIGS))
    before = load_text(text, "cfg.py").root.plain()
    keys = [f"{section}.{name}" for section, value in before.items() if isinstance(value, dict) for name in value]
    key = data.draw(st.sampled_from(keys))
    section, _, name = key.partition(".")
    value = data.draw(st.sampled_from([7, None]))
    changed = edited(text, key, None if value is None else str(value))
    if changed is None:
        return
    expected = {**before, section: {each: old for each, old in before[section].items() if each != name}}
    if value is not None:
        expected[section] = {**before[section], name: value}
    assert load_text(changed, "cfg.py").root.plain() == expected


def test_a_section_in_short_form_becomes_a_dict() -> None:
    text = "zero = 2\npipeline = 3\n"
    config = load_text(text, "cfg.py")
    short = {"zero": "stage", "pipeline": "size"}
    for key, value, old, new in [
        ("zero.stage", "1", "zero = 2", "zero = 1"),
        ("zero.offload_optimizer", "'cpu'", "zero = 2", "zero = dict(stage=2, offload_optimizer='cpu')"),
        ("pipeline.schedule", "'gpipe'", "pipeline = 3", "pipeline = dict(size=3, schedule='gpipe')"),
    ]:
        edit = set_key(config, text, key, value, short)
        assert edit is not None
        assert apply(text, [edit]) == text.replace(old, new)


@pytest.mark.parametrize(("index", "after"), [(0, "[2, 3]"), (1, "[1, 3]"), (2, "[1, 2]")])
def test_an_element_of_a_list_is_left_out(index: int, after: str) -> None:
    text = "hooks = [1, 2, 3]\n"
    edit = leave_out(load_text(text, "cfg.py"), text, f"hooks.{index}")
    assert edit is not None
    assert apply(text, [edit]) == f"hooks = {after}\n"
