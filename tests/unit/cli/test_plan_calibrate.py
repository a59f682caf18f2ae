"""`dslpar plan --calibrate`: constants from a user's runs, and how plans use them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dslpar.cli.main import main
from dslpar.forecast.constants import CALIBRATED, DEFAULT, ERROR, Error, load
from dslpar.forecast.device import device_named
from dslpar.forecast.plan import Machine, forecast
from dslpar.forecast.workload import workload_of
from dslpar.linter import check
from dslpar.planner.measured_runs import FIRST_STEPS, NoMeasurementError, read_measured
from dslpar.reporting import run_dir

WORLD = 8
CONFIG = """\
model: {type: GPT, num_layers: 24, hidden_size: 2048, num_heads: 16, vocab_size: 50304, max_seq_len: 2048}
precision: bf16
zero: {stage: %d}
batch: {global_size: 64, micro_size: %d}
resolved: {world_size: 8, parallel: {pipeline: 1, data: 8, tensor: {size: 1, mode: null}}}
"""
SLOWER = 1.3
"""Slowdown of these machines against the uncalibrated forecast."""


def run_folder(path: Path, zero: int, micro_size: int, records: list[dict[str, Any]] | None = None) -> Path:
    """Write a run's folder whose steps took SLOWER times the forecast, and the first step much longer."""
    path.mkdir()
    (path / "config.yaml").write_text(CONFIG % (zero, micro_size))
    if records is None:
        job = check.check(check.load(str(path / "config.yaml")), WORLD).job
        workload = workload_of(job)
        assert workload is not None
        step_s = SLOWER * forecast(workload, Machine.usual(device_named("a100-80g"))).time.step_s
        times = [40 * step_s, *[step_s * (1 + 0.001 * (number % 3 - 1)) for number in range(1, 20)]]
        records = [{"step": step, "loss": 1.0, "step_s": seconds} for step, seconds in enumerate(times, start=1)]
    (path / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    return path


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    return [
        run_folder(tmp_path / f"z{zero}m{micro_size}", zero, micro_size)
        for zero, micro_size in ((1, 1), (1, 2), (1, 4), (2, 2), (3, 2))
    ]


def test_a_run_is_measured_by_the_median_of_its_steps(runs: list[Path]) -> None:
    measured = read_measured(runs[0], "a100-80g")
    assert measured.step_s == pytest.approx(SLOWER * measured.forecast.time.step_s, rel=0.01)


def test_calibrated_plans_are_nearer(
    runs: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names = [path.name for path in runs]
    assert main(["plan", "--calibrate", *names, "--device", "a100-80g"]) == 0
    out = capsys.readouterr().out
    assert "written to calibration.json" in out
    file = load("calibration.json")
    assert file.constants != DEFAULT
    assert file.error.half == CALIBRATED.half < ERROR.half, "five runs never show a smaller one"
    assert file.num_runs == len(runs)
    plan = ["plan", f"{names[1]}/config.yaml", "--world-size", "8", "--device", "a100-80g", "--format", "json"]
    main([*plan, "--calibration", "calibration.json"])
    calibrated = json.loads(capsys.readouterr().out)
    assert calibrated["step_s"] == pytest.approx(read_measured(runs[1], "a100-80g").step_s, rel=0.1)
    assert calibrated["error"]["half"] == pytest.approx(file.error.half)
    assert calibrated["error"]["own_runs"] == len(runs)
    main([*plan, "cluster.calibration=../calibration.json"])
    assert json.loads(capsys.readouterr().out)["step_s"] == calibrated["step_s"]


@pytest.mark.parametrize(
    ("count", "error", "basis"),
    [
        (2, ERROR, "the error is that for a software stack never measured: 3 of your runs reduce it (--calibrate)"),
        (3, CALIBRATED, "the error is that after calibration with 3 of your runs, on others"),
    ],
)
def test_three_runs_make_the_error_smaller(
    runs: list[Path],
    count: int,
    error: Error,
    basis: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    main(["plan", "--calibrate", *(path.name for path in runs[:count]), "--device", "a100-80g"])
    capsys.readouterr()
    plan = ["plan", f"{runs[3].name}/config.yaml", "--world-size", "8", "--device", "a100-80g"]
    main([*plan, "--calibration", "calibration.json"])
    out = capsys.readouterr().out
    half, most = round(100 * error.half), round(100 * error.nine_of_ten)
    assert f"(+- {half} % in half of the cases, {most} % in nine of ten)" in out
    assert basis in out


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{}", "has no 'format'"),
        ('{"format": 3, "constants": {"speed": 1}}', "unknown"),
        ('{"format": 3, "constants": {"step_s": -1}}', "step_s"),
        ("", "cannot use the calibration"),
    ],
)
def test_bad_calibrations(
    runs: list[Path], tmp_path: Path, text: str, problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text)
    argv = ["plan", str(runs[0] / "config.yaml"), "--world-size", "8", "--device", "a100-80g"]
    with pytest.raises(SystemExit):
        main([*argv, "--calibration", str(path)])
    assert problem in capsys.readouterr().err


def test_folders_that_tell_nothing_are_left_out(
    runs: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    few = [{"step": step, "step_s": 1.0} for step in range(1, FIRST_STEPS + 3)]
    short = run_folder(tmp_path / "short", 1, 1, few)
    skipped = run_folder(
        tmp_path / "skipped", 1, 1, [{"step": n, "step_s": 1.0, "skipped": True} for n in range(1, 30)]
    )
    for path, reason in (
        (short, "2 steps after the first 3"),
        (skipped, "0 steps"),
        (tmp_path / "none", "cannot read"),
    ):
        with pytest.raises(NoMeasurementError, match=reason):
            read_measured(path, "a100-80g")
    with pytest.raises(NoMeasurementError, match="no device is given"):
        read_measured(runs[0])
    assert main(["plan", "--calibrate", "short", "z1m1", "--device", "a100-80g"]) == 0
    assert "left out: short: 2 steps" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["plan", "--calibrate", "short", "--device", "a100-80g"])
    assert "--calibrate needs folders of runs" in capsys.readouterr().err


def test_a_runs_own_config_finds_the_calibration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run writes its config into another folder than the author's, where a relative path would start."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "configs"
    folder.mkdir()
    path = folder / "gpt.yaml"
    path.write_text(CONFIG % (1, 2) + "cluster: {device: a100-80g, calibration: ours.json}\n")
    config = check.load("configs/gpt.yaml")
    written = run_dir.config_yaml(check.check(config, WORLD).job, config)
    assert f"calibration: {folder / 'ours.json'}" in written
