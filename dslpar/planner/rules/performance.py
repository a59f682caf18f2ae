"""PERF102 and following: legal but slow layouts. Each message has a number, each hint a better layout.

PERF103 compares the traffic of the layout with that of mode 1d (`dslpar.costs.traffic` counts both). PERF104 and
PERF105 find stages that wait for micro-batches. With '1f1b' (PipeDream-Flush, arXiv 2006.09503) stages are idle for
(S-1) / (m+S-1) of a step, with S stages and m micro-batches. `dslpar.layout.bubble` computes the bubble of every
schedule. PERF106 finds stages that wait for the busiest stage (`dslpar.layout.stages`).

No rule reports that mode '1d' sends more than another mode. It always does if the micro-batch is large enough, and
within a host its four all-reduces are often faster nevertheless. `dslpar show` prints the numbers. A mode that sends
more than '1d' can only save memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from dslpar.core.mesh import TensorMesh
from dslpar.layout.bubble import bubble_of
from dslpar.layout.chunks import Chunks
from dslpar.layout.deepspeed_config import overlaps_reduction
from dslpar.layout.divisors import Condition, divisors, least_micro_size
from dslpar.layout.family_interface import conditions, pipeline_weights
from dslpar.layout.resolve import can_defer_weight_gradients, seq_len_of, splits_backward
from dslpar.layout.schedule import Schedule
from dslpar.layout.stages import EvenWeights, balanced, imbalance, loads_of_ranks
from dslpar.linter.context import Context
from dslpar.linter.problem import Problem
from dslpar.linter.rule import rule
from dslpar.linter.rules.pipeline import (
    batch_keys,
    micro_batches_of,
    other_micro_batches,
    partition_keys,
    partition_of,
    schedule_type,
    unsplit,
)
from dslpar.schema.sections import Model, OtherModel


@rule("PERF103", "below-break-even", "warning")
def below_break_even(cx: Context) -> Iterator[Problem]:
    """The tensor mode sends more than mode '1d' would for micro-batches of this size."""
    cuboid, model = cx.tensor.cuboid, cx.model.of(Model)
    context = cx.spec.parallel.context
    if cuboid.x == cuboid.z == 1 or (context is not None and context.size > 1):
        return  # the layout equals 1d; or sequences are also split, which 1d alone does not do
    seq_len = seq_len_of(cx.spec)
    if cx.layout.batch.micro_size < 1 or not _all_hold(conditions(model, cuboid, seq_len, cx.layout.batch.micro_size)):
        return  # other rules report that the layout is not legal
    from dslpar.forecast.comparison import break_even  # most configs do not need it

    found = break_even(model, cuboid, cx.layout.batch.micro_size * seq_len)
    hints, since = [], f"{cuboid.mode!r} never sends less"
    if found.needed is not None:
        least, samples = least_micro_size(cuboid), -(-found.needed // seq_len)
        hints.append(f"batch.micro_size at least {-(-samples // least) * least}")
        since = f"{cuboid.mode!r} sends less from {found.needed} tokens on"
    if _all_hold(conditions(model, TensorMesh(y=cuboid.size, mode="1d"), seq_len)):
        hints.append("mode='1d'")
    if found.sent > found.sent_in_1d and hints:
        numbers = f"{found.held:,} elements of weights and activations, '1d' {found.held_in_1d:,}"
        saving = (
            "saves no memory"
            if found.held >= found.held_in_1d
            else f"saves {_percent(1 - found.held / found.held_in_1d)} of memory"
        )
        message = (
            f"mode {cuboid.mode!r} sends {round(found.sent):,} elements per rank and layer for a micro-batch of"
            f" {found.tokens} tokens, and '1d' {round(found.sent_in_1d):,}: {since}, and {saving} ({numbers})"
        )
        yield cx.problem("parallel.tensor.mode", message, " or ".join(hints))


def _all_hold(found: Iterable[Condition]) -> bool:
    return all(each.holds for each in found)


# Stages that wait for micro-batches --------------------------------------------------------------------------------


@rule("PERF104", "bubble", "warning")
def bubble(cx: Context) -> Iterator[Problem]:
    """The stages of the pipeline are idle for more than 20 % of the step."""
    count, chunks, split = micro_batches_of(cx), cx.pipeline.chunks, splits_backward(cx.spec)
    stages = cx.pipeline.stages
    if count < stages or (chunks.num > 1 and count % stages):
        return  # PERF105 and PIP115 report it
    share = _idle_share(cx, chunks, split, count)
    if share > _MOST_BUBBLE:
        message = f"{stages} stages are idle {_percent(share)} of the step: {_formula(cx, chunks, split)}"
        hints = [_more_micro_batches(cx), *_other_schedules(cx, share, count)]
        yield cx.problem(batch_keys(cx), f"{message}, m = {count} micro-batches", " or ".join(hints))


@rule("PERF105", "too-few-micro-batches", "warning")
def too_few_micro_batches(cx: Context) -> Iterator[Problem]:
    """The pipeline has fewer micro-batches than stages."""
    stages, count = cx.pipeline.stages, micro_batches_of(cx)
    if count < stages and cx.pipeline.chunks.num == 1:  # with several chunks PIP115 reports it
        batches = f"{count} micro-batch{'es' if count > 1 else ''}"
        idle = stages - count
        message = f"{batches} for {stages} stages: at least {idle} stage{'s are' if idle > 1 else ' is'} always idle"
        if not splits_backward(cx.spec):  # with a split backward the share has no simple form here
            message += f" (idle share: {_percent(_idle_share(cx, cx.pipeline.chunks, False, count))})"
        yield cx.problem(batch_keys(cx), message, _more_micro_batches(cx))


_MOST_BUBBLE = 0.2
_OTHER_SCHEDULES = (("zero_bubble", 1), ("interleaved", 2), ("zero_bubble", 2), ("interleaved", 4), ("zero_bubble", 4))
"""(type, chunks per rank) to suggest, the smallest changes first."""


def _idle_share(cx: Context, chunks: Chunks, split: bool, count: int) -> float:
    """Return the bubble: the share of a step in which ranks are idle."""
    return bubble_of(Schedule(chunks, count, split), recomputes=cx.spec.activation_checkpoint is not None)


def _work(cx: Context) -> int:
    """Return the time of a micro-batch on a stage, in units of a forward: F, B, W, and F again if recomputed."""
    return 3 if cx.spec.activation_checkpoint is None else 4


def _speed(cx: Context, chunks: Chunks, split: bool) -> int:
    """Return the idle time of '1f1b' divided by that of this schedule."""
    # With a split backward, the other of P ranks wait only for P-1 times B. The recomputation is part of B.
    return chunks.num * (_work(cx) // (_work(cx) - 2) if split else 1)


def _formula(cx: Context, chunks: Chunks, split: bool) -> str:
    """Return the idle share as a formula, for S ranks with v stages each and m micro-batches."""
    speed = _speed(cx, chunks, split) // chunks.num
    times = f"{speed if speed > 1 else ''}{'v' if chunks.num > 1 else ''}"
    values = f", v = {chunks.num} chunks" if chunks.num > 1 else ""
    return f"(S-1) / ({times}m+S-1){values}"


def _more_micro_batches(cx: Context) -> str:
    """Return the hint for enough micro-batches, with the same number of samples per step if that is possible."""
    stages, chunks, split = cx.pipeline.stages, cx.pipeline.chunks, splits_backward(cx.spec)
    # A share of 1/5 of the step is 1/4 of the busy time.
    needed = max(stages, -(-4 * (stages - 1) // _speed(cx, chunks, split)))
    multiple = stages if chunks.num > 1 else 1
    needed = -(-needed // multiple) * multiple

    def fits(count: int) -> bool:
        return count >= needed and count % multiple == 0

    return other_micro_batches(cx, needed, fits, _percent(_idle_share(cx, chunks, split, needed)))


def _other_schedules(cx: Context, share: float, count: int) -> list[str]:
    """Return the first other schedule whose bubble is small enough, else the one with the smallest bubble."""
    best, found = share, []
    given = "" if not cx.source.given("schedule.num_microbatches") else f", num_microbatches={count}"
    for kind, num in _OTHER_SCHEDULES:
        chunks, split = Chunks(cx.pipeline.stages, num), kind == "zero_bubble"
        if not _is_legal(cx, chunks, split, count):
            continue
        idle = _idle_share(cx, chunks, split, count)
        if idle < best:
            num_chunks = f", num_model_chunks={num}" if num > 1 else ""
            best, found = idle, [f"schedule=dict(type={kind!r}{num_chunks}{given}): {_percent(idle)}"]
        if best <= _MOST_BUBBLE:
            break
    return found


def _is_legal(cx: Context, chunks: Chunks, split: bool, count: int) -> bool:
    """Return whether the config would have no other finding with that schedule."""
    if split and (
        cx.spec.train.compiles_layers or cx.spec.activation_checkpoint is not None or not _is_known_to_defer(cx)
    ):
        return False  # PIP116, PERF112, PERF113
    if chunks.num == 1:
        return cx.pipeline.chunks.num == 1 or not _is_cut_by_hand(cx)
    most_stages = None if cx.model.unlisted else cx.model.num_layers
    fits = count % chunks.pipe == 0 and (most_stages is None or chunks.stages <= most_stages)
    return fits and (chunks.num == cx.pipeline.chunks.num or not _is_cut_by_hand(cx))


def _is_known_to_defer(cx: Context) -> bool:
    """Return whether the model has layers that can defer the gradients of their weights; False if unknown."""
    is_unknown = cx.model.unlisted and (cx.model.by_program or not cx.model.other.is_of_transformers)
    return not is_unknown and can_defer_weight_gradients(cx.spec)


def _is_cut_by_hand(cx: Context) -> bool:
    """Return whether the config lists the layers of each stage, which fits only this number of stages."""
    pipeline = cx.pipeline.multi_stage
    return pipeline.stage_ids is not None or pipeline.counts is not None


@rule("PERF112", "recomputed-and-deferred", "warning")
def recomputed_and_deferred(cx: Context) -> Iterator[Problem]:
    """Activation checkpointing saves no memory with the schedule 'zero_bubble'."""
    if cx.spec.activation_checkpoint is None or cx.pipeline.stages == 1 or not splits_backward(cx.spec):
        return
    count, stages, chunks = micro_batches_of(cx), cx.pipeline.stages, cx.pipeline.chunks
    if chunks.num > 1 and count % stages:
        return  # PIP115 reports it
    deferred = Schedule(chunks, count, split=True).held(stages - 1).deferred
    message = f"no memory is saved: the last rank still holds all activations of {deferred:g} deferred micro-batches"
    hint = f"leave activation_checkpoint out (if all activations fit); or {unsplit(cx)}"
    yield cx.problem("activation_checkpoint.interval", message, hint)


@rule("PERF113", "nothing-to-defer", "warning")
def nothing_to_defer(cx: Context) -> Iterator[Problem]:
    """The schedule is 'zero_bubble', but the model cannot defer gradients of weights."""
    if cx.pipeline.stages > 1 and schedule_type(cx) == "zero_bubble" and not can_defer_weight_gradients(cx.spec):
        order = "'interleaved'" if cx.pipeline.chunks.num > 1 else "'1f1b'"
        if isinstance(cx.spec.model, OtherModel) and cx.spec.model.lora is not None:
            message = f"gradients of adapters are not deferred, and other weights are frozen: the run follows {order}"
            yield cx.problem("schedule.type", message, unsplit(cx))
            return
        message = (
            f"only dslpar.layers.Linear defers gradients, and all layers are from torch.nn: the run follows {order}"
        )
        yield cx.problem("schedule.type", message, f"{unsplit(cx)}; or choose layers of dslpar.layers")


# Stages that wait for each other -----------------------------------------------------------------------------------


@rule("PERF106", "uneven-stages", "warning")
def uneven_stages(cx: Context) -> Iterator[Problem]:
    """The busiest stage computes over 15 % more than the mean of all stages."""
    counts, model = partition_of(cx), cx.spec.model
    if counts is None or len(counts) == 1:
        return
    if cx.world.size_if_given is not None and cx.layout.data_size < 1:
        return  # data_size raises if the world does not fit; other rules report it
    if (cx.pipeline.multi_stage.method or "").startswith(("parameters", "type:")):
        return
    weights = pipeline_weights(model, "cost", seq_len_of(cx.spec))
    if not isinstance(weights, EvenWeights):
        return  # the weights of listed layers depend only on their kinds
    if not weights.layer:
        return  # an image smaller than a patch has no tokens; TEN141 reports it
    loads = loads_of_ranks(weights.loads(counts), cx.pipeline.chunks)
    share = imbalance(loads)
    if share > _MOST_IMBALANCE:
        busiest, name = loads.index(max(loads)), "stage" if cx.pipeline.chunks.num == 1 else "rank"
        worth = ", ".join(f"{load / weights.layer:.2g}" for load in loads[:16]) + (", ..." if len(loads) > 16 else "")
        message = (
            f"{name} {busiest} computes {_percent(share)} more than the mean: {name}s compute as much as {worth} layers"
        )
        yield cx.problem(partition_keys(cx), message, _more_even(cx, share, weights))


_MOST_IMBALANCE = 0.15


def _more_even(cx: Context, share: float, weights: EvenWeights) -> str:
    """Suggest the most even partition, or fewer stages."""
    num_layers = cx.model.num_layers

    def best(stages: int) -> tuple[tuple[int, ...], float]:
        chunks = Chunks(stages, cx.pipeline.chunks.num)
        counts = balanced(weights, num_layers, chunks)
        return counts, imbalance(loads_of_ranks(weights.loads(counts), chunks))

    counts, least = best(cx.pipeline.stages)
    if least < share - 1e-9:
        ids = " + ".join(f"[{cx.pipeline.chunks.rank_of(stage)}] * {count}" for stage, count in enumerate(counts))
        in_parallel = cx.spec.parallel.pipeline is not None
        partition = f"counts={list(counts)}" if in_parallel else f"custom_pipeline_stage_id={ids}"
        return f"{partition}: {_percent(least)}"
    none = f"no partition of {num_layers} layers is more even"
    for stages in reversed(divisors(cx.pipeline.stages)[1:-1]):
        if best(stages)[1] <= _MOST_IMBALANCE:
            return f"choose {stages} stages: {_percent(best(stages)[1])}; {none}"
    return f"choose more layers, or fewer stages: {none}"


# Needless communication and recomputation --------------------------------------------------------------------------


@rule("PERF108", "all-reduce-of-gradients", "warning")
def all_reduce_of_gradients(cx: Context) -> Iterator[Problem]:
    """use_multi_rank_bucket_allreduce makes ZeRO 1 and 2 send more than necessary."""
    zero, key = cx.spec.zero, "zero.use_multi_rank_bucket_allreduce"
    if zero.stage in (1, 2) and zero.extra.get("use_multi_rank_bucket_allreduce") and cx.layout.num_copies > 1:
        sums = cx.layout.batch.accumulation if zero.stage == 2 else 1
        message = f"{_sent(cx, 2 * sums + 1)} are sent per step and rank, and {_sent(cx, sums + 1)} are enough"
        yield cx.problem(key, message, "leave it out")


@rule("PERF111", "overlap-that-waits", "warning")
def overlap_that_waits(cx: Context) -> Iterator[Problem]:
    """DeepSpeed's overlap_comm at ZeRO 1 or 2 waits for the device before each reduction."""
    zero, key = cx.spec.zero, "zero.overlap_comm"
    # DEAD116 reports the key in other layouts and at other stages.
    used = cx.pipeline.stages == 1 and zero.stage in (1, 2) and not overlaps_reduction(cx.spec)
    used &= zero.extra.get("reduce_scatter") is not False  # without it DeepSpeed all-reduces on the other stream
    if used and zero.extra.get("overlap_comm") and cx.layout.num_copies > 1:
        by_rank = not zero.extra.get("use_multi_rank_bucket_allreduce")
        several = by_rank and zero.extra.get("contiguous_gradients") is not False
        each = f"up to {cx.layout.num_copies} times per bucket, once for each rank that has the same weights"
        how_often = each if several else "once per bucket"
        message = f"DeepSpeed waits for the GPU before each reduction: {how_often}"
        yield cx.problem(key, message, "leave overlap_comm out")


