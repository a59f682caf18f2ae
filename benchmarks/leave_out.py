"""Errors of step-time forecasts for what no constant was fitted on: whole stacks, and effects.

    python -m benchmarks.forecast --leave-out

A stack is a framework on a cluster. Each fitted stack is forecast with constants of the others, and the stacks that are
never fitted with constants of all fitted ones. The tables are

- stacks left out: the error of a forecast for a stack of which nothing was measured (`ERROR`),
- layouts of one model, compared within these stacks: the error of the ratio of two times (`RATIO`),
- a calibration with three runs of the stack left out: the error on its other runs (`CALIBRATED`),
- effects left out, such as a pipeline: its runs are forecast with constants of the runs without it. The largest of
  these errors is that of an effect that no run has (`UNCOVERED`),
- mixtures of experts: the error of published steps (`benchmarks.published_mixtures`), with constants of all fitted
  stacks, none of which has experts (`MIXTURES`).

Fits use at most `MOST_RUNS` runs per stack. The last lines are these values as `dslpar.forecast.constants` stores them
for `dslpar plan` to print. Eleven stacks are few, and so are five mixtures. All values but the largest error of
effects are therefore upper bounds: what `CONFIDENCE` of drawings of as many groups, with replacement, do not exceed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import exp
from statistics import median
from typing import TypeVar

from benchmarks.forecast_fits import STACKS, UNFITTED, Data, fit, thinned
from benchmarks.published_runs import PublishedRun
from dslpar.forecast.calibrate import calibrate, residuals_of
from dslpar.forecast.constants import ENOUGH_RUNS, Constants, Error, widest

MOST_RUNS = 120
"""The most runs per stack in a fit, evenly spread: 14 fits to all 2,000 runs would take many minutes."""
DRAWS = 6
"""Ways to draw the runs of a calibration from a stack."""
DRAWINGS, CONFIDENCE = 200, 0.95
"""Drawings of stacks, and the share of them that stays below a bound."""
MOST_HELD = 200
"""The most runs of a stack that are forecast after such a calibration."""

MOST_PAIRS = 1000
"""The most pairs of layouts of a stack that are compared."""
T = TypeVar("T")

Residuals = Mapping[str, Sequence[float]]
"""log(forecast / measured) of runs, by the name of a stack or an effect."""

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


@dataclass(frozen=True)
class LeftOut:
    """Errors of what was left out of the fits."""

    stacks: Residuals
    ratios: Residuals
    """log of the forecast ratio of two layouts' times over the measured ratio, by stack."""
    calibrated: Residuals
    effects: Residuals
    mixtures: Residuals
    """By the name of the model."""

    @property
    def unseen_effect(self) -> Error:
        """The largest error of an effect that no fitted run has."""
        return widest(*(pooled({name: residuals}) for name, residuals in self.effects.items()))


def leave_out(fitted: Data, unfitted: Data, mixtures: Data, most: int = MOST_RUNS) -> LeftOut:
    """Leave out each stack and each effect; fits use at most `most` runs per stack."""
    stacks: dict[str, list[float]] = {}
    ratios: dict[str, list[float]] = {}
    calibrated: dict[str, list[float]] = {}
    whole = _constants(fitted, _without(fitted), most)
    for data in (fitted, unfitted):
        for stack in dict.fromkeys(run.stack for run in data.runs):
            constants = _constants(fitted, _without(fitted, stack), most) if stack in STACKS else whole
            held = data.of_stack(stack)
            stacks[stack] = residuals_of([data.terms[i] for i in held], constants)
            ratios[stack] = _ratios([data.runs[i].set for i in held], stacks[stack])
            calibrated[stack] = _after_few_runs(data, held, constants)
    effects = {name: _of_effect(fitted, has, most) for name, has in EFFECTS.items()}
    return LeftOut(
        stacks, _without_empty(ratios), _without_empty(calibrated), effects, residuals_by_model(mixtures, whole)
    )


def residuals_by_model(mixtures: Data, constants: Constants) -> Residuals:
    """Return the residuals of published mixtures, by the name of the model."""
    found: dict[str, list[float]] = {}
    for run, residual in zip(mixtures.runs, residuals_of(mixtures.terms, constants), strict=True):
        found.setdefault(run.set.partition(" on ")[0], []).append(residual)
    return found


def _without_empty(groups: Residuals) -> Residuals:
    return {name: residuals for name, residuals in groups.items() if residuals}


def _without(data: Data, stack: str = "") -> list[int]:
    return [i for each in STACKS if each != stack for i in data.of_stack(each)]


