"""Tensor files: writing, memory-mapping, and refusal of malformed ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import xxhash
from safetensors.torch import load_file, save_file

from dslpar.checkpoint import folder
from dslpar.checkpoint.tensor_file import dtype_name, open_file, write_tensors
from dslpar.core.errors import DslparError
from tests.support.data_types import LENGTHS, one_each


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
    """It is a terabyte, of which the disk holds only the header."""
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
    "not valid JSON": (2).to_bytes(8, "little") + b"{]",
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
