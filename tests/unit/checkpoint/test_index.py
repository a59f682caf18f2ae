"""The checkpoint index: JSON, merging over ranks, and refusal of invalid ones."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from dslpar.checkpoint.index import INDEX, Entry, Index, IrregularState, load_index, merge
from dslpar.checkpoint.slices import Piece, full_box
from tests.unit.checkpoint.test_tensor_file import refused


def test_an_index_is_the_same_after_json() -> None:
    box = full_box((2, 3))
    entry = Entry(
        shape=(2, 3),
        dtype="F32",
        states={"m": "BF16"},
        scalars={"step": ["F32", 5.0], "k": 2},
        irregular={"row": IrregularState("F32", (2,))},
        irregular_file=1,
        group=0,
        pieces=[Piece(0, box, 0, 4), Piece(1, box, 4, 6)],
    )
    index = Index({"w": entry}, {"w@1": Entry(shape=(), dtype="F32", pieces=[Piece(1, (), 0, 1)])}, [{"lr": 0.1}])
    assert Index.from_json(json.loads(json.dumps(index.to_json()))) == index
    assert index.entry("w@1").shape == ()
    assert index.incomplete() == []


def test_merging_joins_pieces_and_equal_groups() -> None:
    box = full_box((4,))
    ranks = [
        Index(
            {"w": Entry(shape=(4,), dtype="F32", group=at % 2, pieces=[Piece(at, box, at, at + 1)])},
            groups=[{"lr": 0.1}, {"lr": 0.2}] if at % 2 else [{"lr": 0.2}, {"lr": 0.1}],
        )
        for at in range(4)
    ]
    merged = merge(ranks)
    assert merged.groups == [{"lr": 0.2}, {"lr": 0.1}]
    assert merged.parameters["w"].group == 0
    assert merged.incomplete() == []
    assert merge(ranks[:3]).incomplete() == ["w"]
    assert [piece.file for piece in merged.parameters["w"].pieces] == [0, 1, 2, 3]


def test_merging_keeps_what_one_rank_alone_has() -> None:
    """A rank that only replicates a parameter has no states of it. The ranks come in any order."""
    none = Entry(shape=(4,), dtype="F32")
    some = Entry(
        shape=(4,),
        dtype="F32",
        states={"m": "F32"},
        scalars={"step": 3},
        irregular={"row": IrregularState("F32", (2,))},
        irregular_file=1,
        group=0,
    )
    for ranks in ((none, some), (some, none)):
        merged = merge([Index({"w": each}, groups=[] if each is none else [{"lr": 0.1}]) for each in ranks])
        assert merged.parameters["w"] == replace(some, pieces=[])


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"parameters": {"w": {}}, "copies": {}, "groups": []}', None])
def test_what_is_no_index_is_a_finding(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / INDEX).write_text(text)
    refused(lambda: load_index(tmp_path), tmp_path / INDEX)


def test_any_cut_of_an_index_short_is_a_finding(tmp_path: Path) -> None:
    plain = Index({"w": Entry(shape=(3,), dtype="F32", pieces=[Piece(0, full_box((3,)), 0, 3)])}).to_json()
    text = json.dumps(plain)
    for length in range(len(text)):
        (tmp_path / INDEX).write_text(text[:length])
        refused(lambda: load_index(tmp_path), tmp_path / INDEX)
