"""Errors of step-time forecasts for what no constant was fitted on: whole stacks, and effects.

    python -m benchmarks.forecast --leave-out [--quick]

A stack is a framework on a cluster. Each fitted stack is forecast with constants of the others. Stacks that are never
fitted are forecast with constants of all fitted stacks. These errors are what a new user sees, and `dslpar plan` prints
them (`dslpar.forecast.constants.ERROR`). An effect, such as a pipeline, is left out with all its runs, and these are
forecast with constants of the others. `UNCOVERED` is printed for layouts with an effect that no run covers. The third
table calibrates with three runs of a stack and forecasts its other runs: `CALIBRATED`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import exp
from statistics import median

from benchmarks.forecast import STACKS, UNFITTED, Data, fit, thinned
from benchmarks.published_runs import PublishedRun
from dslpar.forecast.calibrate import calibrate, residuals_of
from dslpar.forecast.constants import Constants, Error

FEW = 3
"""Runs of a stack to which it is calibrated."""
DRAWS = 12
"""Ways to draw these runs from a stack."""

EFFECTS: Mapping[str, Callable[[PublishedRun], bool]] = {
    "several nodes": lambda run: run.workload.mesh.world_size > run.nodes.per_node,
    "pipelines": lambda run: run.workload.mesh.pipe > 1,
    "tensor parallelism": lambda run: run.workload.mesh.tensor.size > 1,
    "ZeRO 1": lambda run: run.workload.zero == 1 and run.workload.mesh.data > 1,
    "ZeRO 3": lambda run: run.workload.zero == 3,
    "recomputation": lambda run: run.workload.recompute != "none",
    "fused attention": lambda run: run.workload.framework.fused_attention,
    "Hopper": lambda run: run.device.tile[1] > 128,
}
"""Effects that some fitted runs have and others have not."""


def of_stacks(data: Data, most: int | None = None) -> dict[str, list[float]]:
    """Return log(forecast / measured) of each stack's runs, with constants fitted to other stacks."""
    stacks = dict.fromkeys(run.stack for run in data.runs)
    return {stack: _of_others(data, _chosen(data, stack), _fitted(data, stack), most) for stack in stacks}


def of_effects(data: Data, most: int | None = None) -> dict[str, list[float]]:
    """Return log(forecast / measured) of the runs with each effect, with constants fitted to runs without it."""
    found = {}
    for name, has in EFFECTS.items():
        held = [i for stack in (*STACKS, UNFITTED) for i in data.of_stack(stack) if has(data.runs[i])]
        fitted = [i for i in _fitted(data) if not has(data.runs[i])]
        found[name] = _of_others(data, held, fitted, most)
    return found


def after_few_runs(data: Data, start: Constants, seed: int = 0) -> dict[str, list[float]]:
    """Return log(forecast / measured) of each stack's runs after a calibration to `FEW` others, begun at `start`.

    Several draws of the few runs are pooled. Stacks with fewer than twice as many runs are left out.
    """
    rng, found = random.Random(seed), dict[str, list[float]]()
    for stack in dict.fromkeys(run.stack for run in data.runs):
        chosen = _chosen(data, stack)
        for _ in range(DRAWS if len(chosen) >= 2 * FEW else 0):
            few = rng.sample(chosen, FEW)
            made = calibrate([data.terms[i] for i in few], start).constants
            others = [data.terms[i] for i in chosen if i not in few]
            found.setdefault(stack, []).extend(residuals_of(others, made))
    return found


def _chosen(data: Data, stack: str) -> list[int]:
    return data.of_stack(stack)


def _fitted(data: Data, without: str = "") -> list[int]:
    return [i for stack in STACKS if stack != without for i in data.of_stack(stack)]


def _of_others(data: Data, held: Sequence[int], fitted: Sequence[int], most: int | None) -> list[float]:
    constants = fit(data, thinned(data, fitted, most))
    return residuals_of([data.terms[i] for i in held], constants)


def pooled(groups: Mapping[str, Sequence[float]]) -> Error:
    """Return quantiles of the error over all groups, each of which weighs alike, however many runs it has."""
    shares = sorted((abs(exp(each) - 1), 1 / len(group)) for group in groups.values() for each in group)
    return Error(*(_weighted_quantile(shares, at * len(groups)) for at in (0.5, 0.8, 0.9)))


def _weighted_quantile(ordered: Sequence[tuple[float, float]], weight: float) -> float:
    """Return the first value at which the weights of (value, weight) pairs so far add up to `weight`."""
    reached = 0.0
    for value, more in ordered:
        reached += more
        if reached >= weight - 1e-9:
            return value
    return ordered[-1][0]


def lines(title: str, groups: Mapping[str, Sequence[float]]) -> Iterator[str]:
    """Yield a table: each group's errors and bias, and those of all groups."""
    yield f"{title:44} {'runs':>6} {'half':>8} {'4 of 5':>8} {'9 of 10':>8} {'bias':>8}"
    for name, residuals in groups.items():
        one = pooled({name: residuals})
        yield f"  {name:42} {len(residuals):6} {_percents(one)} {100 * (exp(median(residuals)) - 1):+6.1f} %"
    count = sum(map(len, groups.values()))
    yield f"  {'all, each weighs alike':42} {count:6} {_percents(pooled(groups))}"


def _percents(error: Error) -> str:
    return " ".join(f"{100 * each:6.1f} %" for each in error)
