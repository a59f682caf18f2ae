"""Lint of text files: missing files, and vocabularies far larger than the 256 bytes."""

from __future__ import annotations

from pathlib import Path

import pytest

from dslpar.linter.check import lint
from tests.support.lint import MODEL, codes


@pytest.mark.parametrize(
    ("files", "missing"),
    [
        ("['here.txt', 'folder']", []),
        ("['here.txt', 'gone.txt', 'folder/gone.txt']", ["gone.txt", "folder/gone.txt"]),
        ("['dangling.txt']", ["dangling.txt"]),
        ("['/no/such/disk/text.txt']", []),  # of the job's hosts, maybe
        ("['no_such_folder/text.txt']", []),
    ],
)
def test_missing_files_are_reported_where_they_would_be(tmp_path: Path, files: str, missing: list[str]) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "here.txt").write_text("text")
    (tmp_path / "dangling.txt").symlink_to(tmp_path / "nothing")
    config = tmp_path / "cfg.py"
    config.write_text(f"{MODEL}data = dict(files={files})\n")
    found = [finding for finding in lint(str(config), 1) if finding.code == "BAT111"]
    assert [each.message for each in found] == [f"no such file or folder {str(tmp_path / name)!r}" for name in missing]
    assert {finding.severity for finding in found} <= {"warning"}
    assert all(config.read_text().splitlines()[1][finding.location.column - 1] == "'" for finding in found)


@pytest.mark.parametrize(
    ("vocabulary", "data", "expected"),
    [
        (50257, "data = dict(seq_len=64)\n", ["DEAD119"]),
        (50257, "", []),  # a program may bring its own data
        (512, "data = dict(seq_len=64)\n", []),
        (513, "data = dict(seq_len=64)\n", ["DEAD119"]),
    ],
)
def test_a_vocabulary_beyond_bytes(vocabulary: int, data: str, expected: list[str]) -> None:
    assert codes(MODEL.replace("vocab_size=256", f"vocab_size={vocabulary}") + data) == expected
