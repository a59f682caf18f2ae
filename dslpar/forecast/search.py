"""Every legal layout of a job's model on as many ranks and devices: what fits, how fast it is, which is better.

    found = search(workloads, machine)
    next(found.fastest())              # the fastest that fits
    next(found.repairs())              # the nearest to the config, the fewest changes first

Tried are all tensor modes and sizes, pipelines, chunks and schedules, ZeRO stages, micro-batches and recomputation, and
of long sequences context parallelism in each of its forms; the global batch stays. What cannot be legal, or cannot win,
is left out before its time is computed: sizes that do not divide; ZeRO stages that hold more and send no less than the
next one; recomputation where all fits without it; forms of context parallelism of which another is faster and holds no
more, or fits. A rule of lint may still refuse a layout: whoever shows one lints it first.

That memory prunes, and an analytic model ranks, is how Alpa's, Galvatron's and vTrain's searches work. Here layouts
come in the order of a lower bound of their time, as in any best-first search, so that memory and time are computed of
those alone that may be among the first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from heapq import heapify, heappop, heappush

from dslpar.core.frozen import frozen
from dslpar.core.mesh import Tensor
from dslpar.core.named_tuple import NamedTuple
from dslpar.forecast.candidate import NO_TENSOR, Alike, Candidate, Workloads, is_of_libai
from dslpar.forecast.model_costs import ModelCosts
from dslpar.forecast.part_terms import part_terms
from dslpar.forecast.part_times import PartTimes, part_times
from dslpar.forecast.plan import Fitting, Forecast, Machine, forecast
from dslpar.forecast.step_time import least_s
from dslpar.layout.divisors import divisors, least_micro_size
from dslpar.layout.family import conditions, is_chain, splits_sequences
from dslpar.layout.modes import MODES, combines, context_forms
from dslpar.layout.resolve import defers_nothing, heads_of, offloads, with_zero
from dslpar.schema.sections import ContextParallel, TensorParallel

MOST_MICRO_SIZES = 6
"""Micro-batches that are tried of each layout: the least, and its doubles."""
CHUNKS = (2, 4)
LONG, LEAST_PART = 8192, 4096
"""Tokens of a sample from which on context parallelism is tried where the config has none, and those that a rank then
has of it at the least: of shorter ones replicas send less."""


@frozen
class Option:
    """A layout with its forecast."""

    candidate: Candidate
    forecast: Forecast

    @property
    def step_s(self) -> float:
        """Seconds a step."""
        return self.forecast.time.step_s

    @property
    def bytes(self) -> float:
        """Memory of the binding rank."""
        return self.forecast.binding.total


Pins = Callable[[Candidate], bool]
"""Whether a candidate has the values that are fixed."""


def anything(candidate: Candidate) -> bool:
    """Fix nothing."""
    return True


def _nothing(candidate: Candidate) -> bool:
    return False


class Found:
    """The layouts of a search: which of them fit, and how fast they are, is found as far as it is asked for.

    A layout's memory and time are not asked for before those that may be faster have been yielded.
    """

    def __init__(self, own: Option, series: Sequence[_Series]) -> None:
        self.own = own
        self.num_legal = sum(len(alternatives) for each in series for alternatives in each.growing)
        """Layouts that lint may allow, whether they fit or not."""
        self._series = series

    def fastest(self) -> Iterator[Option]:
        """Yield what fits, the fastest first."""
        return self._in_order(lambda candidate: 0, _nothing)

    def repairs(self, covered: Pins = _nothing) -> Iterator[Option]:
        """Yield what fits, the fewest changes first, and of as many the fastest; nothing that is `covered` by then."""
        return self._in_order(lambda candidate: candidate.changes(self.own.candidate), covered)

    def _in_order(self, rank: Callable[[Candidate], int], covered: Pins) -> Iterator[Option]:
        """Yield what fits, the lowest rank first, and of one rank the fastest.

        Each waits with what is known of it: its rank, then what it takes at the least, then what it takes.
        """
        waiting: list[tuple[int, float, int, _Step | Option, bool]] = []
        for each in [each for each in self._series if each.is_of_use]:
            if each.may_fit:  # known by then of those that stand instead of others
                for number in range(len(each.growing)):
                    step = _Step(each, number)
                    waiting.append((min(map(rank, step.alternatives)), 0.0, len(waiting), step, False))
        heapify(waiting)
        while waiting:
            least, _, number, item, has_least_s = heappop(waiting)
            if isinstance(item, Option):
                yield item
            elif not has_least_s:
                if not all(map(covered, item.alternatives)):
                    heappush(waiting, (least, item.least_s, number, item, True))
            elif (option := item.option) is not None:
                heappush(waiting, (rank(option.candidate), option.step_s, number, option, True))

    @cached_property
    def fitting(self) -> tuple[Option, ...]:
        """All that fit, the fastest first."""
        return tuple(self.fastest())

    @property
    def pareto(self) -> list[Option]:
        """Return those of which no other is as fast with less memory, the fastest first."""
        front: list[Option] = []
        for option in self.fitting:
            if not front or option.bytes < front[-1].bytes:
                front.append(option)
        return front


def search(workloads: Workloads, machine: Machine, pins: Pins = anything) -> Found:
    """Look through all layouts; `pins` says which are asked for."""
    own = Option(candidate=workloads.own, forecast=forecast(workloads.base, machine))
    firsts: dict[tuple[object, ...], list[_Series]] = {}
    made: list[_Series] = []
    last: tuple[Alike, Fitting] | None = None
    for growing, is_first in _Forms(workloads, machine, pins).fastest_first(_series(workloads, pins)):
        candidate = growing[0][0]
        alike, known = workloads.alike(candidate), firsts.setdefault(_shape(candidate), [])
        if last is None or last[0] is not alike:
            last = alike, Fitting(machine)
        made.append(_Series(growing, *last, () if is_first else known))
        if is_first:
            known.append(made[-1])
    return Found(own, made)


class _Series:
    """Layouts with growing micro-batches, each with its alternatives: which of them fit.

    If all of `instead` fit, which are faster, none of these is of use.
    """

    def __init__(self, growing: list[Alternatives], alike: Alike, fitting: Fitting, instead: Sequence[_Series]) -> None:
        self.growing, self._alike, self._fitting, self._instead = growing, alike, fitting, instead
        self._known: list[Option | None] = []
        self._least_s: dict[int, float] = {}

    @property
    def is_of_use(self) -> bool:
        """Whether nothing is there instead that fits."""
        return not self._instead or any(each.option(0) is None for each in self._instead)

    @property
    def may_fit(self) -> bool:
        """Whether some of it may fit, as far as is known."""
        return not self._known or self._known[0] is not None

    def option(self, index: int) -> Option | None:
        """Return the first of the alternatives that fits, which is the fastest; None where none does."""
        known = self._known
        while len(known) <= index and (not known or known[-1] is not None):
            known.append(self._first_that_fits(self.growing[len(known)]))
        return known[index] if index < len(known) else None  # with a larger micro-batch it needs more yet

    def _first_that_fits(self, alternatives: Alternatives) -> Option | None:
        for candidate in alternatives:
            made = self._fitting.forecast(self._alike.workload(candidate))
            if made is not None:
                return Option(candidate=candidate, forecast=made)
        return None

    def least_s(self, index: int) -> float:
        """Return the seconds that a step of these alternatives takes at the least."""
        if index not in self._least_s:
            fastest = self.growing[index][0]
            costs = self._alike.costs_of(fastest.micro_size)
            assert costs is not None, "layers that can be cut so"
            layers, schedule = self._alike.layers_on_ranks(costs), self._alike.schedule(fastest)
            self._least_s[index] = least_s(self._part_times(costs, fastest), layers, schedule)
        return self._least_s[index]

    def _part_times(self, costs: ModelCosts, candidate: Candidate) -> PartTimes:
        """Return what the parts of a model take: the same ones in many pipelines, so they are kept with the costs."""
        key = "search", candidate.split, candidate.interval, candidate.pipe > 1
        machine = self._fitting.machine
        if key not in costs.kept or costs.kept[key][0] is not machine:
            workload = self._alike.workload(candidate)
            terms = part_terms(workload, machine.device.computing_in(workload.dtype), machine.nodes)
            times = part_times(terms, machine.constants, splits_backward=candidate.split)
            costs.kept[key] = machine, times
        found: PartTimes = costs.kept[key][1]
        return found


class _Step(NamedTuple):
    """One size of a micro-batch of a series."""

    series: _Series
    number: int

    @property
    def alternatives(self) -> Alternatives:
        return self.series.growing[self.number]

    @property
    def least_s(self) -> float:
        return self.series.least_s(self.number)

    @property
    def option(self) -> Option | None:
        return self.series.option(self.number)


def _shape(candidate: Candidate) -> tuple[object, ...]:
    """Return what candidates have in common that differ in micro-batch, recomputation and the form of a context."""
    size = 1 if candidate.context is None else candidate.context.size
    return candidate.tensor, size, candidate.pipe, candidate.chunks, candidate.split, candidate.zero


class _Forms:
    """Forms of context parallelism over as many ranks: which is the fastest, and which hold less than faster ones."""

    def __init__(self, workloads: Workloads, machine: Machine, pins: Pins) -> None:
        self.workloads, self.machine, self.pins = workloads, machine, pins
        self._of_use: dict[tuple[TensorParallel, int], list[ContextParallel | None]] = {}

    def fastest_first(self, series: Iterator[list[Alternatives]]) -> Iterator[tuple[list[Alternatives], bool]]:
        """Yield the series of the fastest forms and of the config's own; then those of others that hold less.

        The second value says which it is: others are of use where the fastest form of their shape does not fit, however
        small the micro-batch.
        """
        others: list[list[Alternatives]] = []
        for growing in series:
            if not growing:
                continue
            place = self._place(growing[0][0])
            if place == 0:
                yield growing, True
            elif place is not None:
                others.append(growing)
        yield from ((growing, False) for growing in others)

    def _place(self, candidate: Candidate) -> int | None:
        """Return a form's place among those of use, the fastest first; None: one is faster that holds no more."""
        tensor, context = candidate.tensor, candidate.context
        if context is None or context == self.workloads.own.context:
            return 0
        key = tensor, context.size
        if key not in self._of_use:
            self._of_use[key] = self._without_beaten(candidate, context.size)
        of_use = self._of_use[key]
        return of_use.index(context) if context in of_use else None

    def _without_beaten(self, candidate: Candidate, size: int) -> list[ContextParallel | None]:
        """Return the forms of a size of which no other is faster and holds no more, the fastest first."""
        forms = []
        for form in _contexts(self.workloads, size, candidate.tensor):
            other = candidate._replace(context=form)
            both = self.workloads, other.tensor, form
            if _divides(*both) and _has_costs(*both) and self.pins(other):
                forms.append((*self._takes(other), form))
        kept: list[ContextParallel | None] = []
        least = float("inf")
        for _, held, form in sorted(forms, key=lambda each: each[:2]):
            if held < least:
                kept.append(form)
                least = held
        return kept

    def _takes(self, candidate: Candidate) -> tuple[float, float]:
        """Return a layer's seconds, and the elements in which forms differ: what is saved, and attention's own."""
        workload = self.workloads.workload(candidate)
        device = self.machine.device.computing_in(workload.dtype)
        costs = workload.costs
        held = [costs.layer.memory.saved, costs.attention_working]
        elements = sum(float(each.elements) + 2 * float(each.wide) for each in held)
        parts = part_terms(workload, device, self.machine.nodes)
        return part_times(parts, self.machine.constants).layer.seconds, elements


