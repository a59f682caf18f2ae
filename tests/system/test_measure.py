"""`dslpar measure`: one process or launched ranks write a calibration that `dslpar plan` accepts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dslpar.cli.main import main
from dslpar.forecast.constants import DEFAULT, load
from tests.support.paths import ROOT


def run(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True)


@pytest.mark.prove
def test_without_a_device_there_is_nothing_to_measure(tmp_path: Path) -> None:
    ran = run([sys.executable, "-m", "dslpar", "measure"], tmp_path)
    assert ran.returncode == 2
    assert "this host has no accelerator" in ran.stderr
    ran = run([sys.executable, "-m", "dslpar", "measure", "--device", "a100"], tmp_path)
    assert ran.returncode == 2
    assert "unknown device 'a100'; did you mean 'a100-80g'?" in ran.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.prove
def test_two_ranks_measure_their_link(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    ran = run([*torchrun, "-m", "dslpar", "measure", "--device", "a10-24g", "--output-file", "mine.json"], tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert "all-reduces over 2 ranks" in ran.stdout
    assert ran.stdout.count("written to mine.json") == 1, "rank 0 speaks"
    constants = load(str(tmp_path / "mine.json")).constants
    assert constants.link_latency_s > DEFAULT.link_latency_s, "sockets are slower than NVLink"
    assert constants.product_efficiency < DEFAULT.product_efficiency, "a CPU is no A10"
    argv = ["plan", str(ROOT / "configs" / "gpt_3d.py"), "--world-size", "8", "--device", "a10-24g", "--format", "json"]
    steps = []
    for more in ([], ["--calibration", str(tmp_path / "mine.json")]):
        main([*argv, *more])
        steps.append(json.loads(capsys.readouterr().out)["step_s"])
    assert steps[1] > steps[0]
