"""Search all legal layouts of a job's model on the same ranks and devices, and order those that fit by time.

    found = search(workloads, machine)
    next(found.fastest())              # the fastest layout that fits
    next(found.repairs())              # the layout that fits with the fewest changes to the config

The search tries all tensor modes and sizes, pipelines, stages per rank, schedules, ZeRO stages, micro-batches and
recomputation. For long sequences it tries each form of context parallelism. The global batch stays the same.
A layout that *fits* here is one that does not thrash (`Forecast.thrashes`).

Some layouts are left out before their time is computed, because they are illegal or cannot be the best:

- sizes that do not divide,
- ZeRO stages that hold more memory and send no less than the next stage,
- recomputation, if the same layout fits without it,
- forms of context parallelism, if another form is faster and holds no more memory, or is faster and fits.

A lint rule may still refuse a layout, so callers should lint it before they show it.

Terms of this module: *alternatives* are layouts that differ only in recomputation, in order of their memory. A *series*
has such alternatives for growing micro-batch sizes. The queue of a best-first search holds series, sizes of a series,
and layouts, ordered by a lower bound of their time. So memory and time are computed only for layouts that may be among
the first. The searches of Alpa, Galvatron and vTrain also prune by memory and rank by an analytic model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush
from typing import NamedTuple

from dslpar.costs.model_costs import ModelCosts
from dslpar.forecast.candidate import Candidate, SameLayout, Workloads
from dslpar.forecast.part_terms import part_terms
from dslpar.forecast.part_times import PartTimes, part_times
from dslpar.forecast.plan import Fitting, Forecast, Machine, forecast
from dslpar.forecast.search_space import Alternatives, Pins, anything, contexts, divides, has_costs, series
from dslpar.forecast.step_time import least_s
from dslpar.schema.sections import ContextParallel, TensorParallel


@dataclass(frozen=True, kw_only=True)
class Option:
    """A layout with its forecast."""

    candidate: Candidate
    forecast: Forecast

    @property
    def alternatives(self) -> Alternatives:
        """A list of the candidate alone, for the same interface as `_Series` and `_Step`, which have several."""
        return [self.candidate]

    @property
    def step_s(self) -> float:
        """Seconds per step."""
        return self.forecast.time.step_s

    @property
    def bytes(self) -> float:
        """Memory of the binding rank."""
        return self.forecast.binding.total


def _nothing(candidate: Candidate) -> bool:
    return False


_Place = tuple[int, int]
"""Index of a series, and index of a micro-batch size in it: they break ties between equally fast layouts."""


class Found:
    """Result of a search: iterators over its layouts.

    Memory and time are computed lazily. A layout is forecast only after all layouts that may be faster.
    """

    def __init__(self, own: Option, series: Sequence[_Series]) -> None:
        self.own = own
        """The config's own layout."""
        self.num_legal = sum(len(alternatives) for each in series for alternatives in each.growing)
        """Number of layouts in the search, including those that do not fit or that a lint rule refuses."""
        self._series = series

    def fastest(self) -> Iterator[Option]:
        """Yield the layouts that fit, the fastest first."""
        return self._in_order(lambda candidate: 0, _nothing)

    def repairs(self, covered: Pins = _nothing) -> Iterator[Option]:
        """Yield the layouts that fit, those with the fewest changes to the config first, and the fastest among equals.

        Layouts for which `covered` returns True are skipped. Its answer may change while the iterator runs.
        """
        return self._in_order(lambda candidate: candidate.changes(self.own.candidate), covered)

    def _in_order(self, rank: Callable[[Candidate], int], covered: Pins) -> Iterator[Option]:
        """Yield the layouts that fit, those with the lowest `rank` first, and the fastest among equals.

        The queue holds items under a key (rank, seconds). An item leaves the queue when its key is the smallest, and is
        replaced by items with better known seconds:

        1. A series has the lower bound of all its layouts. It is replaced by its micro-batch sizes.
        2. A size has first a bound from the series' largest micro-batch, then the bound from its own costs.
        3. The size's first layout that fits is forecast and has its forecast time. It is yielded.
        """
        waiting: list[tuple[int, float, _Place, _Series | _Step | Option]] = []

        def wait(item: _Series | _Step | Option, bound_s: float, place: _Place) -> None:
            heappush(waiting, (min(map(rank, item.alternatives)), bound_s, place, item))

        for number, each in enumerate([each for each in self._series if each.is_of_use]):
            if each.may_fit:  # `is_of_use` has already tested some series
                wait(each, each.bound_s, (number, 0))
        while waiting:
            _, _, place, item = heappop(waiting)
            if isinstance(item, Option):
                yield item
            elif all(map(covered, item.alternatives)):
                continue
            elif isinstance(item, _Series):
                for size in range(len(item.growing)):
                    wait(_Step(item, size), item.bound_from_largest_s(size), (place[0], size))
            elif not item.is_bounded:
                wait(item._replace(is_bounded=True), item.series.least_s(item.size), place)
            elif (option := item.series.option(item.size)) is not None:
                wait(option, option.step_s, place)

    def smallest(self) -> Iterator[Option]:
        """Yield the smallest layout of each series, whether it fits or not; those that need the least memory first."""
        options = [each.smallest for each in self._series if each.growing]
        return iter(sorted(options, key=lambda each: each.bytes))

    @cached_property
    def fitting(self) -> tuple[Option, ...]:
        """All layouts that fit, the fastest first."""
        return tuple(self.fastest())

    @property
    def pareto(self) -> list[Option]:
        """Layouts that need less memory than every faster layout, the fastest first."""
        front: list[Option] = []
        for option in self.fitting:
            if not front or option.bytes < front[-1].bytes:
                front.append(option)
        return front


