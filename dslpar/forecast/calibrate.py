"""Calibration: fit the constants of the time forecast (`dslpar.forecast.constants`) to measured steps.

    runs = [Run(terms_of(workload, device, nodes), step_s), ...]
    calibration = calibrate(runs)
    calibration.constants, calibration.error

The fit minimizes the mean Huber loss of log(forecast / measured), so that a stalled run does not dominate. Gauss-Newton
steps with Levenberg's damping move the constants in log space, within bounds. Each step evaluates all runs once per
constant, and the fit takes a handful of steps. A dozen runs cannot determine two dozen constants. A prior therefore
keeps constants that the runs do not determine near their start value. The prior weighs as much as `PRIOR_RUNS` runs
that contradict a change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, inf, log
from typing import NamedTuple

from dslpar.forecast.constants import BOUNDS, CALIBRATED, DEFAULT, ENOUGH_RUNS, ERROR, Constants, Error, widest
from dslpar.forecast.step_time import Terms, time_of

HUBER = 0.05
"""Huber threshold on |log(forecast / measured)|: above it, an error counts linearly and not by its square. Most
forecasts err by about this much. A run with a larger error was often disturbed, and should not move the constants."""
PRIOR_RUNS = 0.2
"""Weight of the prior, in runs: the penalty is this number times the sum of squared changes in log space."""
MOST_STEPS = 25
"""The most Gauss-Newton steps of a fit."""
STEP = 0.02
"""Change of a constant for a numerical derivative, in log space."""
LONGEST_STEP = 0.7
"""The most that a Gauss-Newton step changes a constant, in log space."""
MANY_LAYOUTS = 10
"""The fewest layouts whose own held-out errors determine an error in nine of ten cases."""
CONVERGED = 1e-5
"""The fit ends when a step reduces the loss by less than this share."""


class Run(NamedTuple):
    """A measured step."""

    terms: Terms
    """The constant-free inputs of the forecast of this step."""
    step_s: float
    """Measured seconds."""
    weight: float = 1.0
    """Weight in the fit."""


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Fitted constants, and their errors on the runs that they were fitted to."""

    constants: Constants
    residuals: tuple[float, ...]
    """log(forecast / measured) of each run."""
    loss: float
    """Loss over the runs and the prior."""

    @property
    def error(self) -> Error:
        """Errors of the forecast on these runs, as shares."""
        return error_of(self.residuals)


def error_of(residuals: Sequence[float]) -> Error:
    """Return the errors of forecasts as shares, from log(forecast / measured) of each."""
    shares = sorted(abs(exp(each) - 1) for each in residuals)
    return Error(*(quantile(shares, at) for at in (0.5, 0.8, 0.9)))


def quantile(ordered: Sequence[float], at: float) -> float:
    """Return a quantile of sorted values, linear between neighbours."""
    place = at * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def residuals_of(runs: Sequence[Run], constants: Constants) -> list[float]:
    """Return log(forecast / measured) of each run."""
    return [log(time_of(run.terms, constants).step_s / run.step_s) for run in runs]


def calibrate(
    runs: Sequence[Run],
    start: Constants = DEFAULT,
    names: Sequence[str] = tuple(BOUNDS),
    prior_runs: float = PRIOR_RUNS,
) -> Calibration:
    """Fit the constants in `names` to runs; the fit begins at `start`, where other constants stay.

    `prior_runs` is the weight of the prior (see `PRIOR_RUNS`).
    """
    total = sum(run.weight for run in runs)
    fit = _Fit(runs, [run.weight / total for run in runs], start, names, prior_runs / total)
    point = fit.origin
    residuals, loss, damping = fit.residuals(point), inf, 1e-2
    loss = fit.loss(residuals, point)
    for _ in range(MOST_STEPS):
        matrix, slope = fit.normal_equations(residuals, point)
        before = loss
        for _ in range(6):
            trial = fit.step(matrix, slope, point, damping)
            found = fit.residuals(trial)
            at = fit.loss(found, trial)
            if at < loss:
                point, residuals, loss, damping = trial, found, at, max(damping / 5, 1e-5)
                break
            damping *= 5
        if before - loss < CONVERGED * before:
            break
    return Calibration(constants=fit.constants(point), residuals=tuple(residuals), loss=loss)


