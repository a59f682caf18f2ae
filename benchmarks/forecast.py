"""Step-time forecasts against 2,000 published measurements: errors, and the ranking of layouts.

    python -m benchmarks.forecast [--data ../shared/data] [--seeds 2] [--folds 5] [--quick] [--fit]
    python -m benchmarks.forecast --leave-out          # whole stacks: the errors that `dslpar plan` prints

All scores are of runs that the constants were not fitted on, but of stacks (a framework on a cluster) that they were
fitted on. How wrong a forecast for another stack is, --leave-out tells (`benchmarks.leave_out`). The sets of each stack
are dealt into folds, and each fold is forecast with constants fitted on the others, starting from neutral ones. There
are two kinds: one set of constants for all stacks, and a set per stack, as from `dslpar plan --calibrate`. nanotron's
runs are filtered as the data's README says, and the unfiltered scores are beside. Ranking uses sets with at least four
layouts, each as fast as its fastest run. It scores whether the fastest is among the forecast's first one, three and
five, and how far behind it the best of the first three is. The runs of two sources are never fitted: Megatron-LM's of
2021 (arXiv 2104.04473, 2201.11990), and those of arXiv 2205.05198. Nor are mixtures of experts
(`benchmarks.published_mixtures`), and the runs of published_runs_new_stacks.csv.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from math import exp, sqrt
from statistics import mean, median

from benchmarks import leave_out
from benchmarks.forecast_fits import DATA, STACKS, UNFITTED, Data, data_of, fit, load, load_unfitted, thinned
from benchmarks.published_mixtures import mixture_runs
from benchmarks.published_runs import PublishedRun, by_set, selective_recompute_runs
from dslpar.forecast.calibrate import PRIOR_RUNS, Run, error_of, residuals_of
from dslpar.forecast.constants import Constants
from dslpar.forecast.step_time import terms_of
from dslpar.forecast.workload import Workload

RANKED = ("vTrain single", "vTrain multi", "BigScience", "nanotron")
LEAST_ALTERNATIVES = 4
NEAR = 1.05
"""A layout counts as good as its set's fastest if it is at most this much slower."""
QUICK_RUNS = 120
"""The largest number of runs per stack with --quick."""


def deal(data: Data, seed: int, folds: int) -> list[int]:
    """Return the fold of each run: the sets of each stack are shuffled and dealt out."""
    rng = random.Random(seed)
    fold_of: dict[str, int] = {}
    for stack in sorted({run.stack for run in data.runs}):
        sets = sorted({run.set for run in data.runs if run.stack == stack})
        rng.shuffle(sets)
        fold_of |= {name: place % folds for place, name in enumerate(sets)}
    return [fold_of[run.set] for run in data.runs]


@dataclass
class OutOfFold:
    """log(forecast / measured) of each run, with constants that were not fitted on its set."""

    one_set: list[float]
    calibrated: list[float]
    fits: list[Constants] = field(default_factory=list)


def cross_validate(data: Data, seed: int, folds: int, most: int | None = None) -> OutOfFold:
    """Forecast each run with constants of the other folds, fitted to at most `most` runs per stack."""
    fold_of = deal(data, seed, folds)
    found = OutOfFold([0.0] * len(data.runs), [0.0] * len(data.runs))
    for fold in range(folds):
        fitted = [i for stack in STACKS for i in data.of_stack(stack) if fold_of[i] != fold]
        train = thinned(data, fitted, most)
        constants = fit(data, train)
        found.fits.append(constants)
        for stack in (*STACKS, UNFITTED):
            held = [i for i in data.of_stack(stack, filtered=False) if fold_of[i] == fold]
            own = [i for i in train if data.runs[i].stack == stack]
            if held:
                _forecast(data, held, constants, found.one_set)
                _forecast(data, held, fit(data, own, constants, PRIOR_RUNS) if own else constants, found.calibrated)
    return found


