"""Tensor files, and the reader that puts pieces of one layout together for another."""

from __future__ import annotations

import json
import os
import resource
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from dslpar.checkpoint import folder, tensor_file
from dslpar.checkpoint.index import INDEX, Entry, Index, IrregularState, file_key, load_index, merge, tensor_path
from dslpar.checkpoint.slices import Piece, box_of, full_box, num_elements
from dslpar.checkpoint.tensor_file import DTYPES, TensorReader, dtype_name, open_file, write_tensors
from dslpar.core.errors import DslparError
from tests.unit.checkpoint.test_slices import Two, coords, cut, stored, two

LENGTHS = {"F32": 5, "BF16": 3, "F64": 2, "BOOL": 7, "F8_E4M3": 1, "U8": 0, "I64": 4, "F16": 6}


def one_each() -> dict[str, torch.Tensor]:
    """Of many dtypes, small odd lengths, one of them empty."""
    return {name: torch.arange(length).to(DTYPES[name]) for name, length in LENGTHS.items()}


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().view(-1).view(torch.uint8).numpy())


# ---- one file ----


def test_the_safetensors_library_reads_what_was_written(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    tensors = one_each() | {"matrix": torch.randn(4, 6)[:, ::2], "none": torch.tensor(3.0)}
    written = write_tensors(path, tensors, {"rank": "3"})
    assert written == (path.stat().st_size, xxhash.xxh3_128_hexdigest(path.read_bytes()))
    read = load_file(path)
    assert read.keys() == tensors.keys()
    assert all(bits(read[key]) == bits(tensor) for key, tensor in tensors.items())
    assert all(read[key].dtype == tensor.dtype and read[key].dim() == 1 for key, tensor in tensors.items())


def test_what_the_safetensors_library_wrote_is_read(tmp_path: Path) -> None:
    save_file(one_each(), tmp_path / "a.safetensors", {"rank": "3"})
    opened = open_file(tmp_path / "a.safetensors")
    keys = list(opened.spans)
    assert opened.metadata == {"rank": "3"}
    assert {key: bits(opened.get(key)) for key in keys} == {key: bits(tensor) for key, tensor in one_each().items()}
    assert {key: opened.span(key).numel for key in keys} == LENGTHS
    assert [dtype_name(opened.span(key).dtype) for key in keys] == keys


def test_views_never_reach_the_file(tmp_path: Path) -> None:
    written = write_tensors(tmp_path / "a.safetensors", one_each())
    open_file(tmp_path / "a.safetensors").get("F32").fill_(9.0)
    assert folder.file_digest(tmp_path / "a.safetensors") == written.xxh3_128


def test_a_file_larger_than_memory_is_opened(tmp_path: Path) -> None:
    """A terabyte, of which the disk holds nothing but the header."""
    length = 1 << 40
    with (tmp_path / "a.safetensors").open("wb") as opened:
        opened.write(header_of({"a": {"dtype": "U8", "shape": [length], "data_offsets": [0, length]}}))
        opened.truncate(opened.tell() + length)
    assert open_file(tmp_path / "a.safetensors").get("a", length - 2, length).tolist() == [0, 0]


def test_large_tensors_are_written_in_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dslpar.checkpoint.tensor_file._CHUNK_BYTES", 16)
    tensor = torch.arange(100)
    written = write_tensors(tmp_path / "a.safetensors", {"a": tensor, "b": tensor[:1]})
    assert folder.file_digest(tmp_path / "a.safetensors") == written.xxh3_128
    assert torch.equal(load_file(tmp_path / "a.safetensors")["a"], tensor)


def header_of(plain: object) -> bytes:
    text = json.dumps(plain).encode()
    return len(text).to_bytes(8, "little") + text


F32 = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
BROKEN = {
    "empty": b"",
    "short": b"\x01\x00",
    "a header longer than the file": (1 << 60).to_bytes(8, "little") + b"{}",
    "no JSON": (2).to_bytes(8, "little") + b"{]",
    "no mapping": header_of([1]),
    "an unknown dtype": header_of({"a": F32 | {"dtype": "F31"}}) + b"1234",
    "no offsets": header_of({"a": {"dtype": "F32", "shape": [1]}}) + b"1234",
    "offsets of another length": header_of({"a": F32 | {"shape": [2]}}) + b"1234",
    "cut short": header_of({"a": F32}) + b"123",
    "too long": header_of({"a": F32}) + b"12345",
    "a gap": header_of({"a": F32, "b": F32 | {"data_offsets": [8, 12]}}) + b"123456789012",
    "an overlap": header_of({"a": F32, "b": F32}) + b"1234",
    "a word for a number": header_of({"a": F32 | {"shape": ["1"]}}) + b"1234",
    "no text": (2).to_bytes(8, "little") + b"\xff\xfe",
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_malformed_file_is_a_finding(tmp_path: Path, name: str) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(BROKEN[name])
    refused(lambda: open_file(path), path)


def refused(act: Callable[[], object], path: Path) -> str:
    with pytest.raises(DslparError) as caught:
        act()
    (finding,) = caught.value.findings
    assert finding.code == "CKP216"
    assert str(path) in finding.message
    assert finding.help
    return finding.message


def test_a_missing_file_or_key_is_a_finding(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    refused(lambda: open_file(path), path)
    write_tensors(path, one_each())
    assert "it holds no 'F31'" in refused(lambda: open_file(path).get("F31"), path)
    assert "5 elements" in refused(lambda: open_file(path).get("F32", 2, 6), path)


# ---- of any layout ----


def save(root: Path, at: Two, pieces: list[Piece]) -> TensorReader:
    """Each owner's shards, of a weight and of a state that is its negative; one file a shard."""
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
    """Of 64 MiB that are stored, the process grows by what is touched."""
    box = full_box((1 << 24,))
    put(tmp_path, {"w": torch.zeros(1 << 24)})
    reader = TensorReader(
        tmp_path, Index({"w": Entry(shape=(1 << 24,), dtype="F32", pieces=[Piece(0, box, 0, 1 << 24)])})
    )
    views = [reader.fragment("w", "", box, start, 1 << 24) for start in (0, 4)]
    assert views[0].data_ptr() + 16 == views[1].data_ptr()


def test_a_tensor_in_many_files_opens_each_of_them_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of 300 data ranks with ZeRO 3, cut otherwise: with few of them open, each tensor would open all anew."""
    opened: list[Path] = []
    monkeypatch.setattr(tensor_file, "open_file", lambda path: opened.append(path) or open_file(path))
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
    """Checkpoint with 4 rows, of which one is padding; requested for with 6."""
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
        assert "by the index" in message


# ---- the index ----


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