def held_out_error(runs: Sequence[Run], folds: int = 10) -> Error:
    """Return the cross-validated error: each fold is forecast with constants fitted to the other folds.

    Runs of one layout are in one fold, because one of them tells all about the others. Fewer than `ENOUGH_RUNS` runs
    say little about other layouts: then the error is at least `ERROR`, that of the default constants. With fewer than
    `MANY_LAYOUTS` layouts it is at least `CALIBRATED`, that of other stacks after such a calibration.
    """
    if len(runs) < ENOUGH_RUNS:
        return widest(ERROR, calibrate(runs).error) if runs else ERROR
    layouts = list(dict.fromkeys(run.terms for run in runs))
    if len(layouts) == 1:
        return widest(CALIBRATED, calibrate(runs).error)
    folds = min(folds, len(layouts))
    fold_of = {layout: number % folds for number, layout in enumerate(layouts)}
    residuals: list[float] = []
    for fold in range(folds):
        fitted = calibrate([run for run in runs if fold_of[run.terms] != fold])
        residuals += residuals_of([run for run in runs if fold_of[run.terms] == fold], fitted.constants)
    error = error_of(residuals)
    return error if len(layouts) >= MANY_LAYOUTS else widest(error, CALIBRATED)


class _Fit(NamedTuple):
    """A fit's fixed data. A *point* is a list of the logarithms of the free constants, in the order of `names`."""

    runs: Sequence[Run]
    shares: Sequence[float]
    """Weight of each run in the loss; the sum is 1."""
    start: Constants
    names: Sequence[str]
    """Names of the free constants."""
    prior: float
    """Weight of the prior in the loss."""

    @property
    def origin(self) -> list[float]:
        return [log(getattr(self.start, name)) for name in self.names]

    def constants(self, point: Sequence[float]) -> Constants:
        fitted = {name: exp(value) for name, value in zip(self.names, point, strict=True)}
        return Constants(**vars(self.start) | fitted)

    def residuals(self, point: Sequence[float]) -> list[float]:
        return residuals_of(self.runs, self.constants(point))

    def loss(self, residuals: Sequence[float], point: Sequence[float]) -> float:
        moved = sum((value - origin) ** 2 for value, origin in zip(point, self.origin, strict=True))
        return self.prior * moved + sum(
            share * (error * error / (2 * HUBER) if abs(error) < HUBER else abs(error) - HUBER / 2)
            for share, error in zip(self.shares, residuals, strict=True)
        )

    def normal_equations(
        self, residuals: Sequence[float], point: Sequence[float]
    ) -> tuple[list[list[float]], list[float]]:
        """Return the Gauss-Newton matrix and the gradient of the loss at a point."""
        columns = []
        for index, name in enumerate(self.names):
            by = STEP if point[index] + STEP <= log(BOUNDS[name][1]) else -STEP
            varied = self.residuals([*point[:index], point[index] + by, *point[index + 1 :]])
            columns.append([(after - before) / by for after, before in zip(varied, residuals, strict=True)])
        # A Huber loss is a sum of squares in which an error above the threshold has a smaller weight.
        weights = [share / max(HUBER, abs(error)) for share, error in zip(self.shares, residuals, strict=True)]
        weighted = [[w * each for w, each in zip(weights, column, strict=True)] for column in columns]
        matrix = [[_dot(one, other) for other in columns] for one in weighted]
        slope = [_dot(one, residuals) for one in weighted]
        for index, (value, origin) in enumerate(zip(point, self.origin, strict=True)):
            matrix[index][index] += 2 * self.prior
            slope[index] += 2 * self.prior * (value - origin)
        return matrix, slope

    def step(
        self, matrix: Sequence[Sequence[float]], slope: Sequence[float], point: Sequence[float], damping: float
    ) -> list[float]:
        """Return the next point: the damped Gauss-Newton step, limited in length and to the bounds."""
        bounds = [(log(BOUNDS[name][0]), log(BOUNDS[name][1])) for name in self.names]
        free = [
            index
            for index, (value, (low, high)) in enumerate(zip(point, bounds, strict=True))
            if (value > low or slope[index] < 0) and (value < high or slope[index] > 0)
        ]
        damped = [[matrix[i][j] + (damping * matrix[i][i] + 1e-9 if i == j else 0.0) for j in free] for i in free]
        moved = list(point)
        for index, by in zip(free, solve(damped, [-slope[index] for index in free]), strict=True):
            by = max(-LONGEST_STEP, min(by, LONGEST_STEP))
            low, high = bounds[index]
            moved[index] = max(low, min(point[index] + by, high))
        return moved


def _dot(one: Sequence[float], other: Sequence[float]) -> float:
    return sum(map(float.__mul__, one, other))


def solve(matrix: Sequence[Sequence[float]], right: Sequence[float]) -> list[float]:
    """Solve a symmetric positive definite system by Cholesky factorization."""
    size = len(right)
    lower = [[0.0] * size for _ in range(size)]
    for i in range(size):
        for j in range(i + 1):
            rest = matrix[i][j] - _dot(lower[i][:j], lower[j][:j])
            lower[i][j] = rest**0.5 if i == j else rest / lower[j][j]
    found = [0.0] * size
    for i in range(size):
        found[i] = (right[i] - _dot(lower[i][:i], found[:i])) / lower[i][i]
    for i in reversed(range(size)):
        found[i] = (found[i] - sum(lower[j][i] * found[j] for j in range(i + 1, size))) / lower[i][i]
    return found
