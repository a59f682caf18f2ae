"""The place of a cursor: what may be written there, in texts that parse and in those that do not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dslpar.lsp.cursor import Place, place_at
from tests.support.paths import ROOT

CONFIGS = [path.read_text() for path in sorted((ROOT / "configs").glob("*.py"))]


def at_end(text: str) -> Place | None:
    lines = text.split("\n")
    return place_at(text, len(lines), len(lines[-1]) + 1)


@pytest.mark.parametrize(
    ("text", "kind", "dotted", "word"),
    [
        ("", "name", "", ""),
        ("par", "name", "", "par"),
        ("a = 1\n\nmo", "name", "", "mo"),
        ("train = dict(steps=3)\n", "name", "", ""),
        ("parallel = dict(", "key", "parallel", ""),
        ("model = dict(type='GPT', experts=dict(nu", "key", "model.experts", "nu"),
        ("model = dict(\n    type='GPT',\n    hid", "key", "model", "hid"),
        ("model = dict(\nhid", "key", "model", "hid"),
        ("x = {'model': {'ty", "key", "x.model", "ty"),
        ("parallel = dict(tensor=dict(mode='1", "value", "parallel.tensor.mode", "1"),
        ("parallel = dict(tensor=dict(mode='1d', size=", "value", "parallel.tensor.size", ""),
        ("zero = {'stage': ", "value", "zero.stage", ""),
        ("parallel.tensor = ", "value", "parallel.tensor", ""),
        ("parallel.tensor = dict(mo", "key", "parallel.tensor", "mo"),
        ("seed = ", "value", "seed", ""),
        ("optimizer = dict(betas=(0.9, ", "value", "optimizer.betas", ""),
        ("data = dict(files=['a.txt', 'b", "value", "data.files", "b"),
        ("from .common.models import gpt, mo", "import", "", "mo"),
        ("parallel = dict(pipeline=2)  # four sta", None, "", ""),
    ],
)
def test_what_may_be_written_at_a_cursor(text: str, kind: str | None, dotted: str, word: str) -> None:
    place = at_end(text)
    assert (place and place.kind) == kind
    if place is not None:
        assert (place.dotted, place.word) == (dotted, word)


def test_keys_before_the_cursor_are_known_and_those_of_other_sections_are_not() -> None:
    place = at_end("model = dict(type='GPT', experts=dict(num=4), hidden_size=8, ")
    assert place is not None
    assert place.given == {"type", "experts", "hidden_size"}


def test_what_stands_after_the_cursor_does_not_matter() -> None:
    text = "model = dict(hid\nparallel = dict(tensor=2)\n"
    assert place_at(text, 1, 17) == at_end("model = dict(hid")


@given(st.data())
def test_any_place_of_any_text_is_told(data: st.DataObject) -> None:
    text = data.draw(st.sampled_from(CONFIGS))
    end = data.draw(st.integers(0, len(text)))
    at_end(text[:end] + data.draw(st.sampled_from(["", "'", "(", "dict(", "= ", "{", ")]"])))
