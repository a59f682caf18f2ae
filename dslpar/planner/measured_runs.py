"""Read your own runs as measurements of step times, for `dslpar plan --calibrate`.

    measured = read_measured(Path("outputs/llama_7b"), device="h100-80g")
    measured.step_s, measured.forecast.time.step_s

A run's step time is the median of `step_s` in its metrics.jsonl. Skipped steps do not count, and neither do the first
steps, in which kernels are chosen and compiled. The layout comes from the run's config.yaml, which also has the number
of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from statistics import median

from dslpar.forecast.calibrate import Run
from dslpar.forecast.machine import MachineError, machine_of
from dslpar.forecast.plan import Forecast, forecast
from dslpar.forecast.step_time import terms_of
from dslpar.forecast.workload import workload_of
from dslpar.linter import check
from dslpar.reporting import metrics_file, run_dir
from dslpar.reporting.metrics_file import MetricsError
from dslpar.reporting.run_list import read_run

FIRST_STEPS = 3
"""Number of steps at the beginning of a run that do not count."""
FEWEST_STEPS = 5
"""The fewest counted steps of a usable run."""


class NoMeasurementError(ValueError):
    """The run folder has no usable measurement; the message says why."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A run with its measured step time and its forecast."""

    path: Path
    step_s: float
    forecast: Forecast

    @property
    def run(self) -> Run:
        """The measurement as an input of `dslpar.forecast.calibrate`."""
        made = self.forecast
        device = made.machine.device.computing_in(made.workload.dtype)
        return Run(terms_of(made.workload, device, made.machine.nodes), self.step_s)


def read_measured(
    path: Path, device: str | None = None, per_node: int | None = None, project_device: str | None = None
) -> Measured:
    """Read a run folder; `device` and `per_node` describe the run's machine, `project_device` if nothing else does.

    Raises:
        NoMeasurementError: the run has no config, no world size, or too few steps; or its config has errors, an unknown
            device, or a model with unknown costs.
    """
    step_s = _step_s(path)
    world_size = read_run(path).world_size
    config_path = path / run_dir.CONFIG
    if world_size is None or not config_path.is_file():
        raise NoMeasurementError(f"{path}: {run_dir.CONFIG} has no world size")
    checked = check.check(check.load(str(config_path)), world_size, forecasts=False)
    if checked.has_errors:
        error = next(each for each in checked.findings if each.severity == "error")
        raise NoMeasurementError(f"{path}: {error.concise()}")
    workload = workload_of(checked.job)
    if workload is None:
        raise NoMeasurementError(f"{path}: the costs of its model are unknown")
    try:
        machine = machine_of(checked.job, device, per_node, project_device=project_device)
    except MachineError as error:
        raise NoMeasurementError(f"{path}: {error}") from error
    return Measured(path=path, step_s=step_s, forecast=forecast(workload, machine))


def _step_s(path: Path) -> float:
    try:
        records, _ = metrics_file.read_records(path / run_dir.METRICS)
    except MetricsError as error:
        raise NoMeasurementError(f"{path}: cannot read {run_dir.METRICS}: {error}") from error
    counted = [record.get("step_s") for record in records[FIRST_STEPS:] if not record.get("skipped")]
    taken = [seconds for seconds in counted if isinstance(seconds, int | float) and seconds > 0]
    if len(taken) < FEWEST_STEPS:
        few = f"{len(taken)} steps after the first {FIRST_STEPS}, but {FEWEST_STEPS} are needed"
        raise NoMeasurementError(f"{path}: {few}")
    return float(median(taken))
