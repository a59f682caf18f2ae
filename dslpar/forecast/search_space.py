"""Search space: all legal layouts except those that cannot win.

    for layout in candidates(workloads): ...

Left out before anything is computed are sizes that do not divide; ZeRO stages that hold more and send no less than the
next one; 1d without sequence=True if the model allows it; pipelines that idle for most of a step. A lint rule may still
refuse a layout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from dslpar.core.mesh import Tensor
from dslpar.forecast.candidate import NO_TENSOR, Candidate, Workloads
from dslpar.layout.divisors import divisors, least_micro_size
from dslpar.layout.family import conditions, is_chain, splits_sequences
from dslpar.layout.modes import MODES, combines, context_forms
from dslpar.layout.resolve import defers_nothing, heads_of, offloads, with_zero
from dslpar.schema.parallel_forms import is_of_libai
from dslpar.schema.sections import ContextParallel, TensorParallel

MOST_MICRO_SIZES = 6
"""The most micro-batch sizes tried per layout: the smallest, and its doubles."""
CHUNKS = (2, 4)
LONG, LEAST_PART = 8192, 4096
"""Tokens per sample from which on context parallelism is tried if the config has none, and the fewest of them that a
rank then holds. For shorter samples replicas send less."""


Pins = Callable[[Candidate], bool]
"""Test of whether a candidate has the values that are fixed."""


def anything(candidate: Candidate) -> bool:
    """Accept every candidate."""
    return True


def pins_of(fixed: Sequence[str], settings: Callable[[Candidate], Mapping[str, str]]) -> Pins:
    """Return a test that accepts candidates whose settings leave the `fixed` keys alone."""

    def keeps(candidate: Candidate) -> bool:
        return not any(_same_setting(key, word) for key in settings(candidate) for word in fixed)

    return keeps


def _same_setting(key: str, word: str) -> bool:
    return key == word or key.startswith(f"{word}.") or word.startswith(f"{key}.")


def candidates(workloads: Workloads) -> Iterator[Candidate]:
    """Yield every layout that a search may try."""
    for growing in series(workloads, anything):
        for alternatives in growing:
            yield from alternatives


Alternatives = list[Candidate]
"""Layouts that need less and less memory, and take longer."""


def series(workloads: Workloads, pins: Pins) -> Iterator[list[Alternatives]]:
    """Yield series of layouts with growing micro-batches, each with its alternatives."""
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
    """Yield tensor and context parallelism, pipeline and micro-batches that suit the model, world and global batch."""
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
    """Return sizes of context parallelism: 1, the config's own, and for long sequences those that leave long parts."""
    job, own = workloads.job, workloads.own.context
    sizes = {1} if own is None else {1, own.size}
    if job.seq_len >= LONG and splits_sequences(job.spec.model) and not is_of_libai(job.spec):
        sizes |= {size for size in divisors(job.mesh.world_size) if job.seq_len // size >= LEAST_PART}
    return sorted(sizes)


def _legal(
    workloads: Workloads, world: int, context_size: int
) -> Iterator[tuple[TensorParallel, ContextParallel | None]]:
    """Yield tensor parallelism within `world` ranks beside context parallelism of a size, if all sizes divide."""
    for size in divisors(world):
        for tensor in tensors(size, workloads.own.tensor):
            for context in contexts(workloads, context_size, tensor):
                if not divides(workloads, tensor, context) or _worse(workloads, tensor, context):
                    continue
                if has_costs(workloads, tensor, context):
                    yield tensor, context


def divides(workloads: Workloads, tensor: TensorParallel, context: ContextParallel | None) -> bool:
    job = workloads.job
    if is_of_libai(job.spec) and tensor not in (NO_TENSOR, TensorParallel(size=tensor.size, mode="1d")):
        return False
    return all(one.holds for one in conditions(job.spec.model, workloads.cuboid(tensor, context), job.seq_len))


def has_costs(workloads: Workloads, tensor: TensorParallel, context: ContextParallel | None) -> bool:
    """Return whether the model's layers can be sharded so, in the smallest micro-batch."""
    # As ZeRO has them without a pipeline; a cuboid that differs only in this would need another trace.
    cuboid = with_zero(workloads.cuboid(tensor, context), workloads.job.spec.model, 1, 1)
    return workloads.has_costs(cuboid, least_micro_size(cuboid))


def _worse(workloads: Workloads, tensor: TensorParallel, context: ContextParallel | None) -> bool:
    """Return whether it is 1d without sequence=True, which sends as much and holds more, if sequence=True is legal.

    The config's own is tried all the same.
    """
    if tensor.mode != "1d" or tensor.sequence or tensor == workloads.own.tensor:
        return False
    with_sequence = TensorParallel(size=tensor.size, mode="1d", sequence=True)
    return divides(workloads, with_sequence, context) and has_costs(workloads, with_sequence, context)


def contexts(workloads: Workloads, size: int, tensor: TensorParallel) -> Iterator[ContextParallel | None]:
    """Yield the forms of context parallelism of a size beside a mode; the config's own keeps its options."""
    if size == 1:
        yield None
        return
    own = workloads.own.context
    context = own if own is not None and own.size == size else ContextParallel(size=size, impl="ring")
    if combines(tensor, context):
        forms = context_forms(tensor, context, heads_of(workloads.job.spec.model), workloads.per_node)
        yield from (each for _, each in forms.values())


def tensors(size: int, own: TensorParallel) -> Iterator[TensorParallel]:
    """Yield the forms of tensor parallelism over so many ranks; the config's own keeps its options."""
    if size == 1:
        yield NO_TENSOR
        return
    if own.size == size:
        yield own
    for made in _plain_tensors(size):
        if made.size != own.size or made.mode != own.mode or made.sequence != own.sequence:
            yield made


def _plain_tensors(size: int) -> Iterator[TensorParallel]:
    """Yield each mode's form except 2.5d, whose depth is no better than as many data ranks."""
    yield TensorParallel(size=size, mode="1d")
    yield TensorParallel(size=size, mode="1d", sequence=True)
    for mode in ("2d", "3d"):
        made = TensorParallel(size=size, mode=mode)
        if MODES[mode].axes(made) is not None:
            yield made


def _micro_sizes(samples: int, cuboid: Tensor, own: int) -> list[int]:
    """Return micro-batch sizes that divide a data rank's samples."""
    least = least_micro_size(cuboid)
    sizes = {least << power for power in range(MOST_MICRO_SIZES)} | {own}
    return sorted(size for size in sizes if size % least == 0 and samples % size == 0)


def _schedules(workloads: Workloads, pipe: int) -> Iterator[tuple[int, bool]]:
    """Yield chunks, and whether the backward is split."""
    spec, layers = workloads.job.spec, sum(workloads.base.counts)
    for chunks in (1, *CHUNKS) if pipe > 1 else (1,):
        if pipe * chunks <= layers:
            yield chunks, False
            if pipe > 1 and not spec.train.compiles_layers and not defers_nothing(spec):
                yield chunks, True


def _goes_with(workloads: Workloads, ranks: int, pipe: int, micro_size: int, chunks: int, split: bool) -> bool:
    """Return whether a schedule suits the number of micro-batches: several chunks need whole rounds of the ranks.

    `ranks` is the number per replica. With fewer micro-batches than stages, ranks idle for most of a step, so this is
    tried only if the config has it now.
    """
    job, own = workloads.job, workloads.own
    count = job.batch.global_size * ranks // (job.mesh.world_size * micro_size)
    if count < pipe:
        return not split and chunks == 1 and (pipe, micro_size) == (own.pipe, own.micro_size)
    return chunks == 1 or count % pipe == 0


def _stages_of_zero(workloads: Workloads, copies: int, pipe: int) -> list[int]:
    """Return the stages worth trying with `copies` of the weights: ZeRO 1 holds less than 0 and sends as much."""
    own = workloads.own.zero
    if own == 0 and workloads.job.spec.gradient_handler:
        return [0]  # handlers need whole gradients
    if offloads(workloads.job.spec, "param"):
        return [3] if pipe == 1 else []
    if copies == 1:
        return [min(own, 1)]
    return [1] if pipe > 1 else [1, 2, 3]
