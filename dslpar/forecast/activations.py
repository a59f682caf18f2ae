"""Activations of a rank of a pipeline, in bytes: what waits for its backward, what the running layer needs, logits.

A micro-batch that a stage has run forward waits for its backward, with what its layers save (`dslpar.costs.memory`).
Where the backward is split, it then waits for W with the operands of each weight's gradient: the input and the
gradient of the output of every product. How many of both wait at once is the schedule's (`fullest`).

With full recomputation a group of layers keeps the first one's input, and one group at a time has everything. A stage
keeps what it received until its backward has made its gradient, and what it sent. That memory is a sum over a layer's
saved tensors times the micro-batches in flight, 34 s b h + 5 a s^2 b bytes of a layer without fused attention, is
Korthikanti et al.'s (arXiv 2205.05198).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate

from dslpar.core.named_tuple import NamedTuple
from dslpar.costs.cuts import residual_cuts
from dslpar.costs.model_costs import Costs
from dslpar.forecast.workload import Workload
from dslpar.layout.chunks import Chunks
from dslpar.layout.divisors import ranks
from dslpar.layout.schedule import Schedule

WIDE_BYTES = 4
"""Of an element of statistics: float32."""


class Activations(NamedTuple):
    """What a rank holds while it runs micro-batches, in bytes."""

    saved: float
    """At the fullest moment, of all micro-batches in flight."""
    first: float
    """Of one micro-batch through all of the rank's stages."""
    working: float
    """What the running layer needs besides: gradients of what lies in it, and all of a group that is recomputed."""
    logits: float
    """While the loss's backward runs, with all that is made of them."""
    output: float
    """Of `logits`, those that are kept until the next micro-batch has its own."""


def activations(workload: Workload, pipe_rank: int) -> Activations:
    """Return what a rank of the pipeline holds."""
    schedule, of_parts = workload.schedule, _parts(workload)
    stages = schedule.chunks.held_by(pipe_rank)
    waiting = [_saved(workload, of_parts, stage) for stage in stages]
    deferred = [_deferred(workload, of_parts, stage) if schedule.split else 0.0 for stage in stages]
    saved, first = fullest(schedule, pipe_rank, waiting, deferred), sum(waiting)
    if pipe_rank < schedule.chunks.pipe - 1:
        return Activations(saved, first, of_parts.working, 0.0, 0.0)
    return Activations(saved, first, of_parts.working, of_parts.logits, of_parts.output)


def fullest(schedule: Schedule, rank: int, waiting: Sequence[float], deferred: Sequence[float]) -> float:
    """Return the most that a rank holds at once, of what a micro-batch has on each of its stages.

    `waiting` is what it has from its forward on, `deferred` what it has from B on where the backward is split.

        >>> fullest(Schedule(Chunks(pipe=4), num_micro_batches=8), 0, [1.0], [0.0])
        4.0
    """
    num = schedule.chunks.num
    if num == 1 and not schedule.split:  # only whole micro-batches wait, all alike
        return waiting[0] * schedule.held(rank).total
    # From three rounds on, a step only repeats its middle.
    count = min(schedule.num_micro_batches, 3 * schedule.chunks.pipe)
    change = [0.0] * (3 * num)
    for index, (size, put_off) in enumerate(zip(waiting, deferred, strict=True)):
        change[index], change[num + index] = size, (put_off if schedule.split else 0.0) - size
        change[2 * num + index] = -put_off
    return max(accumulate(map(change.__getitem__, _changes(schedule.chunks, count, schedule.split, rank))))


