"""Search space: all legal layouts except those that cannot be the best.

    for layout in candidates(workloads): ...

These layouts are left out:

- sizes that do not divide,
- ZeRO stages that hold more memory and send no less than the next stage,
- mode 1d without sequence=True, if the model allows sequence=True,
- pipelines with fewer micro-batches than stages, which idle for most of a step.

The config's own settings are tried in any case. A lint rule may still refuse a layout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from dslpar.core.mesh import TensorMesh
from dslpar.forecast.candidate import NO_TENSOR, Candidate, Workloads
from dslpar.layout.divisors import divisors, least_micro_size
from dslpar.layout.family_interface import conditions, is_chain, splits_sequences
from dslpar.layout.modes import MODES, combines, context_forms
from dslpar.layout.resolve import can_defer_weight_gradients, heads_of, offloads, with_zero
from dslpar.schema.parallel_forms import is_of_libai
from dslpar.schema.sections import ContextParallel, ExpertParallel, TensorParallel

MOST_MICRO_SIZES = 6
"""The most micro-batch sizes tried per layout: the smallest legal one and its doubles, besides the config's own."""
CHUNKS = (2, 4)
"""Numbers of stages per pipeline rank that are tried besides 1."""
LONG, LEAST_PART = 8192, 4096
"""Limits for context parallelism in a config without it. It is tried for samples of at least `LONG` tokens, and a rank
then has at least `LEAST_PART` tokens of each. For shorter samples data parallelism sends less."""


Pins = Callable[[Candidate], bool]
"""A test that accepts the candidates of a search, such as those that keep fixed settings."""


def anything(candidate: Candidate) -> bool:
    """Accept every candidate."""
    return True


def pins_of(fixed: Sequence[str], settings: Callable[[Candidate], Mapping[str, str]]) -> Pins:
    """Return a test that accepts candidates that do not change the `fixed` keys.

    `settings` returns the keys that a candidate sets differently from the config.
    """

    def keeps(candidate: Candidate) -> bool:
        return not any(same_setting(key, word) for key in settings(candidate) for word in fixed)

    return keeps


def same_setting(key: str, word: str) -> bool:
    """Return whether two keys are equal, or one is a part of the other."""
    return key == word or key.startswith(f"{word}.") or word.startswith(f"{key}.")


def candidates(workloads: Workloads) -> Iterator[Candidate]:
    """Yield every layout that a search may try."""
    for growing in series(workloads, anything):
        for alternatives in growing:
            yield from alternatives


Alternatives = list[Candidate]
"""Layouts that differ only in recomputation; each needs less memory and more time than the one before it."""


def series(workloads: Workloads, pins: Pins) -> Iterator[list[Alternatives]]:
    """Yield series: lists of alternatives, one per micro-batch size in ascending order, with equal other settings."""
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
                    growing.append(made)
                for expert in _expert_sizes(workloads, tensor, context, pipe, zero):
                    of_expert = [[each._replace(expert=expert) for each in made] for made in growing]
                    kept = [[each for each in made if pins(each)] for made in of_expert]
                    yield [alternatives for alternatives in kept if alternatives]