def search(workloads: Workloads, machine: Machine, pins: Pins = anything) -> Found:
    """Search all layouts that `pins` accepts."""
    own = Option(candidate=workloads.own, forecast=forecast(workloads.base, machine))
    firsts: dict[tuple[object, ...], list[_Series]] = {}
    made: list[_Series] = []
    last: tuple[SameLayout, Fitting] | None = None
    for growing, is_first in _Forms(workloads, machine, pins).fastest_first(series(workloads, pins)):
        candidate = growing[0][0]
        same_layout, known = workloads.same_layout(candidate), firsts.setdefault(_shape(candidate), [])
        if last is None or last[0] is not same_layout:
            last = same_layout, Fitting(machine)
        made.append(_Series(growing, *last, () if is_first else known))
        if is_first:
            known.append(made[-1])
    return Found(own, made)


class _Series:
    """Layouts with growing micro-batch sizes, each with its alternatives, and cached results of their forecasts.

    `instead` has the series of faster forms of context parallelism with otherwise equal settings. If all of them fit
    with their smallest micro-batch, this series is not needed.
    """

    def __init__(
        self, growing: list[Alternatives], same_layout: SameLayout, fitting: Fitting, instead: Sequence[_Series]
    ) -> None:
        self.growing, self._same_layout, self._fitting, self._instead = growing, same_layout, fitting, instead
        self._known: list[Option | None] = []

    @property
    def is_of_use(self) -> bool:
        """Return whether this series is needed: `instead` is empty, or has a series that does not fit."""
        return not self._instead or any(each.option(0) is None for each in self._instead)

    @property
    def may_fit(self) -> bool:
        """Return whether a layout of the series may fit; True before the smallest micro-batch has been tested."""
        return not self._known or self._known[0] is not None

    def option(self, index: int) -> Option | None:
        """Return the first alternative of size `index` that fits, which is the fastest; None if no alternative fits."""
        known = self._known
        while len(known) <= index and (not known or known[-1] is not None):
            known.append(self._first_that_fits(self.growing[len(known)]))
        return known[index] if index < len(known) else None  # a larger micro-batch needs even more

    def _first_that_fits(self, alternatives: Alternatives) -> Option | None:
        for candidate in alternatives:
            made = self._fitting.forecast(self._same_layout.workload(candidate))
            if made is not None:
                return Option(candidate=candidate, forecast=made)
        return None

    @property
    def smallest(self) -> Option:
        """The layout with the smallest micro-batch and the most recomputation, whether it fits or not."""
        candidate = self.growing[0][-1]
        workload = self._same_layout.workload(candidate)
        return Option(candidate=candidate, forecast=forecast(workload, self._fitting.machine))

    @cached_property
    def alternatives(self) -> Alternatives:
        """All of the series' layouts."""
        return [each for alternatives in self.growing for each in alternatives]

    @cached_property
    def bound_s(self) -> float:
        """Lower bound of the seconds per step of all layouts: that of the smallest micro-batch, which idles least."""
        comparable = all(map(self._is_part_of_largest, range(len(self.growing))))
        return self.bound_from_largest_s(0) if comparable else 0.0

    def least_s(self, index: int) -> float:
        """Return a lower bound of the seconds per step for micro-batch size `index`, from the size's own costs."""
        return self._least_s(index, index)

    def bound_from_largest_s(self, index: int) -> float:
        """Return a lower bound that never exceeds `least_s(index)`, from the times of the largest micro-batch.

        The bound holds because time per sample falls with the micro-batch size: kernels fill a device better, and
        launches and weights cost less per sample. The bound is 0 if the sizes cannot be compared.
        """
        return self._least_s(index, len(self.growing) - 1) if self._is_part_of_largest(index) else 0.0

    def _is_part_of_largest(self, index: int) -> bool:
        one, largest = self.growing[index][0], self.growing[-1][0]
        return largest.micro_size % one.micro_size == 0 and one.interval == largest.interval

    def _least_s(self, index: int, known: int) -> float:
        """Return the lower bound for size `index`, from the times of the model's parts in micro-batch size `known`."""
        fastest, timed = self.growing[index][0], self.growing[known][0]
        costs = self._same_layout.costs_of(timed.micro_size)
        assert costs is not None, "layers that can be cut so"
        layers, schedule = self._same_layout.layers_on_ranks(costs), self._same_layout.schedule(fastest)
        parts = self._part_times(costs, timed)
        if index == known:
            return least_s(parts, layers, schedule)
        if costs.units:
            return 0.0  # each unit's share of the whole changes with the micro-batch
        if fastest.split:
            parts = parts._replace(layer=parts.layer._replace(idle=0.0))  # the ratio depends on the micro-batch size
        return least_s(parts, layers, schedule) * fastest.micro_size / timed.micro_size

    def _part_times(self, costs: ModelCosts, candidate: Candidate) -> PartTimes:
        """Return the times of a model's parts, cached in its costs because many pipelines share them."""
        key = "search", candidate.split, candidate.interval, candidate.pipe > 1
        machine = self._fitting.machine
        if key not in costs.kept or costs.kept[key][0] is not machine:
            workload = self._same_layout.workload(candidate)
            terms = part_terms(workload, machine.device.computing_in(workload.dtype), machine.nodes)
            times = part_times(terms, machine.constants, splits_backward=candidate.split)
            costs.kept[key] = machine, times
        found: PartTimes = costs.kept[key][1]
        return found