def nearest(workloads: Workloads, machine: Machine) -> Iterator[Option]:
    """Yield what fits with one setting changed, the fastest first."""
    own = workloads.own
    return search(workloads, machine, lambda candidate: candidate.changes(own) == 1).repairs()


def candidates(workloads: Workloads) -> Iterator[Candidate]:
    """Yield every layout that a search may try."""
    for growing in _series(workloads, anything):
        for alternatives in growing:
            yield from alternatives


Alternatives = list[Candidate]
"""Layouts that need less and less memory, and take longer."""


def _series(workloads: Workloads, pins: Pins) -> Iterator[list[Alternatives]]:
    """Yield layouts with growing micro-batches, each with its alternatives."""
    own = workloads.own.interval
    intervals: tuple[int, ...] = (0, own, 1) if own > 1 else (0, 1)
    if workloads.base.costs.units and not any(workloads.base.costs.recomputable):
        intervals = (own,)
    for tensor, context, pipe, micro_sizes in _shapes(workloads):
        ranks = pipe * workloads.cuboid(tensor, context).size
        for chunks, split in _schedules(workloads, pipe):
            cuboid = with_zero(workloads.cuboid(tensor, context), workloads.job.spec.model, 1, pipe)
            copies = workloads.job.mesh.world_size // ranks * (cuboid.d if cuboid.zero_over_d else 1)
            for zero in _stages_of_zero(workloads, copies, pipe):
                growing = []
                for micro_size in micro_sizes:
                    if not _goes_with(workloads, ranks, pipe, micro_size, chunks, split):
                        continue
                    made = [
                        Candidate(pipe, chunks, split, tensor, context, zero, micro_size, interval)
                        for interval in intervals
                    ]
                    growing.append([each for each in made if pins(each)])
                yield [alternatives for alternatives in growing if alternatives]


