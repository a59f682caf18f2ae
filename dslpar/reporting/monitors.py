"""The numbers of each step to DeepSpeed's monitors: CSV, TensorBoard, W&B.

    monitor.check_packages(job)                  # before anything is built
    os.environ.update(monitor.environment(job))
    monitor.take_over(engine.deepspeed.monitor)
    monitor.write(engine.deepspeed.monitor, record)      # a line of metrics.jsonl: Train/loss, Train/lr, ..., Eval/loss
    monitor.close(engine.deepspeed.monitor)

DeepSpeed's `MonitorMaster` does the writing, on rank 0 alone. What its engine would write by itself
(`Train/Samples/lr`, and with a pipeline the loss) stands among our numbers, by step: its own events count samples, and
W&B drops every number whose step is below one that it has seen.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dslpar.core.catalog import finding
from dslpar.core.errors import DslparError, Finding
from dslpar.layout.deepspeed_config import ds_config
from dslpar.layout.resolve import Job
from dslpar.schema import sections

SECTIONS = ("csv_monitor", "tensorboard", "wandb", "comet")
"""DeepSpeed's, of its config."""
_PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "comet": "comet_ml"}
_NAMES = {"eval_loss": "Eval/loss"}


def enabled(job: Job) -> list[str]:
    """DeepSpeed's sections of the monitors that are asked for, also by the raw `deepspeed` section."""
    config = ds_config(job)
    return [name for name in SECTIONS if config.get(name, {}).get("enabled")]


def check_packages(job: Job) -> None:
    """Of the process that will write.

    Raises:
        DslparError: a monitor's package is not installed.
    """
    missing = [name for name in enabled(job) if name in _PACKAGES and not importlib.util.find_spec(_PACKAGES[name])]
    if missing:
        raise DslparError(_not_installed(job, name) for name in missing)


def _not_installed(job: Job, name: str) -> Finding:
    message = f"monitor.{name} needs the package {_PACKAGES[name]!r}, which is not installed here"
    hint = f"pip install {_PACKAGES[name]}, or leave monitor.{name} out"
    return finding("CFG209", message, hint, job.path, f"monitor.{name}")


def environment(job: Job) -> dict[str, str]:
    """What W&B must find in the environment when it starts."""
    if "wandb" not in enabled(job):
        return {}
    asked = job.spec.monitor.wandb
    offline = {"WANDB_MODE": "offline"} if asked is not None and asked.offline else {}
    folder = Path(job.output_dir).absolute()
    # Our lines stand in log.txt; W&B would put itself between Python and the terminal to read them.
    return {"WANDB_DIR": str(folder), "WANDB_CONSOLE": "off", "WANDB_SILENT": "true"} | offline


def without(job: Job) -> Job:
    """The same job with no monitor: for what is no run."""
    raw = {key: value for key, value in job.spec.deepspeed.items() if key not in SECTIONS}
    quiet = dataclasses.replace(job.spec, monitor=sections.Monitor(), deepspeed=raw)
    return dataclasses.replace(job, spec=quiet)


def take_over(master: Any) -> None:
    """From now on DeepSpeed's engine writes no events of its own to its monitors, on any rank."""
    master.enabled = False


def csv_files(master: Any) -> list[Path]:
    """Those that an earlier part of this run wrote, none but on rank 0: they keep the one header that they have."""
    monitor = master.csv_monitor
    if monitor is None:
        return []
    files = sorted(Path(monitor.log_dir).glob("*.csv"))
    monitor.filenames += [path.stem for path in files]
    return files


def write(master: Any, record: Mapping[str, Any]) -> None:
    """A line of metrics.jsonl."""
    master.write_events(events(record))


def events(record: Mapping[str, Any]) -> list[tuple[str, float, int]]:
    """(name, value, step) of each number of a line; what is not finite is no number to draw, and left out.

    >>> events({"step": 3, "loss": 2.5, "grad_norm": math.inf, "eval_loss": 2.0})
    [('Train/loss', 2.5, 3), ('Eval/loss', 2.0, 3)]
    """
    numbers = {name: value for name, value in record.items() if name != "step" and math.isfinite(value)}
    return [(_NAMES.get(name, f"Train/{name}"), value, record["step"]) for name, value in numbers.items()]


def close(master: Any) -> None:
    """Writes what is left, and ends W&B's process."""
    if master.tb_monitor is not None:
        master.tb_monitor.summary_writer.close()
    if master.wandb_monitor is not None:
        sys.modules["wandb"].finish()