@lru_cache(maxsize=4096)
def _changes(chunks: Chunks, count: int, split: bool, rank: int) -> tuple[int, ...]:
    """Return the actions of a rank as places in a list of changes: F of each of its stages, then B, then W."""
    kinds = {"F": 0, "B": chunks.num, "W": 2 * chunks.num}
    return tuple(kinds[kind] + stage // chunks.pipe for kind, stage, _ in Schedule(chunks, count, split).order(rank))


# One micro-batch of one stage --------------------------------------------------------------------------------------


class _Parts(NamedTuple):
    """What one micro-batch has of each part of a model, on whichever stage, in bytes."""

    boundary: float
    layer: float
    last: float
    """What layer and head save."""
    deferred_layer: float
    deferred_last: float
    """What they keep from B to W."""
    working: float
    logits: float
    output: float


def _parts(workload: Workload) -> _Parts:
    """Return them as they are kept with the costs: pipelines and stages of ZeRO have the same ones."""
    habits = workload.habits
    again = workload.recompute, min(workload.interval, max(workload.counts)), workload.mlp_chunks
    of_habits = habits.fused_attention, habits.fused_norms, habits.logit_bytes
    prefetches = _prefetches(workload)
    key = "activations", workload.dtype, again, of_habits, workload.loss_chunks, workload.mesh.pipe > 1, prefetches
    kept = workload.costs.kept
    if key not in kept:
        kept[key] = _make_parts(workload)
    found: _Parts = kept[key]
    return found


def _make_parts(workload: Workload) -> _Parts:
    costs, size = workload.costs, workload.element_bytes
    logits, output = _logits(workload)
    return _Parts(
        boundary=size * float(costs.boundary),
        layer=_of_layer(workload, costs.layer),
        last=_bytes(workload, costs.last) - _result_of_norm(workload),
        deferred_layer=size * _operands(workload, costs.layer),
        deferred_last=size * _operands(workload, costs.last),
        working=_working(workload),
        logits=logits,
        output=output,
    )


def _saved(workload: Workload, of_parts: _Parts, stage: int) -> float:
    """Return what a micro-batch keeps on a stage from its forward to its backward."""
    chunks, count, boundary = workload.schedule.chunks, workload.counts[stage], of_parts.boundary
    if workload.costs.units:
        total = _saved_by_units(workload, boundary, stage)
    elif workload.recompute == "full":
        total = _inputs(workload, boundary, count)
    else:
        total = count * of_parts.layer
    last = chunks.last
    if stage == last:
        total += of_parts.last
    if chunks.pipe > 1:
        total += min((stage > 0) + (stage < last), workload.habits.boundaries) * boundary
    return total


def _inputs(workload: Workload, boundary: float, num_layers: int) -> float:
    """Return what is kept of layers that are computed again: the inputs of groups."""
    total = -(-num_layers // workload.interval) * boundary
    return min(total, boundary) if workload.offloads_inputs else total  # the one that is on its way


def _saved_by_units(workload: Workload, boundary: float, stage: int) -> float:
    """Return the same of the layers of a stage, where layers may differ, and some may not be computed again."""
    costs, begin = workload.costs, sum(workload.counts[:stage])
    end, recomputes = begin + workload.counts[stage], workload.recompute == "full"
    units = zip(costs.units[begin:end], costs.recomputable[begin:end], strict=True)
    kept = [unit for unit, may in units if not (recomputes and may)]
    total = _inputs(workload, boundary, end - begin - len(kept)) if recomputes else 0.0
    return total + sum(_of_layer(workload, unit) for unit in kept)


def _of_layer(workload: Workload, layer: Costs) -> float:
    """Return what a layer saves of a micro-batch, with masks of dropout, and scores where attention is not fused.

    Of what is computed by parts of the tokens, its input alone: the rest is there for one part at a time.
    """
    total = _bytes(workload, layer) - 2 * _result_of_norm(workload)
    if _mlp_chunks(workload) > 1:
        total -= _saved_by_mlp(workload)
    dropout = not workload.costs.units and getattr(workload.model, "dropout", 0.0) > 0  # a trace has seen it
    if dropout:
        total += 2 * float(workload.costs.boundary)  # two masks, of a byte an element
    if not workload.habits.fused_attention:
        total -= WIDE_BYTES * _num_queries(layer)  # the softmax itself takes the place of its sums
        if workload.recompute == "none":
            kept = 2 * workload.element_bytes + 1 if dropout else workload.element_bytes
            total += kept * sum(each.queries / each.head_size * each.keys for each in layer.work.scores)
    return total


def _result_of_norm(workload: Workload) -> float:
    """Return the bytes of a norm's result that `dslpar.costs.memory` counts, as on a CPU, and a fused kernel does
    not keep: of RMSNorm, where features are whole. A trace counts none.
    """
    tensor = workload.mesh.tensor
    if workload.costs.units or not workload.habits.fused_norms or getattr(workload.model, "norm", "") != "rmsnorm":
        return 0.0
    is_whole = tensor.size == 1 or ranks(tensor, residual_cuts(tensor).features) == 1
    return workload.element_bytes * float(workload.costs.boundary) if is_whole else 0.0


def _mlp_chunks(workload: Workload) -> int:
    return workload.mlp_chunks if workload.recompute == "full" else 1


def _saved_by_mlp(workload: Workload) -> float:
    """Return what the second norm and the MLP save, but for their input."""
    costs = workload.costs
    of_mlp = _bytes(workload, costs.mlp_part) - _result_of_norm(workload)
    return of_mlp - workload.element_bytes * float(costs.boundary) if of_mlp > 0 else 0.0


def _num_queries(layer: Costs) -> float:
    return sum(each.queries / each.head_size for each in layer.work.scores)


def _bytes(workload: Workload, part: Costs) -> float:
    saved = part.memory.saved
    return workload.element_bytes * float(saved.elements) + WIDE_BYTES * float(saved.wide)


def _deferred(workload: Workload, of_parts: _Parts, stage: int) -> float:
    """Return what a micro-batch keeps on a stage from B to W: both operands of each product's weight gradient."""
    total = workload.counts[stage] * of_parts.deferred_layer
    if workload.costs.units:
        size = workload.element_bytes
        total = size * sum(number * _operands(workload, layer) for layer, number in workload.layers_of(stage))
    return total + (of_parts.deferred_last if stage == workload.chunks.last else 0.0)


def _operands(workload: Workload, part: Costs) -> float:
    """Return the elements of inputs, as the backward keeps them, and of the outputs' gradients, as panels.

    Of what is frozen nothing is put off, nor of adapters beside it.
    """
    tensor, total = workload.mesh.tensor, 0.0
    for index, (rows, depth, columns) in enumerate(part.work.products):
        pieces = 1
        if tensor.keep not in ("x", "both"):  # kept as stored: inward and outward products alternate
            pieces = tensor.z if index % 2 else (tensor.y if tensor.residual != "replicated" else 1)
        total += rows * (depth / pieces + columns)
    return total


def _logits(workload: Workload) -> tuple[float, float]:
    """Return the bytes of logits while the loss's backward runs, and of those that are kept after it.

    The softmax in float32, from which the gradient is made in the logits' type (`dslpar.layers.loss`). Without a
    pipeline the caller has the logits themselves, until the next micro-batch gives others. By parts of the tokens, a
    part's logits are computed again for its backward, and nobody keeps them. After the loss's, the head's backward has
    the logits' gradient, and of a weight in pieces its panel and that of its gradient.
    """
    costs, size = workload.costs, workload.element_bytes
    elements = float(costs.logits)
    if workload.habits.logit_bytes is not None:
        return workload.habits.logit_bytes * elements, 0.0
    panels = 2 * size * _widest_panel(workload, costs.last)
    if workload.loss_chunks > 1:
        elements /= workload.loss_chunks
        return 2 * size * elements + max(WIDE_BYTES * elements, panels), 0.0
    output = 0.0 if workload.mesh.pipe > 1 else size * elements
    return size * elements + output + max(WIDE_BYTES * elements, panels), output


def _working(workload: Workload) -> float:
    """Return what the backward of a layer needs besides what is saved.

    Around its widest product: the gradient of its output, what the activation's gradient is made of, and the gradient
    of its input. Or in attention, when what the MLP has saved is gone: the residual's gradient, and what
    `dslpar.costs.memory.attention_working` counts. A group of layers that is recomputed has all that these save, but
    the input, which was kept. Of a pipeline's messages one each way is on its way.
    """
    costs, size, chunks = workload.costs, workload.element_bytes, _mlp_chunks(workload)
    of_mlp = _saved_by_mlp(workload)
    work = costs.layer.work if chunks == 1 else costs.mlp_part.work
    products = (*work.products, *work.frozen)
    widest = max((2 * rows * (depth + columns) for rows, depth, columns in products), default=0.0) / chunks
    widest += of_mlp / chunks / size if chunks > 1 else 0.0
    around, wide = float(costs.attention_working.elements), float(costs.attention_working.wide)
    if around:
        in_attention = size * (around + float(costs.boundary)) + WIDE_BYTES * wide - (of_mlp if chunks == 1 else 0.0)
        widest = max(widest, in_attention / size)
    live = 0.0
    if workload.recompute == "full":
        again = [unit for unit, may in zip(costs.units, costs.recomputable, strict=True) if may]
        fullest_layer = max((_of_layer(workload, layer) for layer in again or (costs.layer,)), default=0.0)
        live = min(workload.interval, max(workload.counts)) * fullest_layer - size * float(costs.boundary)
    messages = 2 * size * float(costs.boundary) if workload.mesh.pipe > 1 else 0.0
    return size * (widest + _weight_panels(workload)) + live + messages


def _weight_panels(workload: Workload) -> float:
    """Return the elements of the weights that are gathered over q for the running product, and for the next one.

    Of a layer's widest product. What a gradient takes before it is reduced is in the place of one of them
    (`dslpar.layers.weight_prefetch`).
    """
    return (2 if _prefetches(workload) else 1) * _widest_panel(workload, workload.costs.layer)


def _widest_panel(workload: Workload, part: Costs) -> float:
    """Return the elements of the widest weight that is gathered over q, of a part of the model."""
    if workload.mesh.tensor.q == 1:
        return 0.0
    work = part.work
    return max((depth * columns for _, depth, columns in (*work.products, *work.frozen)), default=0.0)


def _prefetches(workload: Workload) -> bool:
    """Return whether the next linear's weight is gathered while this one's product runs."""
    return workload.mesh.tensor.comm_overlap and workload.zero < 3 and not workload.habits.compiles_layers
