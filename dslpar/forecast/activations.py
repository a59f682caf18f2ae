"""Activation memory of a pipeline rank, in bytes: micro-batches waiting for their backward, the running layer, logits.

After its forward on a stage, a micro-batch waits for its backward and holds the tensors that its layers saved
(`dslpar.costs.memory`). The schedule (`dslpar.layout.schedule`) may split the backward into B, for the gradients of
inputs, and W, for those of weights. Then the micro-batch holds the operands of each weight's gradient from B to W: the
input of every product and the gradient of its output. The schedule decides how many micro-batches wait at once
(`fullest`).

With full recomputation a group of layers keeps only the input of its first layer. Its other tensors are recomputed for
one group at a time. A stage keeps the activation that it received until its backward has made the gradient, and also
keeps the activation that it sent. Memory is the sum of a layer's saved tensors times the micro-batches in flight.
Without fused attention, a layer saves 34 s b h + 5 a s^2 b bytes (Korthikanti et al., arXiv 2205.05198; s sequence
length, b micro-batch size, h hidden size, a heads).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from dslpar.costs.cached_sharding import residual_cuts
from dslpar.costs.model_costs import Costs
from dslpar.forecast.workload import Workload
from dslpar.layout.chunks import Chunks
from dslpar.layout.divisors import ranks
from dslpar.layout.schedule import Schedule

WIDE_BYTES = 4
"""Bytes per element of statistics (float32)."""


class Activations(NamedTuple):
    """Bytes that a rank holds while it runs micro-batches."""

    saved: float
    """Saved by all micro-batches in flight, at their peak."""
    first: float
    """Saved by one micro-batch on all of the rank's stages."""
    working: float
    """Temporaries of the running layer: gradients inside it, and all tensors of a group that is recomputed."""
    logits: float
    """Logits and all tensors made from them, while the loss's backward runs."""
    output: float
    """The bytes of `logits` that stay until the next micro-batch has replaced them."""


def activations(workload: Workload, pipe_rank: int) -> Activations:
    """Return the activation memory of a pipeline rank."""
    schedule, of_parts = workload.schedule, _parts(workload)
    stages = schedule.chunks.held_by(pipe_rank)
    waiting = [_saved(workload, of_parts, stage) for stage in stages]
    deferred = [_deferred(workload, of_parts, stage) if schedule.split else 0.0 for stage in stages]
    saved, first = fullest(schedule, pipe_rank, waiting, deferred), sum(waiting)
    if pipe_rank < schedule.chunks.pipe - 1:
        return Activations(saved, first, of_parts.working, 0.0, 0.0)
    return Activations(saved, first, of_parts.working, of_parts.logits, of_parts.output)


def fullest(schedule: Schedule, rank: int, waiting: Sequence[float], deferred: Sequence[float]) -> float:
    """Return the most bytes that a rank holds at once, given the bytes that one micro-batch holds per stage.

    `waiting` has, for each stage of the rank, the bytes from the forward to B. `deferred` has the bytes from B to W, if
    the backward is split.

        >>> fullest(Schedule(Chunks(pipe=4), num_micro_batches=8), 0, [1.0], [0.0])
        4.0
    """
    num = schedule.chunks.num
    if num == 1 and not schedule.split:  # only whole micro-batches wait, all alike
        return waiting[0] * schedule.held(rank).total
    # A round is `pipe` micro-batches. Steps of more than three rounds repeat the middle round, so three are enough.
    count = min(schedule.num_micro_batches, 3 * schedule.chunks.pipe)
    change = [0.0] * (3 * num)
    for index, (size, put_off) in enumerate(zip(waiting, deferred, strict=True)):
        change[index], change[num + index] = size, (put_off if schedule.split else 0.0) - size
        change[2 * num + index] = -put_off
    return max(accumulate(map(change.__getitem__, _changes(schedule.chunks, count, schedule.split, rank))))


