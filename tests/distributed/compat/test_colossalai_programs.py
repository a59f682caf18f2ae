"""Programs in the shape of ColossalAI's examples run by their import lines alone, or are told what to write."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tests.support import ported_programs as ported
from tests.support.ranks import on_ranks


def _run_all(ranks: int, folder: Path) -> list[dict[str, list[float]]]:
    programs = [program for program in ported.RUNNING if program.ranks == ranks]
    ported.prepare(programs, folder)
    results = on_ranks(ranks, ported.run, programs, folder, init="deepspeed")
    assert all(list(result) == [program.name for program in programs] for result in results)
    return results


@pytest.mark.parametrize("ranks", [1, 2])
def test_programs_run_by_their_import_lines(ranks: int, tmp_path: Path) -> None:
    for result in _run_all(ranks, tmp_path):
        for name, losses in result.items():
            assert all(map(math.isfinite, losses)), name
            assert len(losses) == 1 or losses[-1] <= losses[0], f"{name} does not learn: {losses}"