Shape = tuple[TensorParallel, ContextParallel | None, int, list[int]]


def _shapes(workloads: Workloads) -> Iterator[Shape]:
    """Yield tensor and context parallelism, pipeline and micro-batches that go with model, world and global batch."""
    job, model = workloads.job, workloads.job.spec.model
    world, layers, chain = job.mesh.world_size, sum(workloads.base.counts), is_chain(model)
    for context_size in _context_sizes(workloads):
        beside = world // context_size
        for tensor, context in _legal(workloads, beside, context_size):
            cuboid = workloads.cuboid(tensor, context)
            for pipe in divisors(world // cuboid.size):
                samples, rest = divmod(job.batch.global_size, world // (cuboid.size * pipe))
                if pipe > layers or rest:
                    continue
                if chain:
                    yield tensor, context, pipe, _micro_sizes(samples, cuboid, workloads.own.micro_size)
                elif pipe == 1 and samples % least_micro_size(cuboid) == 0:
                    yield tensor, context, pipe, [samples]


def _context_sizes(workloads: Workloads) -> list[int]:
    """Return sizes of context parallelism: 1, the config's own, and of long sequences those that leave long parts."""
    job, own = workloads.job, workloads.own.context
    sizes = {1} if own is None else {1, own.size}
    if job.seq_len >= LONG and splits_sequences(job.spec.model) and not is_of_libai(job.spec):
        sizes |= {size for size in divisors(job.mesh.world_size) if job.seq_len // size >= LEAST_PART}
    return sorted(sizes)


def _legal(
    workloads: Workloads, world: int, context_size: int
) -> Iterator[tuple[TensorParallel, ContextParallel | None]]:
    """Yield tensor parallelism within so many ranks, beside context parallelism of a size, by which sizes divide."""
    for size in divisors(world):
        for tensor in tensors(size, workloads.own.tensor):
            for context in _contexts(workloads, context_size, tensor):
                if not _divides(workloads, tensor, context) or _worse(workloads, tensor, context):
                    continue
                if _has_costs(workloads, tensor, context):
                    yield tensor, context


def _divides(workloads: Workloads, tensor: TensorParallel, context: ContextParallel | None) -> bool:
    job = workloads.job
    if is_of_libai(job.spec) and tensor not in (NO_TENSOR, TensorParallel(size=tensor.size, mode="1d")):
        return False
    return all(one.holds for one in conditions(job.spec.model, workloads.cuboid(tensor, context), job.seq_len))


def _has_costs(workloads: Workloads, tensor: TensorParallel, context: ContextParallel | None) -> bool:
    """Whether the model's layers can be cut so, in the smallest micro-batch."""
    # As ZeRO has them without a pipeline: of a cuboid that differs in this alone a trace would be another.
    cuboid = with_zero(workloads.cuboid(tensor, context), workloads.job.spec.model, 1, 1)
    return workloads.has_costs(cuboid, least_micro_size(cuboid))


def _worse(workloads: Workloads, tensor: TensorParallel, context: ContextParallel | None) -> bool:
    """Whether it is 1d without sequence=True, which sends as much and holds more, where that is legal.

    The config's own is tried all the same.
    """
    if tensor.mode != "1d" or tensor.sequence or tensor == workloads.own.tensor:
        return False
    with_sequence = TensorParallel(size=tensor.size, mode="1d", sequence=True)
    return _divides(workloads, with_sequence, context) and _has_costs(workloads, with_sequence, context)


def _contexts(workloads: Workloads, size: int, tensor: TensorParallel) -> Iterator[ContextParallel | None]:
    """Yield the forms of context parallelism of a size beside a mode; that of the config keeps its options."""
    if size == 1:
        yield None
        return
    own = workloads.own.context
    context = own if own is not None and own.size == size else ContextParallel(size=size, impl="ring")
    if combines(tensor, context):
        forms = context_forms(tensor, context, heads_of(workloads.job.spec.model), workloads.per_node)
        yield from (each for _, each in forms.values())


def tensors(size: int, own: TensorParallel) -> Iterator[TensorParallel]:
    """Yield the forms of tensor parallelism over so many ranks; that of the config keeps its options."""
    if size == 1:
        yield NO_TENSOR
        return
    if own.size == size:
        yield own
    for made in _plain_tensors(size):
        if made.size != own.size or made.mode != own.mode or made.sequence != own.sequence:
            yield made


def _plain_tensors(size: int) -> Iterator[TensorParallel]:
    """Yield each mode's form; but 2.5d, whose depth does what as many data ranks do, and no better."""
    yield TensorParallel(size=size, mode="1d")
    yield TensorParallel(size=size, mode="1d", sequence=True)
    for mode in ("2d", "3d"):
        made = TensorParallel(size=size, mode=mode)
        if MODES[mode].axes(made) is not None:
            yield made


def _micro_sizes(samples: int, cuboid: Tensor, own: int) -> list[int]:
    """Return sizes of micro-batches that a data rank's samples divide by."""
    least = least_micro_size(cuboid)
    sizes = {least << power for power in range(MOST_MICRO_SIZES)} | {own}
    return sorted(size for size in sizes if size % least == 0 and samples % size == 0)


def _schedules(workloads: Workloads, pipe: int) -> Iterator[tuple[int, bool]]:
    """Yield chunks, and whether the backward is split."""
    spec, layers = workloads.job.spec, sum(workloads.base.counts)
    for chunks in (1, *CHUNKS) if pipe > 1 else (1,):
        if pipe * chunks <= layers:
            yield chunks, False
            if pipe > 1 and not spec.train.compile and not defers_nothing(spec):
                yield chunks, True


def _goes_with(workloads: Workloads, ranks: int, pipe: int, micro_size: int, chunks: int, split: bool) -> bool:
    """Whether a schedule goes with the micro-batches of a step: several chunks take whole rounds of the ranks.

    A replica has so many ranks.
    With fewer micro-batches than stages, ranks are idle for most of a step: not tried, unless it is so now.
    """
    job, own = workloads.job, workloads.own
    count = job.batch.global_size * ranks // (job.mesh.world_size * micro_size)
    if count < pipe:
        return not split and chunks == 1 and (pipe, micro_size) == (own.pipe, own.micro_size)
    return chunks == 1 or count % pipe == 0


def _stages_of_zero(workloads: Workloads, copies: int, pipe: int) -> list[int]:
    """Return the stages worth trying over so many ranks with equal weights: 1 holds less than 0 and sends as much."""
    own = workloads.own.zero
    if own == 0 and workloads.job.spec.gradient_handler:
        return [0]  # handlers need whole gradients
    if offloads(workloads.job.spec, "param"):
        return [3] if pipe == 1 else []
    if copies == 1:
        return [min(own, 1)]
    return [1] if pipe > 1 else [1, 2, 3]


def pins_of(fixed: Sequence[str], settings: Callable[[Candidate], Mapping[str, str]]) -> Pins:
    """Return what keeps the values of some keys: of candidates whose settings do not change them."""

    def keeps(candidate: Candidate) -> bool:
        return not any(_same_setting(key, word) for key in settings(candidate) for word in fixed)

    return keeps


def _same_setting(key: str, word: str) -> bool:
    return key == word or key.startswith(f"{word}.") or word.startswith(f"{key}.")


def leaders(options: Sequence[Option], error: float) -> list[Option]:
    """Return the first ones that differ from the fastest by less than the error of the forecast."""
    return [option for option in options if option.step_s <= options[0].step_s * (1 + error)]