def _constants(data: Data, chosen: Sequence[int], most: int) -> Constants:
    return fit(data, thinned(data, chosen, most))


def _ratios(sets: Sequence[str], residuals: Sequence[float]) -> list[float]:
    """Return the differences between the residuals of two runs of a set, for all pairs."""
    pairs = [(i, j) for i, j in combinations(range(len(sets)), 2) if sets[i] == sets[j]]
    return [residuals[i] - residuals[j] for i, j in _spread(pairs, MOST_PAIRS)]


def _spread(items: Sequence[T], most: int) -> Sequence[T]:
    """Return at most `most` items, evenly spread."""
    return items[:: max(1, -(-len(items) // most))]


def _after_few_runs(data: Data, held: Sequence[int], start: Constants) -> list[float]:
    """Return the residuals of a stack's runs after calibrations to `ENOUGH_RUNS` others, begun at `start`.

    Several draws of the few runs are pooled. A stack needs twice as many runs.
    """
    rng, found = random.Random(0), list[float]()
    for _ in range(DRAWS if len(held) >= 2 * ENOUGH_RUNS else 0):
        few = rng.sample(list(held), ENOUGH_RUNS)
        made = calibrate([data.terms[i] for i in few], start).constants
        others = [i for i in held if i not in few]
        found += residuals_of([data.terms[i] for i in _spread(others, MOST_HELD)], made)
    return found


def _of_effect(data: Data, has: Callable[[PublishedRun], bool], most: int) -> list[float]:
    constants = _constants(data, [i for i in _without(data) if not has(data.runs[i])], most)
    held = [i for stack in (*STACKS, UNFITTED) for i in data.of_stack(stack) if has(data.runs[i])]
    return residuals_of([data.terms[i] for i in held], constants)


# Quantiles and tables ---------------------------------------------------------------------------------------------


def pooled(groups: Residuals) -> Error:
    """Return quantiles of the error over all groups, each of which weighs alike, however many runs it has."""
    shares = sorted((abs(exp(each) - 1), 1 / len(group)) for group in groups.values() for each in group)
    return Error(*(_weighted_quantile(shares, at * len(groups)) for at in (0.5, 0.8, 0.9)))


def bounded(groups: Residuals, drawings: int = DRAWINGS) -> Error:
    """Return upper bounds of `pooled`, which `CONFIDENCE` of all drawings of as many groups do not exceed."""
    rng, names = random.Random(0), list(groups)
    drawn = [
        pooled({f"{name} {number}": groups[name] for number, name in enumerate(rng.choices(names, k=len(names)))})
        for _ in range(drawings)
    ]
    return Error(*(sorted(column)[int(CONFIDENCE * (drawings - 1))] for column in zip(*drawn, strict=True)))


def _weighted_quantile(ordered: Sequence[tuple[float, float]], weight: float) -> float:
    """Return the first value at which the weights of (value, weight) pairs so far add up to `weight`."""
    reached = 0.0
    for value, more in ordered:
        reached += more
        if reached >= weight - 1e-9:
            return value
    return ordered[-1][0]


def report(found: LeftOut) -> Iterator[str]:
    """Yield the tables, and the values for `dslpar.forecast.constants`."""
    yield from _table("stacks left out", found.stacks)
    yield from _table("ratios of two layouts of a stack left out", found.ratios)
    yield from _table(f"a stack left out, after {ENOUGH_RUNS} of its runs", found.calibrated)
    yield from _table("effects left out", found.effects)
    yield from _table("mixtures of experts", found.mixtures)
    values = {
        "ERROR": bounded(found.stacks),
        "UNCOVERED": found.unseen_effect,
        "MIXTURES": bounded(found.mixtures),
        "CALIBRATED": bounded(found.calibrated),
        "RATIO": bounded(found.ratios),
    }
    for name, (half, four, nine) in values.items():
        yield f"{name} = Error(half={half:.3f}, four_of_five={four:.3f}, nine_of_ten={nine:.3f})"


def _table(title: str, groups: Residuals) -> Iterator[str]:
    yield f"{title:44} {'runs':>6} {'half':>8} {'4 of 5':>8} {'9 of 10':>8} {'bias':>8}"
    for name, residuals in groups.items():
        bias = 100 * (exp(median(residuals)) - 1)
        yield f"  {name:42} {len(residuals):6} {_percents(pooled({name: residuals}))} {bias:+6.1f} %"
    yield f"  {'all, each weighs alike':42} {sum(map(len, groups.values())):6} {_percents(pooled(groups))}"


def _percents(error: Error) -> str:
    return " ".join(f"{100 * each:6.1f} %" for each in error)