@rule("PERF109", "gradients-sent-many-times", "info")
def gradients_sent_many_times(cx: Context) -> Iterator[Problem]:
    """ZeRO 2 with gradient accumulation reduces the gradients at every micro-batch."""
    count = cx.layout.batch.accumulation
    if cx.spec.zero.stage == 2 and cx.pipeline.stages == 1 and count > 1 and cx.layout.num_copies > 1:
        sent, least = _sent(cx, count + 1), _sent(cx, 2)
        message = f"ZeRO 2 sends {sent}, step and rank with {count} micro-batches, ZeRO 1 {least}"
        yield cx.problem(
            "zero.stage", message, "zero.stage=1 (if whole gradients fit); or choose fewer, larger micro-batches"
        )


def _sent(cx: Context, times: int) -> str:
    copies = cx.layout.num_copies
    return f"{times * (copies - 1) / copies:.3g} elements per parameter"


def _percent(share: float) -> str:
    return f"{100 * share:.1f}".removesuffix(".0") + " %"


@rule("PERF102", "whole-stage-recomputed", "info")
def whole_stage_recomputed(cx: Context) -> Iterator[Problem]:
    """All layers of the model are one segment of activation checkpointing."""
    if cx.spec.activation_checkpoint is None or cx.pipeline.stages > 1:
        return
    interval, layers = cx.spec.activation_checkpoint.interval, cx.model.num_layers
    if interval >= layers > 1:
        message = f"a segment has {interval} layers, and the model {layers}: the peak memory is not reduced"
        yield cx.problem("activation_checkpoint.interval", message, f"such as 1: fewer than {layers}")


RULES = (
    below_break_even,
    bubble,
    too_few_micro_batches,
    recomputed_and_deferred,
    nothing_to_defer,
    uneven_stages,
    all_reduce_of_gradients,
    overlap_that_waits,
    gradients_sent_many_times,
    whole_stage_recomputed,
)
