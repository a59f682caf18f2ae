"""`dslpar runs` and `dslpar runs plot`: tables, JSON, sorting, pictures, wrong usage."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from dslpar.cli.main import main

CONFIG = """\
train: {steps: 4}
resolved:
  world_size: 8
  parallel: {data: 2, pipeline: 2, tensor: {size: 2, mode: 1d}}
"""


@pytest.fixture
def outputs(tmp_path: Path) -> Path:
    """Return three runs: one finished, one unfinished, one with a damaged config."""
    for name, losses in (("a", [4.0, 3.0, 2.0, 1.0]), ("b", [4.0, None]), ("c", [2.0])):
        (tmp_path / name).mkdir()
        records = [{"step": step, "loss": loss, "tokens_per_s": 50.0} for step, loss in enumerate(losses, 1)]
        (tmp_path / name / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        (tmp_path / name / "config.yaml").write_text("]" if name == "c" else CONFIG)
    return tmp_path


def run(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    assert main(["runs", *map(str, words)]) == 0
    return capsys.readouterr().out


def test_the_table_has_a_line_a_run_and_what_is_wrong_below(outputs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = run(capsys, outputs).splitlines()
    assert lines[0].split() == ["run", "state", "step", "loss", "held-out", "per", "s", "layout", "checkpoint", "age"]
    assert re.match(
        r"a +finished +4/4 +1.0000 +- +50 tokens +pipeline 2 \* data 2 \* tensor 2 \(1d\), ZeRO 0", lines[1]
    )
    assert re.match(r"b +failed +2/4 +-", lines[2])
    assert lines[4] == "b: it ended after step 2, and log.txt does not say why"
    assert lines[5].startswith("c: config.yaml: not YAML")


def test_a_narrow_terminal_shows_fewer_columns_and_says_which(
    outputs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    for columns, left_out in ((200, ""), (100, "layout: in a wider"), (60, "layout and checkpoint: in a wider")):
        monkeypatch.setenv("COLUMNS", str(columns))
        out = run(capsys, outputs)
        assert ("layout" in out.splitlines()[0]) == (columns == 200)
        assert ("checkpoint" in out.splitlines()[0]) == (columns != 60)
        assert left_out in out.splitlines()[-1]


def test_json_has_the_same(outputs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found: list[dict[str, Any]] = json.loads(run(capsys, "list", outputs, "--format", "json"))
    assert [(each["name"], each["state"], each["loss"]) for each in found] == [
        ("a", "finished", 1.0),
        ("b", "failed", None),
        ("c", "unknown", 2.0),
    ]
    assert {"path", "reason", "step", "steps", "eval_loss", "tokens_per_s", "layout", "checkpoint"} <= found[0].keys()
    assert found[2]["problems"]


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        (["--sort", "loss"], "a c b"),
        (["--sort", "loss", "--reverse"], "c a b"),  # runs without a value come last in either order
        (["--sort", "step"], "c b a"),
        (["--sort", "state"], "a b c"),
        (["--reverse"], "c b a"),
        (["--state", "failed"], "b"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else value,
)
def test_sort_and_filter(outputs: Path, capsys: pytest.CaptureFixture[str], flags: list[str], names: str) -> None:
    found = json.loads(run(capsys, outputs, *flags, "--format", "json"))
    assert [each["name"] for each in found] == names.split()


def test_a_checkpoint_that_cannot_be_read_is_told(outputs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (outputs / "a" / "checkpoints" / "step_000004").mkdir(parents=True)
    out = run(capsys, outputs / "a")
    assert "step_000004" in out
    assert ".: checkpoints/step_000004/checkpoint.json: missing" in out


def test_no_runs_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, tmp_path) == f"no runs in {tmp_path}\n"


def test_plots_go_to_a_file_or_to_the_terminal(outputs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = outputs / "curves.svg"
    assert run(capsys, "plot", outputs / "a", outputs / "b", "-o", picture, "--metrics", "loss") == ""
    assert picture.read_text().startswith("<svg ")
    out = run(capsys, "plot", outputs / "a", "--metrics", "loss,lr", "--width", "50", "--log", "loss")
    assert "loss (log)" in out
    assert max(map(len, out.splitlines())) <= 50


def test_metrics_that_no_run_has_are_told(outputs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", "plot", str(outputs / "a"), "--metrics", "speed"]) == 1
    assert capsys.readouterr().err == "no run has speed\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["{}/nowhere"], "cannot read"),
        (["plot"], "RUN"),
        (["plot", "{}/nowhere"], "is not a folder"),
        (["plot", "{}/a", "-o", "out.pdf"], "neither .svg nor .png"),
        (["plot", "{}/a", "--log", "lr", "--metrics", "loss"], "--log lr: not among --metrics"),
        (["plot", "{}/a", "--metrics", ","], "--metrics needs at least one name"),
        (["plot", "{}/a", "-o", "{}/no/out.svg"], "cannot write"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_usage(outputs: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["runs", *(word.format(outputs) for word in words)])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
