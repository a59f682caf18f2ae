"""The status page: what a rank writes, another process reads."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from dslpar.watchdog.status_page import StatusPage, place_name


def test_a_board_is_seen_by_another_process(tmp_path: Path) -> None:
    page = StatusPage(tmp_path / "0.board", make=True)
    page.location = "stage 1 (pipe 1, data 0, tensor 0)"
    page.enter("step", 12, 600)
    seen = StatusPage(tmp_path / "0.board").progress()
    assert seen.describe() == "stage 1 (pipe 1, data 0, tensor 0), step 12"
    assert (seen.limit_s, seen.num_entries) == (600, 1)
    assert time.monotonic() - 600 < seen.since_s <= time.monotonic()
    for phase, step, words in (
        ("building", 0, "building"),
        ("saving", 5, "saving step 5"),
        ("ending", 5, "ending after step 5"),
    ):
        page.enter(phase, step)
        assert StatusPage(tmp_path / "0.board").progress().describe().endswith(words)


@pytest.mark.parametrize(
    ("stages", "words"),
    [
        ([1], "stage 1 (pipe 1, data 2, tensor 3)"),
        ([1, 5], "stages 1 and 5 (pipe 1, data 2, tensor 3)"),
        (range(1, 16, 4), "stages 1, 5, 9 and 13 (pipe 1, data 2, tensor 3)"),
        (range(1, 4096, 4), "stages 1, 5, ..., 4093 (pipe 1, data 2, tensor 3)"),
    ],
)
def test_a_rank_is_named_by_all_its_stages(stages: Sequence[int], words: str) -> None:
    assert place_name(stages, 1, 2, 3) == words
