"""Hints and the summary show what `show` and `plan` would say."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from dslpar.cli.main import main
from dslpar.lsp.analysis import Analysis, analysed
from dslpar.lsp.hints import hints, summary
from dslpar.lsp.layouts import place_of

COMMENT = "# dslpar: world-size=64 device=h100-80g\n"
TEXT = (
    "parallel = dict(pipeline=2, tensor=dict(size=4, mode='2d'))\n"
    "model = dict(type='GPT', num_layers=32, hidden_size=4096, num_heads=32,\n"
    "             vocab_size=32000, max_seq_len=4096)\n"
    "batch = dict(micro_size=2, accumulation=8)\n"
)


def analysis_of(path: Path, text: str) -> Analysis:
    return analysed(str(path), {os.path.realpath(path): text})


def test_hints_agree_with_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "cfg.py"
    path.write_text(COMMENT + TEXT)
    made = analysis_of(path, COMMENT + TEXT)
    assert not made.first.has_errors
    shown = {hint.at.line: [each.text for each in hints(made) if each.at.line == hint.at.line] for hint in hints(made)}
    assert main(["plan", str(path), "--world-size", "64", "--device", "h100-80g", "--format", "json"]) == 0
    own = json.loads(capsys.readouterr().out)
    memory = f"{own['binding']['bytes'] / 2**30:.1f} of 79.6 GiB"
    assert shown == {2: ["data 8", "x 2, y 2, z 1", memory, "layers 16 16"], 5: ["2 x 8 x 8"]}
    found = summary(made)
    assert found is not None
    assert found[0].line == 2
    assert found[1] == f"64 ranks: pipe 2 x data 8 x tensor 4 · {memory} · about {own['step_s']:.2f} s a step"


def test_without_a_device_there_is_no_forecast_of_this_machine(tmp_path: Path) -> None:
    made = analysis_of(tmp_path / "cfg.py", "# dslpar: world-size=64\n" + TEXT)
    assert not any("GiB" in hint.text for hint in hints(made))
    found = summary(made)
    assert found is not None
    assert found[1] == "64 ranks: pipe 2 x data 8 x tensor 4 · 2 x 8 x 8 samples a step"


def test_the_line_says_in_which_world_there_is_no_layout(tmp_path: Path) -> None:
    made = analysis_of(tmp_path / "cfg.py", "# dslpar: world-size=8,12\n" + TEXT)
    found = summary(made)
    assert found is not None
    assert found[1] == (
        "8 ranks: pipe 2 x tensor 4 · 2 x 8 x 1 samples a step | 12 ranks: no layout while the config has errors"
    )


def test_a_half_written_statement_leaves_no_old_layout(tmp_path: Path) -> None:
    found = summary(analysis_of(tmp_path / "cfg.py", "# dslpar: world-size=8\n" + TEXT.replace("micro_size=2", "micr")))
    assert found is not None
    assert found[1] == "8 ranks: no layout while the config has errors"


def test_without_a_number_of_ranks_there_is_no_line(tmp_path: Path) -> None:
    assert summary(analysis_of(tmp_path / "cfg.py", TEXT)) is None


def test_the_summary_of_a_layout_in_a_variable_is_above_its_key(tmp_path: Path) -> None:
    text = COMMENT + TEXT.replace("parallel = ", "mine = ") + "parallel = mine\n"
    made = analysis_of(tmp_path / "cfg.py", text)
    found = summary(made)
    assert found is not None
    assert found[0] == place_of(made)
    assert found[0][1:] == (6, 1, 6, 9), "and not a range that ends before it begins"
