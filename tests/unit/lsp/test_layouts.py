"""Actions on `parallel` write what `dslpar plan` suggests into the file."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from dslpar.cli.main import main
from dslpar.linter.fixes import apply
from dslpar.lsp.analysis import Analysis, analysed
from dslpar.lsp.layouts import layouts, place_of

COMMENT = "# dslpar: world-size=64 device=h100-80g\n"
TEXT = (
    "model = dict(type='GPT', num_layers=32, hidden_size=4096, num_heads=32, vocab_size=32000, max_seq_len=4096)\n"
    "parallel = dict(pipeline=2, tensor=dict(size=8, mode='1d'))\n"
    "batch = dict(global_size=256, micro_size=2)\n"
)


def analysis_of(path: Path, text: str) -> Analysis:
    return analysed(str(path), {os.path.realpath(path): text})


def test_layouts_are_those_of_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, text = tmp_path / "cfg.py", COMMENT + TEXT
    path.write_text(text)
    made = analysis_of(path, text)
    found = layouts(made, {os.path.realpath(path): text})
    assert main(["plan", str(path), "--world-size", "64", "--device", "h100-80g", "--format", "json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    suggested = [" ".join(each["overrides"]) for each in plan["layouts"]]
    assert [fix.title.partition(": ")[0] for fix in found] == suggested[:4]
    path.write_text(apply(text, [found[0].edit]))
    assert main(["plan", str(path), "--world-size", "64", "--device", "h100-80g", "--format", "json"]) == 0
    after = json.loads(capsys.readouterr().out)
    ratio = plan["step_s"] / after["step_s"]
    assert f"{ratio:.2f} times as fast, {after['binding']['bytes'] / 2**30:.1f} of 79.6 GiB" in found[0].title


def test_a_config_that_does_not_fit_gets_what_fits(tmp_path: Path) -> None:
    text = COMMENT + TEXT.replace("size=8", "size=2").replace("micro_size=2", "micro_size=8")
    made = analysis_of(tmp_path / "cfg.py", text)
    found = layouts(made, {os.path.realpath(tmp_path / "cfg.py"): text})
    assert "FIT101" in [shown.finding.code for shown in made.findings]
    assert found
    assert all(": fits, " in fix.title for fix in found)


def test_values_that_the_file_computes_stay(tmp_path: Path) -> None:
    text = COMMENT + "stages = 2\n" + TEXT.replace("pipeline=2", "pipeline=stages * 1")
    made = analysis_of(tmp_path / "cfg.py", text)
    assert place_of(made) is not None
    assert not any("pipeline" in fix.title for fix in layouts(made, {os.path.realpath(tmp_path / "cfg.py"): text}))


@pytest.mark.parametrize("text", [TEXT, COMMENT + TEXT.replace("hidden_size", "hiden_size")])
def test_without_a_device_or_with_errors_there_are_none(tmp_path: Path, text: str) -> None:
    made = analysis_of(tmp_path / "cfg.py", text)
    assert layouts(made, {os.path.realpath(tmp_path / "cfg.py"): text}) == []
