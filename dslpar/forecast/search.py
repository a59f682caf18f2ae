"""Every legal layout of a job's model on as many ranks and devices: what fits, how fast it is, which is better.

    found = search(job, device, nodes)
    found.fitting[0]                   # the fastest that fits
    found.repairs                      # those nearest to the config, the fewest changes first

Tried are all tensor modes and sizes, pipelines, chunks and schedules, ZeRO stages, micro-batches and recomputation; the
global batch stays. What cannot be legal, or cannot win, is left out before its time is computed: sizes that do not
divide; ZeRO stages that hold more and send no less than the next one; recomputation where all fits without it. A rule
of lint may still refuse a layout: whoever shows one lints it first. That memory prunes, and an analytic model ranks, is
how Alpa's, Galvatron's and vTrain's searches work; here all candidates are ranked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction

from dslpar.core.frozen import frozen
from dslpar.core.mesh import Tensor
from dslpar.forecast.candidate import NO_TENSOR, Candidate, Workloads, is_of_libai
from dslpar.forecast.plan import Forecast, Machine, forecast, forecast_if_it_fits
from dslpar.layout.divisors import divisors, least_micro_size
from dslpar.layout.family import conditions, is_chain
from dslpar.layout.modes import MODES, combines
from dslpar.layout.resolve import offloads
from dslpar.schema.sections import TensorParallel

MOST_MICRO_SIZES = 6
"""Micro-batches that are tried of each layout: the least, and its doubles."""
CHUNKS = (2, 4)


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


@frozen
class Found:
    """The layouts of a search."""

    own: Option
    fitting: tuple[Option, ...]
    """Those that fit, the fastest first."""
    num_legal: int
    """Those that were tried, whether they fit or not."""

    @property
    def repairs(self) -> Iterator[Option]:
        """Yield what fits, the fewest changes first, and of as many the fastest."""
        own = self.own.candidate
        return iter(sorted(self.fitting, key=lambda option: (option.candidate.changes(own), option.step_s)))

    @property
    def pareto(self) -> list[Option]:
        """Return those of which no other is as fast with less memory, the fastest first."""
        front: list[Option] = []
        for option in self.fitting:
            if not front or option.bytes < front[-1].bytes:
                front.append(option)
        return front


def search(workloads: Workloads, machine: Machine, pins: Pins = anything) -> Found:
    """Try every layout; `pins` says which are asked for."""
    own = Option(candidate=workloads.own, forecast=forecast(workloads.base, machine))
    tried, fitting = 0, []
    for growing in _series(workloads, pins):
        for alternatives in growing:
            made = None
            for candidate in alternatives:  # the first that fits is the fastest
                tried += 1
                made = forecast_if_it_fits(workloads.workload(candidate), machine)
                if made is not None:
                    fitting.append(Option(candidate=candidate, forecast=made))
                    break
            if made is None:
                break  # with a larger micro-batch it needs more yet
    return Found(own=own, fitting=tuple(sorted(fitting, key=lambda option: option.step_s)), num_legal=tried)


def nearest(workloads: Workloads, machine: Machine) -> Iterator[Option]:
    """Yield what fits with one setting changed, the fastest first."""
    own = workloads.own
    return search(workloads, machine, lambda candidate: candidate.changes(own) == 1).repairs


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
    intervals = (0, own, 1) if own > 1 else (0, 1)
    for tensor, pipe, micro_sizes in _shapes(workloads):
        for chunks, split in _schedules(workloads, pipe):
            for zero in _stages_of_zero(workloads, tensor, pipe):
                growing = []
                for micro_size in micro_sizes:
                    if not _goes_with(workloads, tensor, pipe, micro_size, chunks, split):
                        continue
                    made = [
                        Candidate(
                            pipe=pipe,
                            chunks=chunks,
                            split=split,
                            tensor=tensor,
                            zero=zero,
                            micro_size=micro_size,
                            interval=interval,
                        )
                        for interval in intervals
                    ]
                    growing.append([each for each in made if pins(each)])
                yield [alternatives for alternatives in growing if alternatives]


def _shapes(workloads: Workloads) -> Iterator[tuple[TensorParallel, int, list[int]]]:
    """Yield tensor parallelism, pipeline and micro-batches that go with the model, the world and the global batch."""
    job, model = workloads.job, workloads.job.spec.model
    context = job.spec.parallel.context
    world, layers, chain = job.mesh.world_size, model.num_layers or 1, is_chain(model)
    world //= context.size if context is not None else 1
    for size in divisors(world):
        for tensor in _legal_tensors(workloads, size):
            for pipe in divisors(world // size):
                samples = Fraction(job.batch.global_size, world // (size * pipe))
                if pipe > layers or samples.denominator > 1:
                    continue
                cuboid = workloads.cuboid(tensor)
                if chain:
                    yield tensor, pipe, _micro_sizes(int(samples), cuboid, workloads.own.micro_size)
                elif pipe == 1 and int(samples) % least_micro_size(cuboid) == 0:
                    yield tensor, pipe, [int(samples)]


def _legal_tensors(workloads: Workloads, size: int) -> list[TensorParallel]:
    """Return the forms over so many ranks by which the model's sizes divide.

    With sequence=True, 1d sends as much and holds less: without it is not tried besides, unless it is the config's own.
    """
    job, own = workloads.job, workloads.own.tensor
    forms = [each for each in tensors(size, own) if not is_of_libai(job.spec) or each in _of_libai(size)]
    context = job.spec.parallel.context
    forms = [each for each in forms if context is None or combines(each, context)]
    legal = [
        each
        for each in forms
        if all(one.holds for one in conditions(job.spec.model, workloads.cuboid(each), job.seq_len))
    ]
    with_sequence = TensorParallel(size=size, mode="1d", sequence=True) in legal
    return [each for each in legal if not with_sequence or each == own or each.mode != "1d" or each.sequence]


def _of_libai(size: int) -> tuple[TensorParallel, TensorParallel]:
    return NO_TENSOR, TensorParallel(size=size, mode="1d")


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
    spec = workloads.job.spec
    layers = spec.model.num_layers or 1
    for chunks in (1, *CHUNKS) if pipe > 1 else (1,):
        if pipe * chunks <= layers:
            yield chunks, False
            if pipe > 1 and not spec.train.compile:
                yield chunks, True


def _goes_with(
    workloads: Workloads, tensor: TensorParallel, pipe: int, micro_size: int, chunks: int, split: bool
) -> bool:
    """Whether a schedule goes with the micro-batches of a step: several chunks take whole rounds of the ranks.

    With fewer micro-batches than stages, ranks are idle for most of a step: not tried, unless it is so now.
    """
    job, own = workloads.job, workloads.own
    count = job.batch.global_size * pipe * workloads.cuboid(tensor).size // (job.mesh.world_size * micro_size)
    if count < pipe:
        return not split and chunks == 1 and (pipe, micro_size) == (own.pipe, own.micro_size)
    return chunks == 1 or count % pipe == 0


def _stages_of_zero(workloads: Workloads, tensor: TensorParallel, pipe: int) -> list[int]:
    """Return the stages worth trying: 1 holds less than 0 and sends as much."""
    own = workloads.own.zero
    data = workloads.job.mesh.world_size // (pipe * workloads.cuboid(tensor).size)
    if own == 0 and workloads.job.spec.gradient_handler:
        return [0]  # handlers need whole gradients
    if offloads(workloads.job.spec, "param"):
        return [3] if pipe == 1 else []
    if data == 1:
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
