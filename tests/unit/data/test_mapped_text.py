"""Memory-mapped text: the samples of one array of all bytes, in no more memory than samples need."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import psutil
import pytest

from dslpar.core.errors import DslparError
from dslpar.data import mapped_text, tokens
from dslpar.data.corpus import FileSlice, read
from dslpar.data.mapped_text import MappedText
from dslpar.data.source import Part, find_source, make_samples
from dslpar.data.text import TextSamples
from tests.unit.data.test_corpus import job

LENGTHS = (0, 7, 1, 0, 50, 33, 2, 0)
"""File lengths: some are empty, some shorter than a window."""


def slices_of(folder: Path) -> list[FileSlice]:
    """Return whole files and pieces of them, with random bytes."""
    found = []
    for number, length in enumerate(LENGTHS):
        path, begin = folder / f"{number}.txt", 3 * (number % 2) if length else 0
        path.write_bytes(np.random.default_rng(number).bytes(begin + length + number if length else 0))
        found.append(FileSlice(str(path), begin, begin + length))
    return found


@pytest.mark.parametrize("num_mapped", [1, 2, 64])
def test_windows_are_those_of_all_bytes_in_a_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_mapped: int
) -> None:
    monkeypatch.setattr(mapped_text, "NUM_MAPPED", num_mapped)
    slices = slices_of(tmp_path)
    mapped, whole = MappedText(job(tmp_path), slices), np.frombuffer(read(slices), np.uint8)
    assert len(mapped) == len(whole) == sum(LENGTHS)
    for length in (1, 9, 60, len(whole)):
        starts = range(len(whole) - length + 1)
        found = mapped.windows(starts, length)
        assert found.dtype == np.int64
        assert np.array_equal(found, tokens.windows(whole, starts, length))


def test_no_bytes_are_no_samples(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    for slices in ([], [FileSlice(str(tmp_path / "empty.txt"), 0, 0)]):
        assert len(MappedText(job(tmp_path), slices)) == 0
        assert TextSamples(MappedText(job(tmp_path), slices), 4).num_samples <= 0


def test_a_run_s_samples_are_those_of_text_in_memory(tmp_path: Path) -> None:
    slices_of(tmp_path)
    made = job(tmp_path, files=(".",), eval_fraction=0.5)
    source = find_source(made)
    for part in (source.train, source.held_out):
        samples, expected = make_samples(made, part, ()), TextSamples(read(part.files), 16)
        assert samples.num_samples == expected.num_samples > 0
        every = range(samples.num_samples)
        for own, other in zip(samples.batch(every, every), expected.batch(every), strict=True):
            assert own.equal(other)


GIB = 1 << 30


def test_a_large_file_takes_no_memory(tmp_path: Path) -> None:
    """The file is a hole of 3 GiB, which takes no disk space; reading it would take memory."""
    path = tmp_path / "large.txt"
    with open(path, "wb") as file:
        file.truncate(3 * GIB)
        file.seek(2 * GIB)
        file.write(b"here is some text")
    process = psutil.Process()
    before = process.memory_info().rss
    samples = make_samples(job(tmp_path, files=("large.txt",)), Part(True, [FileSlice(str(path), 0, 3 * GIB)]), ())
    ids, labels = samples.batch([0, 2 * GIB // 16, samples.num_samples - 1], [0, 1, 2])
    assert process.memory_info().rss - before < GIB // 10
    assert bytes(ids[1].tolist()) == b"here is some tex"
    assert bytes(labels[1].tolist()) == b"ere is some text"


@pytest.mark.parametrize(("length", "said"), [(20, "mmap length is greater than file size"), (None, "No such file")])
def test_a_file_that_is_not_as_it_was_is_said(tmp_path: Path, length: int | None, said: str) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"x" * 161)
    made = job(tmp_path, files=("a.txt",), eval_fraction=0.0)
    samples = make_samples(made, find_source(made).train, ())
    path.write_bytes(b"x" * (length or 0))
    if length is None:
        path.unlink()
    with pytest.raises(DslparError) as caught:
        samples.batch([0], [0])
    (finding,) = caught.value.findings
    assert (finding.code, finding.key) == ("BAT201", "data")
    assert finding.message.startswith(f"{str(path)!r} has changed since the run began: ")
    assert said in finding.message
