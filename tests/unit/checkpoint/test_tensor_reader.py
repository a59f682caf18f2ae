"""Tensor reader: assembles pieces of one layout from those of another."""

from __future__ import annotations

import json
import os
import resource
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dslpar.checkpoint import folder, tensor_reader
from dslpar.checkpoint.index import INDEX, Entry, Index, file_key, load_index, merge, tensor_path
from dslpar.checkpoint.slices import Piece, box_of, full_box, num_elements
from dslpar.checkpoint.tensor_file import DTYPES, open_file, write_tensors
from dslpar.checkpoint.tensor_reader import TensorReader
from tests.unit.checkpoint.test_slices import Two, coords, cut, stored, two
from tests.unit.checkpoint.test_tensor_file import bits, refused


def save(root: Path, at: Two, pieces: list[Piece]) -> TensorReader:
    """Save each owner's shards of a weight and of a state that is its negative, one file per shard."""
    (root / folder.TENSORS).mkdir()
    by_box = {box_of(at.source, coord): cut(at.source, at.whole, coord) for coord in coords(at.source.tensor)}
    ranks = []
    for file, piece in enumerate(pieces):
        flat = by_box[piece.box].reshape(-1)[piece.start : piece.stop]
        write_tensors(tensor_path(root, file), {"w": flat, file_key("w", "m"): -flat.double()})
        entry = Entry(shape=tuple(at.whole.shape), dtype="I32", states={"m": "F64"}, pieces=[piece._replace(file=file)])
        ranks.append(Index({"w": entry}))
    (root / INDEX).write_text(json.dumps(merge(ranks).to_json()))
    return TensorReader(root, load_index(root), max_open=2)


@settings(max_examples=40, deadline=None)
@given(two(), st.data())
def test_any_fragment_of_any_layout_is_what_the_placement_cuts(drawn: Two, data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as made:
        reader = save(Path(made), drawn, data.draw(stored(drawn.source)))
        assert torch.equal(reader.full("w"), drawn.whole)
        assert reader.index.incomplete() == []
        for coord in coords(drawn.target.tensor):
            box, piece = box_of(drawn.target, coord), cut(drawn.target, drawn.whole, coord)
            assert torch.equal(reader.local("w", "", box), piece)
            start = data.draw(st.integers(0, num_elements(box)))
            stop = data.draw(st.integers(start, num_elements(box)))
            flat = piece.reshape(-1)[start:stop]
            assert torch.equal(reader.fragment("w", "", box, start, stop), flat)
            assert torch.equal(reader.fragment("w", "m", box, start, stop), -flat.double())


def put(root: Path, *ranks: dict[str, torch.Tensor]) -> None:
    (root / folder.TENSORS).mkdir()
    for file, tensors in enumerate(ranks):
        write_tensors(tensor_path(root, file), tensors)


@pytest.mark.parametrize("dtype", [name for name in DTYPES if name != "BOOL"])
def test_every_dtype_is_put_together(tmp_path: Path, dtype: str) -> None:
    whole, box = torch.arange(12).to(DTYPES[dtype]), full_box((3, 4))
    put(tmp_path, {"w": whole[:5]}, {"w": whole[5:]})
    pieces = [Piece(0, box, 0, 5), Piece(1, box, 5, 12)]
    reader = TensorReader(tmp_path, Index({"w": Entry(shape=(3, 4), dtype=dtype, pieces=pieces)}))
    assert bits(reader.fragment("w", "", box, 2, 9)) == bits(whole[2:9])
    column = ((box[0][0],), (box[1][0]._replace(start=1, length=1),))
    assert bits(reader.local("w", "", column)) == bits(torch.tensor([1, 5, 9]).to(DTYPES[dtype]))


def test_one_stored_fragment_is_read_without_a_copy(tmp_path: Path) -> None:
    """64 MiB are stored, and the process grows only by what is touched."""
    box = full_box((1 << 24,))
    put(tmp_path, {"w": torch.zeros(1 << 24)})
    reader = TensorReader(
        tmp_path, Index({"w": Entry(shape=(1 << 24,), dtype="F32", pieces=[Piece(0, box, 0, 1 << 24)])})
    )
    views = [reader.fragment("w", "", box, start, 1 << 24) for start in (0, 4)]
    assert views[0].data_ptr() + 16 == views[1].data_ptr()


def test_a_tensor_in_many_files_opens_each_of_them_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with 300 data ranks under ZeRO 3 and another partition: with few open files, each tensor would reopen all."""
    opened: list[Path] = []
    monkeypatch.setattr(tensor_reader, "open_file", lambda path: opened.append(path) or open_file(path))
    monkeypatch.setattr(os, "fsync", lambda file: None)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(512, hard), hard))
    box, half = full_box((300, 2)), full_box((300, 1))
    put(tmp_path, *({"v": torch.ones(2), "w": torch.full((2,), float(at))} for at in range(300)))
    pieces = [Piece(at, box, 2 * at, 2 * at + 2) for at in range(300)]
    entry = Entry(shape=(300, 2), dtype="F32", pieces=pieces)
    try:
        reader = TensorReader(tmp_path, Index({"v": entry, "w": entry}))
        assert reader.local("v", "", half).sum() == 300
        assert reader.local("w", "", half)[:, 0].tolist() == list(range(300))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert len(opened) == 300


def test_what_padding_holds_is_zero_on_another_layout(tmp_path: Path) -> None:
    """The checkpoint has 4 rows, one of them padding, and 6 are requested."""
    put(tmp_path, {"w": torch.arange(1.0, 5.0)})
    stored_box, requested = full_box((4,)), full_box((6,))
    reader = TensorReader(tmp_path, Index({"w": Entry(shape=(3,), dtype="F32", pieces=[Piece(0, stored_box, 0, 4)])}))
    assert reader.local("w", "", requested).tolist() == [1, 2, 3, 0, 0, 0]
    assert reader.local("w", "", stored_box).tolist() == [1, 2, 3, 4], "on the same layout, to the bit"


def test_a_file_that_holds_another_length_or_dtype_than_the_index_is_a_finding(tmp_path: Path) -> None:
    put(tmp_path, {"w": torch.zeros(3)}, {"w": torch.zeros(3).double()})
    for file, length in ((0, 4), (1, 3)):
        box = full_box((length,))
        index = Index({"w": Entry(shape=(length,), dtype="F32", pieces=[Piece(file, box, 0, length)])})
        message = refused(lambda: TensorReader(tmp_path, index).full("w"), tensor_path(tmp_path, file))  # noqa: B023
        assert "but the index says" in message
