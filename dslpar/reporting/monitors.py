"""Write each step's metrics to DeepSpeed's monitors: CSV, TensorBoard, W&B.

    monitors.check_packages(job)                      # before anything is built
    os.environ.update(monitors.environment(job))
    monitors.silence_engine(engine.deepspeed.monitor)
    monitors.write(engine.deepspeed.monitor, record)  # a line of metrics.jsonl: Train/loss, Train/lr, ..., Eval/loss
    monitors.close(engine.deepspeed.monitor)

DeepSpeed's `MonitorMaster` does the writing, on rank 0 alone. DeepSpeed's engine would also write events of its own:
`Train/Samples/lr` and, with a pipeline, the loss. `silence_engine` prevents this, because the engine counts samples and
dslpar counts steps, and W&B drops every event whose step is below the highest that it has seen. dslpar's metrics
contain these values.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from dslpar.core.catalog import finding
from dslpar.core.errors import DslparError
from dslpar.layout.deepspeed_config import ds_config
from dslpar.layout.resolve import Job
from dslpar.schema import sections

if TYPE_CHECKING:
    from deepspeed.monitor.monitor import MonitorMaster

SECTIONS = ("csv_monitor", "tensorboard", "wandb", "comet")
"""Sections of DeepSpeed's config, one per monitor."""
_PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "comet": "comet_ml"}
_NAMES = {"eval_loss": "Eval/loss", "train_eval_loss": "Eval/train_loss"}


def enabled(job: Job) -> list[str]:
    """Return the names of all enabled monitors, including those that the config's raw `deepspeed` section enables."""
    config = ds_config(job)
    return [name for name in SECTIONS if config.get(name, {}).get("enabled")]


def check_packages(job: Job) -> None:
    """Check that the packages of all enabled monitors are installed; to be called on rank 0, which writes.

    Raises:
        DslparError: a monitor's package is not installed.
    """
    missing = [name for name in enabled(job) if name in _PACKAGES and not importlib.util.find_spec(_PACKAGES[name])]
    findings = []
    for name in missing:
        message = f"monitor.{name} needs the package {_PACKAGES[name]!r}, which is not installed here"
        hint = f"pip install {_PACKAGES[name]}, or leave monitor.{name} out"
        findings.append(finding("CFG209", message, hint, job.path, f"monitor.{name}"))
    if findings:
        raise DslparError(findings)


def environment(job: Job) -> dict[str, str]:
    """Return the environment variables that W&B reads when it starts; empty if W&B is not enabled."""
    if "wandb" not in enabled(job):
        return {}
    wandb = job.spec.monitor.wandb
    offline = {"WANDB_MODE": "offline"} if wandb is not None and wandb.offline else {}
    folder = Path(job.output_dir).absolute()
    # log.txt has the run's output. W&B would replace stdout and stderr to capture it too.
    return {"WANDB_DIR": str(folder), "WANDB_CONSOLE": "off", "WANDB_SILENT": "true"} | offline


def without_monitors(job: Job) -> Job:
    """Return the job without monitors, for commands that build a job's engine but do not train."""
    raw = {key: value for key, value in job.spec.deepspeed.items() if key not in SECTIONS}
    quiet = dataclasses.replace(job.spec, monitor=sections.Monitor(), deepspeed=raw)
    return dataclasses.replace(job, spec=quiet)


def silence_engine(master: MonitorMaster) -> None:
    """Keep DeepSpeed's engine from writing its own events to the monitors, on any rank."""
    master.enabled = False


def csv_files(master: MonitorMaster) -> list[Path]:
    """Return a resumed run's CSV files, and make DeepSpeed append to them without a second header; rank 0 only."""
    monitor = master.csv_monitor
    if monitor is None:
        return []
    files = sorted(Path(monitor.log_dir).glob("*.csv"))
    monitor.filenames += [path.stem for path in files]
    return files


def write(master: MonitorMaster, record: Mapping[str, float]) -> None:
    """Write a line of metrics.jsonl to the monitors."""
    master.write_events(events(record))


def events(record: Mapping[str, float]) -> list[tuple[str, float, int]]:
    """Return (name, value, step) of each finite metric of a line.

    >>> events({"step": 3, "loss": 2.5, "grad_norm": math.inf, "eval_loss": 2.0})
    [('Train/loss', 2.5, 3), ('Eval/loss', 2.0, 3)]
    """
    numbers = {name: value for name, value in record.items() if name != "step" and math.isfinite(value)}
    return [(_NAMES.get(name, f"Train/{name}"), value, int(record["step"])) for name, value in numbers.items()]


def close(master: MonitorMaster) -> None:
    """Write TensorBoard's buffered events, and finish the W&B run."""
    if master.tb_monitor is not None:
        master.tb_monitor.summary_writer.close()
    if master.wandb_monitor is not None:
        sys.modules["wandb"].finish()