def _forecast(data: Data, held: Sequence[int], constants: Constants, into: list[float]) -> None:
    residuals = residuals_of([data.terms[i] for i in held], constants)
    for index, residual in zip(held, residuals, strict=True):
        into[index] = residual


# Scores -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Errors:
    """Errors of forecasts, as shares."""

    median: float
    mean: float
    nine_of_ten: float

    @classmethod
    def of(cls, residuals: Sequence[float]) -> Errors:
        """Score log(forecast / measured) of some runs."""
        error = error_of(residuals)
        return cls(error.half, mean(abs(exp(each) - 1) for each in residuals), error.nine_of_ten)


@dataclass(frozen=True)
class Ranking:
    """The forecast's ordering of a set's alternatives: shares of the sets, and a mean correlation."""

    num_sets: int
    spearman: float
    top: Mapping[int, float]
    """By n: the share of sets whose fastest layout is among the first n."""
    near: float
    """The share of sets in which the best of the first three is within 5 % of the fastest."""


def ranking(sets: Sequence[tuple[Sequence[float], Sequence[float]]]) -> Ranking:
    """Score sets of (forecasts or another sort key, measured)."""
    places, near, correlations = [], [], []
    for keys, measured in sets:
        order = sorted(range(len(keys)), key=lambda i: keys[i])
        fastest = min(measured)
        places.append(next(place for place, i in enumerate(order) if measured[i] == fastest))
        near.append(min(measured[i] for i in order[:3]) <= NEAR * fastest)
        correlations.append(spearman(keys, measured))
    top = {n: mean(place < n for place in places) for n in (1, 3, 5)}
    return Ranking(len(sets), mean(correlations), top, mean(near))