class _Step(NamedTuple):
    """One micro-batch size of a series, as an item of the queue."""

    series: _Series
    size: int
    """Index of the micro-batch size in `series.growing`."""
    is_bounded: bool = False
    """True if the item's key is the lower bound from the size's own costs; else it is from the largest size's."""

    @property
    def alternatives(self) -> Alternatives:
        return self.series.growing[self.size]


def _shape(candidate: Candidate) -> tuple[object, ...]:
    """Return the settings except micro-batch size, recomputation and the form of context parallelism."""
    size = 1 if candidate.context is None else candidate.context.size
    return (candidate.tensor, size, candidate.pipe, candidate.chunks, candidate.split, candidate.zero, candidate.expert)


class _Forms:
    """Ranks the forms of context parallelism (ring, ulysses, hybrid) of each size by time, and drops useless ones.

    A form is useless if a faster form holds no more memory.
    """

    def __init__(self, workloads: Workloads, machine: Machine, pins: Pins) -> None:
        self.workloads, self.machine, self.pins = workloads, machine, pins
        self._of_use: dict[tuple[TensorParallel, int], list[ContextParallel | None]] = {}

    def fastest_first(self, all_series: Iterator[list[Alternatives]]) -> Iterator[tuple[list[Alternatives], bool]]:
        """Yield (series, True) for the fastest form and the config's own, then (series, False) for other useful forms.

        Other forms hold less memory. They are needed only if the fastest form with the same other settings does not
        fit with its smallest micro-batch.
        """
        others: list[list[Alternatives]] = []
        for growing in all_series:
            if not growing:
                continue
            place = self._place(growing[0][0])
            if place == 0:
                yield growing, True
            elif place is not None:
                others.append(growing)
        yield from ((growing, False) for growing in others)

    def _place(self, candidate: Candidate) -> int | None:
        """Return the form's place among the useful forms, 0 for the fastest; None if the form is useless.

        The config's own form, and no context parallelism, always have place 0.
        """
        tensor, context = candidate.tensor, candidate.context
        if context is None or context == self.workloads.own.context:
            return 0
        key = tensor, context.size
        if key not in self._of_use:
            self._of_use[key] = self._without_beaten(candidate, context.size)
        of_use = self._of_use[key]
        return of_use.index(context) if context in of_use else None

    def _without_beaten(self, candidate: Candidate, size: int) -> list[ContextParallel | None]:
        """Return the useful forms of a context-parallel size, the fastest first."""
        forms = []
        for form in contexts(self.workloads, size, candidate.tensor):
            other = candidate._replace(context=form)
            both = self.workloads, other.tensor, form
            if divides(*both) and has_costs(*both) and self.pins(other):
                forms.append((*self._takes(other), form))
        kept: list[ContextParallel | None] = []
        least = float("inf")
        for _, held, form in sorted(forms, key=lambda each: each[:2]):
            if held < least:
                kept.append(form)
                least = held
        return kept

    def _takes(self, candidate: Candidate) -> tuple[float, float]:
        """Return a layer's seconds, and its saved elements with attention's temporaries, which differ by form."""
        workload = self.workloads.workload(candidate)
        device = self.machine.device.computing_in(workload.dtype)
        costs = workload.costs
        held = [costs.layer.memory.saved, costs.attention_working]
        elements = sum(float(each.elements) + 2 * float(each.wide) for each in held)
        parts = part_terms(workload, device, self.machine.nodes)
        return part_times(parts, self.machine.constants).layer.seconds, elements


def nearest(workloads: Workloads, machine: Machine) -> Iterator[Option]:
    """Yield the layouts that fit and differ from the config in one setting, the fastest first."""
    own = workloads.own
    return search(workloads, machine, lambda candidate: candidate.changes(own) == 1).repairs()


def leaders(options: Sequence[Option], error: float) -> list[Option]:
    """Return the options that are slower than the first by at most the share `error`; `options[0]` is the fastest."""
    return [option for option in options if option.step_s <= options[0].step_s * (1 + error)]
