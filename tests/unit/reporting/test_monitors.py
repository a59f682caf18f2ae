"""Monitors: what they send and need, and that W&B ends and needs no network."""

from __future__ import annotations

import csv
import importlib.util
import math
import os
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from dslpar.core.errors import DslparError
from dslpar.layout.deepspeed_config import ds_config
from dslpar.layout.resolve import Job, resolve
from dslpar.models.gpt import section
from dslpar.reporting import monitors
from dslpar.reporting import run_dir as record
from dslpar.schema import sections
from tests.support.ranks import on_ranks
from tests.support.runs import CONFIG, metrics, start, write_config

GPT = section.GPT(num_layers=2, hidden_size=8, num_heads=2, vocab_size=16, max_seq_len=4)
WATCHED = "monitor = dict(csv=True, tensorboard=True, wandb=dict(offline=True, project='demo'))\n"
installed = pytest.mark.skipif(
    not (importlib.util.find_spec("tensorboard") and importlib.util.find_spec("wandb")),
    reason="needs tensorboard and wandb: pip install -e '.[test]'",
)


def job_of(asked: sections.Monitor, raw: dict[str, Any] | None = None) -> Job:
    return resolve(sections.Spec(model=GPT, monitor=asked, deepspeed=raw or {}), 1, "runs/cfg.py")