def spearman(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the rank correlation, with mean ranks of equal values; 0 if one of the two does not vary."""
    first, second = ranks(one), ranks(other)
    middle = (len(first) + 1) / 2
    both = sum((a - middle) * (b - middle) for a, b in zip(first, second, strict=True))
    spread = sqrt(sum((a - middle) ** 2 for a in first) * sum((b - middle) ** 2 for b in second))
    return both / spread if spread else 0.0


def ranks(values: Sequence[float]) -> list[float]:
    """Return the rank of each value, from 1."""
    order = sorted(values)
    return [order.index(value) + (order.count(value) + 1) / 2 for value in values]


def ranked_sets(
    data: Data, stack: str, key: Callable[[int], object], filtered: bool = True
) -> list[tuple[list[float], list[float]]]:
    """Return `ranking`'s input for a stack's sets, ordered by a key of each run; runs of one layout count once."""
    chosen = data.of_stack(stack, filtered)
    made = []
    for members in by_set([data.runs[i] for i in chosen]).values():
        indices = _layouts(data, [chosen[i] for i in members])
        if len(indices) >= LEAST_ALTERNATIVES:
            keys = [key(i) for i in indices]
            order = sorted(set(keys))  # type: ignore[type-var]
            made.append(([float(order.index(each)) for each in keys], [data.runs[i].step_s for i in indices]))
    return made


def _layouts(data: Data, indices: Sequence[int]) -> list[int]:
    """Return the fastest run of each layout in a set: some were measured twice."""
    fastest: dict[Workload, int] = {}
    for index in sorted(indices, key=lambda i: data.runs[i].step_s):
        fastest.setdefault(data.runs[index].workload, index)
    return sorted(fastest.values())


def smallest_tensor(run: PublishedRun) -> object:
    """A rule of thumb: the smallest tensor parallelism, then the shortest pipeline, then the largest micro-batch."""
    workload = run.workload
    return workload.mesh.tensor.size, workload.mesh.pipe, -workload.micro_size


def bubble_and_share(run: PublishedRun) -> object:
    """Another rule: the smallest sum of bubble and tensor-ring traffic, then the largest micro-batch."""
    workload = run.workload
    size = workload.mesh.tensor.size
    bubble = (workload.mesh.pipe - 1) / (workload.chunks.num * workload.micro_batches)
    return bubble + (size - 1) / size, -workload.micro_size


# Table ------------------------------------------------------------------------------------------------------------


@dataclass
class Table:
    """Lines of results; lines with a target pass or miss."""

    missed: int = 0

    def line(self, name: str, seen: Sequence[float], target: float | None = None, at_least: bool = False) -> None:
        """Print the mean over seeds in percent, and the range."""
        value = mean(seen)
        span = f"{100 * min(seen):6.1f} ..{100 * max(seen):6.1f}" if len(seen) > 1 else ""
        text = f"{name:58s} {100 * value:6.1f} %  {span:16s}"
        if target is not None:
            passed = value >= target - 1e-9 if at_least else value <= target + 1e-9
            self.missed += not passed
            text += f"  {'>=' if at_least else '<='} {100 * target:5.1f} %  {'PASS' if passed else 'MISS'}"
        print(text.rstrip(), flush=True)


def report(data: Data, found: Sequence[OutOfFold]) -> int:
    """Print all scores, and return the number of missed targets."""
    table = Table()
    one, own = [each.one_set for each in found], [each.calibrated for each in found]
    print("one set of constants for all stacks, out of fold")
    for stack in STACKS:
        errors = _errors(data, one, stack)
        table.line(f"  {stack}: median error", [each.median for each in errors], 0.10)
        table.line(f"  {stack}: p90", [each.nine_of_ten for each in errors], 0.25)
    errors = _errors(data, one, UNFITTED)
    table.line(f"  {UNFITTED} of 2021, never fitted: median error", [each.median for each in errors])
    table.line("  nanotron, unfiltered: median error", [e.median for e in _errors(data, one, "nanotron", False)])
    print("constants of each stack's own, out of fold")
    means = {"vTrain single": 0.06, "vTrain multi": 0.09}
    for stack in STACKS:
        errors = _errors(data, own, stack)
        table.line(f"  {stack}: median error", [each.median for each in errors], 0.05)
        table.line(f"  {stack}: mean error", [each.mean for each in errors], means.get(stack))
        table.line(f"  {stack}: p90", [each.nine_of_ten for each in errors])
    _report_ranking(data, own, one, table)
    _report_selective(found, table)
    _report_mixtures(found, table)
    return table.missed


def _errors(data: Data, seeds: Sequence[Sequence[float]], stack: str, filtered: bool = True) -> list[Errors]:
    chosen = data.of_stack(stack, filtered)
    return [Errors.of([residuals[i] for i in chosen]) for residuals in seeds]


_TOP_TARGETS = {
    ("vTrain single", 3): 0.90,
    ("nanotron", 3): 0.80,
    ("nanotron", 5): 1.0,
    ("BigScience", 3): 1.0,
}


def _report_ranking(data: Data, own: Sequence[list[float]], one: Sequence[list[float]], table: Table) -> None:
    near: list[tuple[int, float]] = []
    for stack in RANKED:
        calibrated = [_ranking(data, stack, residuals) for residuals in own]
        uncalibrated = [_ranking(data, stack, residuals) for residuals in one]
        print(f"ranking {stack}: {calibrated[0].num_sets} sets, constants of its own")
        table.line("  Spearman's rank correlation", [each.spearman for each in calibrated])
        for n in (1, 3, 5):
            seen = [each.top[n] for each in calibrated]
            table.line(f"  fastest in our first {n}", seen, _TOP_TARGETS.get((stack, n)), at_least=True)
        table.line("  best of our first 3 within 5 % of the fastest", [each.near for each in calibrated])
        near += [(each.num_sets, each.near) for each in calibrated]
        table.line("  one set of constants: first 3", [each.top[3] for each in uncalibrated])
        naive = [_naive(data, stack, rule) for rule in (smallest_tensor, bubble_and_share)]
        table.line("  rule 'least tensor, then pipeline': first 3", [naive[0].top[3]])
        table.line("  rule 'bubble + tensor share': first 3", [naive[1].top[3]])
        if stack in ("nanotron", "vTrain single"):
            margin = [each.top[3] - max(rule.top[3] for rule in naive) for each in calibrated]
            table.line("  ours over the better rule, points", margin, 0.10, at_least=True)
    shares = [share * count for count, share in near]
    table.line(
        "all sets: best of our first 3 within 5 % of the fastest", [sum(shares) / sum(n for n, _ in near)], 0.9, True
    )
    unfiltered = [_ranking(data, "nanotron", residuals, filtered=False) for residuals in own]
    table.line("nanotron, unfiltered: fastest in our first 3", [each.top[3] for each in unfiltered])


def _ranking(data: Data, stack: str, residuals: Sequence[float], filtered: bool = True) -> Ranking:
    return ranking(ranked_sets(data, stack, lambda i: exp(residuals[i]) * data.runs[i].step_s, filtered))


def _naive(data: Data, stack: str, rule: Callable[[PublishedRun], object]) -> Ranking:
    return ranking(ranked_sets(data, stack, lambda i: rule(data.runs[i])))


def _report_selective(found: Sequence[OutOfFold], table: Table) -> None:
    """Print the error on table 5 of arXiv 2205.05198, whose runs are never fitted."""
    runs = selective_recompute_runs()
    terms = [Run(terms_of(run.workload, run.device, run.nodes), run.step_s) for run in runs]
    seeds = []
    for each in found:
        fitted = [residuals_of(terms, constants) for constants in each.fits]
        seeds.append(Errors.of([median(column) for column in zip(*fitted, strict=True)]).mean)
    table.line("2205.05198, table 5: mean error of its 8 steps", seeds, 0.05)


def _report_mixtures(found: Sequence[OutOfFold], table: Table) -> None:
    """Print the error on mixtures whose tokens are sent to experts, which no constant was fitted on."""
    mixtures = data_of(mixture_runs())
    for run, terms in zip(mixtures.runs, mixtures.terms, strict=True):
        seeds = [Errors.of([residuals_of([terms], each)[0] for each in one.fits]).median for one in found]
        table.line(f"{run.set}, {run.stack}, never fitted: error of its step", seeds)


def _new_defaults(data: Data) -> Iterator[str]:
    """Yield constants fitted to all runs; their errors are those of --leave-out."""
    constants = fit(data, [i for stack in STACKS for i in data.of_stack(stack)])
    yield from (f"    {item.name}: float = {getattr(constants, item.name):.4g}" for item in fields(constants))


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the scores."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.forecast", description=__doc__.split("\n")[0])
    parser.add_argument("--data", default=DATA, help="the folder with published_runs.csv")
    parser.add_argument("--seeds", type=int, default=2, help="ways to deal the sets into folds")
    parser.add_argument("--folds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help=f"fit to {QUICK_RUNS} runs of a stack, one seed, 3 folds")
    parser.add_argument("--fit", action="store_true", help="print new defaults, fitted to all runs")
    help = "leave out whole stacks and effects instead, and print the errors that dslpar plan prints"
    parser.add_argument("--leave-out", action="store_true", help=help)
    options = parser.parse_args(arguments)
    if not os.path.exists(os.path.join(options.data, "published_runs.csv")):
        print(f"no published_runs.csv in {options.data}: nothing to score", file=sys.stderr)
        return 2
    data = load(options.data)
    seeds, folds, most = (1, 3, QUICK_RUNS) if options.quick else (options.seeds, options.folds, None)
    if options.leave_out:
        print(
            *leave_out.report(leave_out.leave_out(data, load_unfitted(options.data), data_of(mixture_runs()))), sep="\n"
        )
        return 0
    found = [cross_validate(data, seed, folds, most) for seed in range(seeds)]
    missed = report(data, found)
    if options.fit:
        print(*_new_defaults(data), sep="\n")
    print(f"{missed} targets missed" if missed else "all targets reached")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
