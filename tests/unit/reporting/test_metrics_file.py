"""metrics.jsonl as found on disk: the end of a long file, damaged lines, repeated steps."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dslpar.reporting import metrics_file
from dslpar.reporting.metrics_file import MetricsError, number, read_records, read_tail


def write(path: Path, *lines: object, end: str = "") -> Path:
    path.write_text("".join(each if isinstance(each, str) else json.dumps(each) + "\n" for each in lines) + end)
    return path


def test_the_tail_of_a_long_file_has_its_last_records_and_its_last_evaluation(tmp_path: Path) -> None:
    records: list[dict[str, Any]] = [{"step": step, "loss": 1 / step, "note": "x" * 100} for step in range(1, 5000)]
    records[99]["eval_loss"] = 0.5
    tail = read_tail(write(tmp_path / "metrics.jsonl", *records))
    assert tail.last == records[-1]
    assert tail.evaluated["step"] == 100
    assert tail.records == records[-len(tail.records) :]
    assert 100 < len(tail.records) < 1000, "not the whole file"
    assert tail.problems == []


def test_what_is_no_record_is_told_and_passed_over(tmp_path: Path) -> None:
    broken = ['{"step": 5, "lo\n', "\x00\x00\n", "[3]\n", '{"loss": 1.0}\n', '{"step": true}\n', '{"step": -1}\n']
    path = write(tmp_path / "m", {"step": 1}, *broken, {"step": 2}, end='{"step": 3, "loss"')
    tail = read_tail(path)
    assert [record["step"] for record in tail.records] == [1, 2]
    assert tail.problems == ["6 lines are not records", "the last line is cut off"]
    assert read_records(path) == ([{"step": 1}, {"step": 2}], tail.problems)


def test_one_line_longer_than_what_is_read_is_told(tmp_path: Path) -> None:
    assert read_tail(write(tmp_path / "m", end="x" * 200_000)).records == []
    assert read_tail(write(tmp_path / "m", "[" * 100_000 + "\n")).problems == []  # begins before what is read
    assert read_records(tmp_path / "m")[1] == ["1 line is not a record"]


@pytest.mark.parametrize("kind", ["missing", "folder", "pipe"])
def test_what_is_no_file_is_an_error_and_never_waited_for(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "metrics.jsonl"
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    for read in (read_tail, read_records):
        with pytest.raises(MetricsError, match="No such file" if kind == "missing" else "no file"):
            read(path)


def test_a_step_that_comes_again_replaces_what_stood_behind_it(tmp_path: Path) -> None:
    """--resume truncates the file so; if somebody resumed otherwise, the later part is the run."""
    lines = [{"step": step, "leg": 1} for step in (1, 2, 3, 4)] + [{"step": step, "leg": 2} for step in (3, 4, 5)]
    records, problems = read_records(write(tmp_path / "m", *lines))
    assert [(record["step"], record["leg"]) for record in records] == [(1, 1), (2, 1), (3, 2), (4, 2), (5, 2)]
    assert problems == ["2 steps are repeated; the later ones count"]


@given(st.lists(st.integers(0, 30), max_size=40))
def test_steps_ascend_and_the_last_line_always_counts(steps: list[int]) -> None:
    records, _ = metrics_file._parse(b"".join(b'{"step": %d}\n' % step for step in steps))
    assert [record["step"] for record in records] == steps
    kept = metrics_file.ascending(records)
    assert [record["step"] for record in kept] == sorted({record["step"] for record in kept})
    assert [record["step"] for record in kept][-1:] == steps[-1:]
    assert all(kept.count(record) == 1 for record in kept)


@pytest.mark.parametrize("value", [None, "1", True, float("nan"), float("inf"), 10**400, [1]])
def test_only_finite_numbers_are_numbers(value: object) -> None:
    assert number({"step": 1, "loss": value}, "loss") is None
    assert number({"step": 1, "loss": 2}, "loss") == 2.0