# ---- a run ----


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the output_dir of a run with three monitors, and evaluation at steps 2 and 3."""
    folder = tmp_path_factory.mktemp("watched")
    config = write_config(folder, CONFIG + "train.update(eval_interval=2, eval_steps=1)\n" + WATCHED)
    words = [sys.executable, "train.py", "--config", str(config), f"train.output_dir={folder / 'out'}"]
    done = start(words, HTTP_PROXY="http://127.0.0.1:9", HTTPS_PROXY="http://127.0.0.1:9")  # nobody listens there
    assert done.status == 0, done.output
    assert "wandb" not in done.output
    return folder / "out"


@installed
def test_csv_holds_every_number_of_metrics_by_step(watched: Path) -> None:
    lines = metrics(watched)
    files = {path.stem: path for path in (watched / "csv" / "cfg").iterdir()}
    assert set(files) == {"Eval_loss", *(f"Train_{name}" for name in lines[0] if name != "step")}
    for name in ("loss", "grad_norm", "lr", "tokens", "tokens_per_s", "tflops_per_s"):
        with files[f"Train_{name}"].open(newline="") as file:
            header, *rows = csv.reader(file)
        assert header == ["step", name]
        assert [(int(step), float(value)) for step, value in rows] == [(line["step"], line[name]) for line in lines]
    with files["Eval_loss"].open(newline="") as file:
        assert [int(step) for step, _ in list(csv.reader(file))[1:]] == [2, 3]


def test_csv_of_a_resumed_run_goes_on_behind_its_checkpoint(tmp_path: Path) -> None:
    log = tmp_path / "Train_loss.csv"
    log.write_bytes(b"step,loss\r\n1,5.5\r\n2,5.25\r\n3,5.0\r\n4,4")
    job = job_of(sections.Monitor(csv=sections.FileMonitor(output_path=str(tmp_path), job_name=".")))
    on_ranks(1, _go_on, job, init="deepspeed")
    with log.open(newline="") as file:
        assert list(csv.reader(file)) == [["step", "loss"], ["1", "5.5"], ["2", "5.25"], ["3", "4.75"]]


def _go_on(job: Job) -> None:
    from deepspeed.monitor.config import get_monitor_config
    from deepspeed.monitor.monitor import MonitorMaster

    master = MonitorMaster(get_monitor_config(ds_config(job)))
    for path in monitors.csv_files(master):
        record.truncate_csv(path, 2)
    monitors.write(master, {"step": 3, "loss": 4.75})


@installed
def test_tensorboard_reads_the_same(watched: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(watched / "tensorboard" / "cfg"))
    events.Reload()
    lines = metrics(watched)
    assert {"Train/loss", "Train/grad_norm", "Train/lr", "Train/tokens_per_s", "Eval/loss"} <= set(
        events.Tags()["scalars"]
    )
    drawn = events.Scalars("Train/loss")
    assert [event.step for event in drawn] == [1, 2, 3]
    assert [event.value for event in drawn] == pytest.approx([line["loss"] for line in lines], rel=1e-6), "as float32"


@installed
def test_wandb_wrote_offline_below_the_output_dir_and_is_gone(watched: Path) -> None:
    (run,) = (watched / "wandb").glob("offline-run-*/run-*.wandb")
    assert b"Train/grad_norm" in run.read_bytes()
    here = [p.info["cmdline"] for p in psutil.process_iter(["cmdline", "cwd"]) if _writes_to(p, watched)]
    assert here == [], "a process of W&B's lives on"


def _writes_to(process: psutil.Process, folder: Path) -> bool:
    try:
        return any(str(folder) in opened.path for opened in process.open_files())
    except psutil.Error:
        return False


# ---- what is sent ----


def test_numbers_that_are_not_finite_are_left_out() -> None:
    record = {"step": 3, "loss": math.nan, "grad_norm": math.inf, "lr": 0.1, "eval_loss": 2.0}
    assert monitors.events(record) == [("Train/lr", 0.1, 3), ("Eval/loss", 2.0, 3)]


def _own_events(job: Job) -> list[str]:
    """Return the files in DeepSpeed's CSV folder after a step without dslpar's setting."""
    import torch

    from dslpar.distributed.groups import Groups
    from dslpar.engine.build import build_engine

    engine = build_engine(job, Groups(job.mesh), all_counted=True)
    if job.spec.train.seed:
        monitors.silence_engine(engine.deepspeed.monitor)
    ids = torch.zeros(job.batch.micro_size, 4, dtype=torch.int64)
    engine.train_batch([(ids, ids)])
    return sorted(os.listdir(engine.deepspeed.monitor.csv_monitor.log_dir))


@pytest.mark.parametrize(("seed", "files"), [(0, ["Train_Samples_lr.csv"]), (1, [])])
def test_deepspeed_s_own_events_by_samples_are_silenced(tmp_path: Path, seed: int, files: list[str]) -> None:
    """The first case shows when DeepSpeed no longer writes them."""
    asked = sections.Monitor(csv=sections.FileMonitor(output_path=str(tmp_path)))
    job = resolve(sections.Spec(model=GPT, monitor=asked, train=sections.Train(seed=seed)), 1, "cfg.py")
    assert on_ranks(1, _own_events, job, init="deepspeed") == [files]


# ---- requirements ----


def test_a_package_that_is_missing_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    asked = sections.Monitor(
        tensorboard=sections.FileMonitor(), wandb=sections.WandbMonitor(), csv=sections.FileMonitor()
    )
    with pytest.raises(DslparError) as missing:
        monitors.check_packages(job_of(asked))
    assert [finding.code for finding in missing.value.findings] == ["CFG209", "CFG209"]
    assert "monitor.tensorboard needs the package 'tensorboard', which is not installed here" in str(missing.value)
    assert "help: pip install wandb, or leave monitor.wandb out" in str(missing.value)
    monitors.check_packages(job_of(sections.Monitor(csv=sections.FileMonitor())))


def test_wandb_is_told_by_the_environment() -> None:
    assert monitors.environment(job_of(sections.Monitor(csv=sections.FileMonitor()))) == {}
    online = monitors.environment(job_of(sections.Monitor(wandb=sections.WandbMonitor())))
    assert "WANDB_MODE" not in online
    assert online["WANDB_DIR"] == os.path.abspath("outputs/cfg")
    offline = monitors.environment(job_of(sections.Monitor(wandb=sections.WandbMonitor(offline=True))))
    assert offline == online | {"WANDB_MODE": "offline"}
    assert monitors.environment(job_of(sections.Monitor(wandb=sections.WandbMonitor(enabled=False)))) == {}


def test_what_is_no_run_has_no_monitors() -> None:
    asked = job_of(sections.Monitor(wandb=sections.WandbMonitor()), {"csv_monitor": {"enabled": True}})
    assert monitors.enabled(asked) == ["csv_monitor", "wandb"]
    assert monitors.enabled(monitors.without_monitors(asked)) == []