@lru_cache(maxsize=4096)
def _changes(chunks: Chunks, count: int, split: bool, rank: int) -> tuple[int, ...]:
    """Return a rank's actions in order, as indices into a list that has F of each of its stages, then B, then W."""
    kinds = {"F": 0, "B": chunks.num, "W": 2 * chunks.num}
    return tuple(kinds[kind] + stage // chunks.pipe for kind, stage, _ in Schedule(chunks, count, split).order(rank))


# One micro-batch of one stage --------------------------------------------------------------------------------------


class _Parts(NamedTuple):
    """Bytes that one micro-batch holds in each part of a model, whichever stage it is on."""

    boundary: float
    """The activation between two layers."""
    layer: float
    last: float
    """Saved by a layer, and by the head with its norm."""
    deferred_layer: float
    deferred_last: float
    """Kept from B to W by a layer, and by the head with its norm."""
    working: float
    logits: float
    output: float
    """As in `Activations`."""


def _parts(workload: Workload) -> _Parts:
    """Return the bytes per part, cached in the model's costs because many pipelines and ZeRO stages share them."""
    framework = workload.framework
    again = workload.recompute, min(workload.interval, max(workload.counts)), workload.mlp_chunks
    of_framework = framework.fused_attention, framework.fused_norms, framework.logit_bytes
    prefetches = _prefetches(workload)
    of_run = workload.loss_chunks, workload.mesh.pipe > 1, prefetches, workload.expert_load
    key = "activations", workload.dtype, again, of_framework, *of_run
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
    """Return the bytes that a micro-batch keeps on a stage from its forward to its backward."""
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
        total += min((stage > 0) + (stage < last), workload.framework.boundaries) * boundary
    return total


def _inputs(workload: Workload, boundary: float, num_layers: int) -> float:
    """Return the bytes kept for recomputed layers: the inputs of their groups."""
    total = -(-num_layers // workload.interval) * boundary
    return min(total, boundary) if workload.offloads_inputs else total  # offloaded: one input, in transit, is left


def _saved_by_units(workload: Workload, boundary: float, stage: int) -> float:
    """Return the bytes that the layers of a stage save in a traced model, where some layers may not be recomputable."""
    costs, begin = workload.costs, sum(workload.counts[:stage])
    end, recomputes = begin + workload.counts[stage], workload.recompute == "full"
    units = zip(costs.units[begin:end], costs.recomputable[begin:end], strict=True)
    kept = [unit for unit, may in units if not (recomputes and may)]
    total = _inputs(workload, boundary, end - begin - len(kept)) if recomputes else 0.0
    return total + sum(_of_layer(workload, unit) for unit in kept)


def _of_layer(workload: Workload, layer: Costs) -> float:
    """Return the bytes that a layer saves for a micro-batch, including dropout masks and unfused attention's scores.

    With `mlp_chunks` the MLP saves only its input. Its other tensors exist for one chunk of tokens at a time.
    """
    total = _bytes(workload, layer) - 2 * _result_of_norm(workload)
    if _mlp_chunks(workload) > 1:
        total -= _saved_by_mlp(workload)
    dropout = (
        not workload.costs.is_traced and getattr(workload.model, "dropout", 0.0) > 0
    )  # traced costs include the masks
    if dropout:
        total += 2 * float(workload.costs.boundary)  # two masks of one byte per element
    if not workload.framework.fused_attention:
        total -= WIDE_BYTES * _num_queries(layer)  # the softmax is saved in place of its log-sum-exp
        if workload.recompute == "none":
            kept = 2 * workload.element_bytes + 1 if dropout else workload.element_bytes
            total += kept * sum(each.queries / each.head_size * each.keys for each in layer.work.scores)
    return total


def _result_of_norm(workload: Workload) -> float:
    """Return the bytes of RMSNorm's saved result, which `dslpar.costs.memory` counts but a fused kernel does not save.

    torch's RMSNorm saves its result on a CPU, and runs only if no axis shards the features. The function returns 0 in
    all other cases: for other norms, for sharded features, for a traced model, and without fused norms.
    """
    tensor = workload.mesh.tensor
    if (
        workload.costs.is_traced
        or not workload.framework.fused_norms
        or getattr(workload.model, "norm", "") != "rmsnorm"
    ):
        return 0.0
    is_whole = tensor.size == 1 or ranks(tensor, residual_cuts(tensor).features) == 1
    return workload.element_bytes * float(workload.costs.boundary) if is_whole else 0.0


def _mlp_chunks(workload: Workload) -> int:
    return workload.mlp_chunks if workload.recompute == "full" else 1


def _saved_by_mlp(workload: Workload) -> float:
    """Return the bytes that a layer's second norm and MLP save, without the norm's input."""
    costs = workload.costs
    of_mlp = _bytes(workload, costs.mlp_part) - _result_of_norm(workload)
    return of_mlp - workload.element_bytes * float(costs.boundary) if of_mlp > 0 else 0.0


def _num_queries(layer: Costs) -> float:
    return sum(each.queries / each.head_size for each in layer.work.scores)


def _bytes(workload: Workload, part: Costs) -> float:
    saved = part.memory.saved
    more = (workload.expert_load - 1) * float(part.memory.of_rows)
    return workload.element_bytes * (float(saved.elements) + more) + WIDE_BYTES * float(saved.wide)


def _deferred(workload: Workload, of_parts: _Parts, stage: int) -> float:
    """Return the bytes that a micro-batch keeps on a stage from B to W: the operands of its weights' gradients."""
    total = workload.counts[stage] * of_parts.deferred_layer
    if workload.costs.units:
        size = workload.element_bytes
        total = size * sum(number * _operands(workload, layer) for layer, number in workload.layers_of(stage))
    return total + (of_parts.deferred_last if stage == workload.chunks.last else 0.0)


def _operands(workload: Workload, part: Costs) -> float:
    """Return the elements that a part keeps from B to W: inputs of products, and gradients of their outputs.

    Inputs are gathered panels or stored shards, depending on the setting `keep`. Gradients of outputs are panels.
    Frozen weights and their adapters keep nothing from B to W.
    """
    tensor, total = workload.mesh.tensor, 0.0
    for index, (rows, depth, columns) in enumerate(part.work.products):
        pieces = 1
        if tensor.keep not in ("x", "both"):  # inputs are stored shards; inward and outward products alternate
            pieces = tensor.z if index % 2 else (tensor.y if tensor.residual != "replicated" else 1)
        total += rows * (depth / pieces + columns)
    for each in part.work.grouped:
        total += workload.expert_load * each.times * each.num * each.rows * (each.depth + each.columns)
    return total


def _logits(workload: Workload) -> tuple[float, float]:
    """Return the bytes of logits while the loss's backward runs, and the bytes that stay after it.

    The softmax is in float32, and the logits' gradient is in the logits' dtype (`dslpar.layers.loss`). Without a
    pipeline the caller holds the logits until the next micro-batch replaces them. With `loss_chunks` a chunk's logits
    are recomputed for its backward, and no logits stay. After the loss's backward comes the head's backward. It holds
    the logits' gradient and, if the head's weight is sharded over q, the gathered weight and its gradient.
    """
    costs, size = workload.costs, workload.element_bytes
    elements = float(costs.logits)
    if workload.framework.logit_bytes is not None:
        return workload.framework.logit_bytes * elements, 0.0
    panels = 2 * size * _widest_panel(workload, costs.last)
    if workload.loss_chunks > 1:
        elements /= workload.loss_chunks
        return 2 * size * elements + max(WIDE_BYTES * elements, panels), 0.0
    output = 0.0 if workload.mesh.pipe > 1 else size * elements
    return size * elements + output + max(WIDE_BYTES * elements, panels), output


def _working(workload: Workload) -> float:
    """Return the bytes that a layer's backward needs in addition to saved tensors.

    The sum has four parts:

    1. Temporaries, the largest of three moments. At the widest product: two tensors of the size of its output and two
       of its input, for gradients and the activation function. At adapters of experts: the gradient of a sum of weights
       and adapters. In attention: the residual's gradient and the temporaries
       that `dslpar.costs.memory.attention_working` counts, less the MLP's saved tensors, which are freed by then.
    2. Weights that are gathered over q.
    3. With recomputation, the tensors that a group of layers saves, except its input, which was kept all the time.
    4. With a pipeline, one message in each direction.
    """
    costs, size, chunks = workload.costs, workload.element_bytes, _mlp_chunks(workload)
    of_mlp = _saved_by_mlp(workload)
    work = costs.layer.work if chunks == 1 else costs.mlp_part.work
    load = workload.expert_load
    experts = [(load * rows, depth, columns) for rows, depth, columns in work.kernels]
    products = (*work.products, *work.frozen, *experts)
    widest = max((2 * rows * (depth + columns) for rows, depth, columns in products), default=0.0) / chunks
    widest += of_mlp / chunks / size if chunks > 1 else 0.0
    widest = max(widest, max((each.elements for each in work.sums), default=0.0))  # the gradient of such a sum
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
    """Return the elements of weights that are gathered over q: the running product's, and a prefetched one if any.

    Each counts as large as the widest weight of a layer. A gradient that waits for its reduction takes the place of a
    gathered weight (`dslpar.layers.weight_prefetch`).
    """
    return (2 if _prefetches(workload) else 1) * _widest_panel(workload, workload.costs.layer)


def _widest_panel(workload: Workload, part: Costs) -> float:
    """Return the elements of the widest weight that a part of the model gathers over q."""
    if workload.mesh.tensor.q == 1:
        return 0.0
    work = part.work
    return max((depth * columns for _, depth, columns in (*work.products, *work.frozen)), default=0.0)


def _prefetches(workload: Workload) -> bool:
    """Return whether the next linear's weight is gathered while this one's product runs."""
    return workload.mesh.tensor.comm_overlap and workload.zero < 3 and not workload.framework.compiles_layers