def _expert_sizes(
    workloads: Workloads, tensor: TensorParallel, context: ContextParallel | None, pipe: int, zero: int
) -> Iterator[ExpertParallel | None]:
    """Yield the ways to send a mixture's tokens to their experts; None, to gather them, comes first.

    Tried are the numbers of ranks that divide the experts: whole tensor groups of as many replicas as divide all. The
    config's own `chunks` are kept. A traced model has its own way alone.
    """
    job, own = workloads.job, workloads.own.expert
    experts, group = job.spec.model.num_experts, workloads.cuboid(tensor, context).size
    if experts is None or workloads.base.costs.is_traced:
        if own is None or (own.size % group == 0 and job.mesh.world_size // pipe % own.size == 0):
            yield own
        return
    yield None
    within_replica = zero == 3 or offloads(job.spec, "optimizer") or (zero == 0 and job.spec.precision.dtype != "fp32")
    for e in divisors(job.mesh.world_size // (pipe * group)):
        size = group * e
        is_own = own is not None and size == own.size
        if (e > 1 and within_replica) or (not is_own and (size == 1 or experts % size)):
            continue
        yield ExpertParallel(size=size, chunks=1 if own is None else own.chunks)


Shape = tuple[TensorParallel, ContextParallel | None, int, list[int]]
"""Tensor parallelism, context parallelism, pipeline ranks, and micro-batch sizes."""


def _shapes(workloads: Workloads) -> Iterator[Shape]:
    """Yield the shapes that suit the model, the number of ranks and the global batch."""
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
    """Return the sizes of context parallelism to try: 1, the config's own, and others if sequences are long enough."""
    job, own = workloads.job, workloads.own.context
    sizes = {1} if own is None else {1, own.size}
    if job.seq_len >= LONG and splits_sequences(job.spec.model) and not is_of_libai(job.spec):
        sizes |= {size for size in divisors(job.mesh.world_size) if job.seq_len // size >= LEAST_PART}
    return sorted(sizes)


def _legal(
    workloads: Workloads, world: int, context_size: int
) -> Iterator[tuple[TensorParallel, ContextParallel | None]]:
    """Yield pairs of tensor and context parallelism whose sizes divide.

    Context parallelism has `context_size` ranks, and tensor parallelism any size that divides `world`.
    """
    for size in divisors(world):
        for tensor in tensors(size, workloads.own.tensor):
            for context in contexts(workloads, context_size, tensor):
                if not divides(workloads, tensor, context) or _worse(workloads, tensor, context):
                    continue
                if has_costs(workloads, tensor, context):
                    yield tensor, context


def divides(workloads: Workloads, tensor: TensorParallel, context: ContextParallel | None) -> bool:
    """Return whether the model's sizes divide over these ranks; LiBai configs allow only mode 1d without options."""
    job = workloads.job
    if is_of_libai(job.spec) and tensor not in (NO_TENSOR, TensorParallel(size=tensor.size, mode="1d")):
        return False
    return all(one.holds for one in conditions(job.spec.model, workloads.cuboid(tensor, context), job.seq_len))


def has_costs(workloads: Workloads, tensor: TensorParallel, context: ContextParallel | None) -> bool:
    """Return whether the model's layers can be sharded in this way, for the smallest micro-batch."""
    # Always use the cuboid of ZeRO 1 without a pipeline: other values of `zero_over_d` would need a trace each.
    cuboid = with_zero(workloads.cuboid(tensor, context), workloads.job.spec.model, 1, 1)
    return workloads.has_costs(cuboid, least_micro_size(cuboid))


def _worse(workloads: Workloads, tensor: TensorParallel, context: ContextParallel | None) -> bool:
    """Return whether the mode is 1d without sequence=True although sequence=True is legal.

    With sequence=True the layout sends as much and holds less memory. The config's own mode is never worse.
    """
    if tensor.mode != "1d" or tensor.sequence or tensor == workloads.own.tensor:
        return False
    with_sequence = TensorParallel(size=tensor.size, mode="1d", sequence=True)
    return divides(workloads, with_sequence, context) and has_costs(workloads, with_sequence, context)


def contexts(workloads: Workloads, size: int, tensor: TensorParallel) -> Iterator[ContextParallel | None]:
    """Yield the forms of context parallelism of a size that the tensor mode allows.

    If the config has this size, the forms keep the config's options.
    """
    if size == 1:
        yield None
        return
    own = workloads.own.context
    context = own if own is not None and own.size == size else ContextParallel(size=size, impl="ring")
    if combines(tensor, context):
        forms = context_forms(tensor, context, heads_of(workloads.job.spec.model), workloads.per_node)
        yield from (each for _, each in forms.values())


def tensors(size: int, own: TensorParallel) -> Iterator[TensorParallel]:
    """Yield the modes of tensor parallelism over `size` ranks; the config's own mode keeps its options."""
    if size == 1:
        yield NO_TENSOR
        return
    if own.size == size:
        yield own
    for made in _plain_tensors(size):
        if made.size != own.size or made.mode != own.mode or made.sequence != own.sequence:
            yield made


def _plain_tensors(size: int) -> Iterator[TensorParallel]:
    """Yield each mode with default options, except 2.5d, whose depth is no better than as many data ranks."""
    yield TensorParallel(size=size, mode="1d")
    yield TensorParallel(size=size, mode="1d", sequence=True)
    for mode in ("2d", "3d"):
        made = TensorParallel(size=size, mode=mode)
        if MODES[mode].axes(made) is not None:
            yield made


def _micro_sizes(samples: int, cuboid: TensorMesh, own: int) -> list[int]:
    """Return the micro-batch sizes to try, which all divide a data rank's samples per step."""
    least = least_micro_size(cuboid)
    sizes = {least << power for power in range(MOST_MICRO_SIZES)} | {own}
    return sorted(size for size in sizes if size % least == 0 and samples % size == 0)


def _schedules(workloads: Workloads, pipe: int) -> Iterator[tuple[int, bool]]:
    """Yield pairs: stages per rank, and True if the schedule splits the backward."""
    spec, layers = workloads.job.spec, sum(workloads.base.counts)
    for chunks in (1, *CHUNKS) if pipe > 1 else (1,):
        if pipe * chunks <= layers:
            yield chunks, False
            if pipe > 1 and not spec.train.compiles_layers and can_defer_weight_gradients(spec):
                yield chunks, True


def _goes_with(workloads: Workloads, ranks: int, pipe: int, micro_size: int, chunks: int, split: bool) -> bool:
    """Return whether a schedule suits the number of micro-batches per step.

    With several stages per rank the number must be a multiple of the pipeline ranks. If it is smaller than the number
    of pipeline ranks, these idle for most of a step, so only the config's own setting is tried. `ranks` is the number
    of ranks per replica.
    """
    job, own = workloads.job, workloads.own
    count = job.batch.global_size * ranks // (job.mesh.world_size * micro_size)
    if count < pipe:
        return not split and chunks == 1 and (pipe, micro_size) == (own.pipe, own.micro_size)
    return chunks == 1 or count % pipe == 0


def _stages_of_zero(workloads: Workloads, copies: int, pipe: int) -> list[int]:
    """Return the ZeRO stages to try if the weights have `copies` replicas.

    ZeRO 0 is left out because ZeRO 1 holds less and sends as much, and with a pipeline only ZeRO 1 is tried.
    """
    own = workloads.own.zero
    if own == 0 and workloads.job.spec.gradient_handler:
        return [0]  # handlers need whole gradients
    if offloads(workloads.job.spec, "param"):
        return [3] if pipe == 1 else []
    if copies == 1:
        return [min(own, 1)]
    return [1] if pipe > 1 else [1, 2, 3]
