"""Random edits of the shipped configs: no text makes the analysis, completion or explanation fail, or go stale."""

from __future__ import annotations

import os
import random
from itertools import islice
from pathlib import Path

import pytest

from benchmarks.random_edits import edited
from dslpar.lsp.analysis import Analysis, analysed
from dslpar.lsp.completion import completions
from dslpar.lsp.cursor import place_at
from dslpar.lsp.hints import hints, summary
from dslpar.lsp.hover import explanation_at
from dslpar.lsp.quick_fixes import quick_fixes
from tests.support.paths import ROOT

CONFIGS = sorted((ROOT / "configs").glob("*.py"))


def check_edits(path: Path, count: int) -> None:
    """Ask everything about each text, and compare the findings of the legal one, to which one edit in eight returns."""
    text, rng = path.read_text(encoding="utf-8"), random.Random(path.name)
    real = os.path.realpath(path)

    def analysis_of(now: str) -> Analysis:
        return analysed(str(path), {real: now})

    at_first = analysis_of(text).findings
    for now in islice(edited(text, rng), count):
        made = analysis_of(now)
        line = rng.randrange(now.count("\n") + 1) + 1
        column = rng.randrange(len(now.split("\n")[line - 1]) + 1) + 1
        if (place := place_at(now, line, column)) is not None:
            completions(made, place, {real: now})
        explanation_at(made, line, column)
        hints(made)
        summary(made)
        for shown in made.findings[:1]:
            quick_fixes(made, shown.finding, {real: now})
        for shown in made.findings:
            places = [each.location for each in made.related(shown)] if made.checked else []
            for at in (shown.place, *places):
                assert at.path != made.path or at.line <= now.count("\n") + 1, "a place that the text does not have"
        if now == text:
            assert made.findings == at_first, "a finding of another text"


def test_the_first_edits_of_a_config() -> None:
    check_edits(ROOT / "configs" / "gpt_3d.py", 60)


@pytest.mark.prove
@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_ten_thousand_edits(path: Path) -> None:
    check_edits(path, -(-10_000 // len(CONFIGS)))


@pytest.mark.parametrize("name", ["cfg.py", "cfg.yaml"])
@pytest.mark.parametrize(
    "text", ["# dslpar: ignore-file[CFG101] why\nmodel: '\ud800'\n", "model = dict(type='\ud800'\n"]
)
def test_half_of_a_surrogate_pair_is_a_finding(tmp_path: Path, name: str, text: str) -> None:
    """An editor may send one, as JSON, within a pair that it cuts; no file on disk has one."""
    path = str(tmp_path / name)
    made = analysed(path, {os.path.realpath(path): f"# dslpar: world-size=8\n{text}"})
    assert "CFG001" in [shown.finding.code for shown in made.findings]
