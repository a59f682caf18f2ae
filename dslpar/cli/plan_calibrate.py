"""`dslpar plan --calibrate RUN...`: fit the constants of the time forecast to measured runs."""

from __future__ import annotations

import argparse
import sys
from math import exp
from pathlib import Path

from dslpar.cli import arguments
from dslpar.core.visible import visible
from dslpar.forecast import constants
from dslpar.forecast.calibrate import MANY_LAYOUTS, Calibration, calibrate, held_out_error
from dslpar.forecast.constants import ENOUGH_RUNS, Error
from dslpar.planner.measured_runs import Measured, NoMeasurementError, read_measured


def run(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Read the runs, fit the constants, and write them to a file, with the error that remains."""
    folders = [operand for operand in args.operands if not arguments.is_override(operand)]
    measured = []
    project_device = None if args.device else arguments.project_device(".")
    for folder in folders:
        try:
            measured.append(read_measured(Path(folder), args.device, args.nodes_of, project_device))
        except NoMeasurementError as error:
            sys.stderr.write(visible(f"left out: {error}") + "\n")
    if not measured:
        parser.error("--calibrate needs folders of runs, each with a config.yaml and a metrics.jsonl")
    runs = [each.run for each in measured]
    found, held_out = calibrate(runs), held_out_error(runs)
    covers = {name for each in measured for name in each.forecast.effects} if len(runs) >= ENOUGH_RUNS else set()
    path = Path(args.calibration or "calibration.json")
    try:
        path.write_text(constants.dump(found.constants, held_out, len(runs), covers), encoding="utf-8")
    except OSError as error:
        sys.stderr.write(visible(f"cannot write {path}: {error.strerror or error}") + "\n")
        return 1
    sys.stdout.write(_report(measured, found, held_out, path))
    return 0


def _report(measured: list[Measured], found: Calibration, error: Error, path: Path) -> str:
    lines = [f"{'run':40} {'measured':>10} {'forecast':>10} {'calibrated':>11}"]
    for each, residual in zip(measured, found.residuals, strict=True):
        before, after = each.forecast.time.step_s, each.step_s * exp(residual)
        lines.append(f"{each.path!s:40} {each.step_s:8.3f} s {before:8.3f} s {after:9.3f} s")
    changed = {name: (getattr(constants.DEFAULT, name), getattr(found.constants, name)) for name in constants.BOUNDS}
    lines += ["", "constants that changed by more than 2 %"]
    lines += [
        f"  {name:24} {old:10.4g} -> {new:.4g}" for name, (old, new) in changed.items() if abs(new / old - 1) > 0.02
    ]
    half, most = f"{100 * error.half:.0f} % in half", f"{100 * error.nine_of_ten:.0f} % in nine of ten"
    without = f"{100 * constants.ERROR.half:.0f} and {100 * constants.ERROR.nine_of_ten:.0f} % without calibration"
    lines += ["", f"error of forecasts for other layouts, {_basis(measured)}: {half}, {most} ({without})"]
    in_config = f"cluster=dict(calibration={str(path.absolute())!r})"
    lines += [f"written to {path}: --calibration {path}, or in a config {in_config}"]
    return "".join(visible(line) + "\n" for line in lines)


def _basis(measured: list[Measured]) -> str:
    """Return what the error is based on, by the number of runs (`held_out_error`)."""
    if len(measured) < ENOUGH_RUNS:
        return f"as without calibration, because {ENOUGH_RUNS} runs are needed"
    if len({each.run.terms for each in measured}) < MANY_LAYOUTS:
        return "each layout with constants fitted to the others, and at least that of other stacks after so few runs"
    return "each layout with constants fitted to the others"
