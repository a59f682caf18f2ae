"""PERF103 and on: legal, but slow: the number, and what to write for a better one.

PERF103 compares what a layout sends with what another would (plan/traffic.py has the counts). PERF104 to PERF106 are
about stages that wait: for micro-batches (the bubble of one forward, one backward, PipeDream-Flush of arXiv 2006.09503,
(S-1) / (m+S-1) for S stages and m micro-batches) and for the busiest stage (by the cost of plan/stages.py).

That 1d on many ranks sends more than another mode would is no finding: given a micro-batch that is large enough, every
1d group does, and its four all-reduces within a host are often the faster choice all the same; `show` has the numbers.
A mode that sends more than 1d has no excuse but memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from dslpar.core.mesh import Tensor
from dslpar.layout.divisors import divisors, least_micro_size
from dslpar.layout.family import conditions, layout_of
from dslpar.layout.resolve import seq_len_of
from dslpar.layout.stages import EvenWeights, balanced, imbalance
from dslpar.linter.context import Context
from dslpar.linter.problem import Problem, UnknownValueError
from dslpar.linter.rule import rule
from dslpar.linter.rules.dead import takes_bf16_optimizer
from dslpar.linter.rules.pipeline import cut_of
from dslpar.schema.sections import Model

if TYPE_CHECKING:
    from dslpar.forecast.comparison import BreakEven


@rule("PERF103", "below-break-even", "warning")
def below_break_even(cx: Context) -> Iterator[Problem]:
    """The mode of tensor parallelism sends more than '1d' would, for micro-batches of this size.

    What it does:
        Counts the elements that a rank sends for one transformer layer, forward and backward, in this mode and in '1d'
        on as many ranks, and from how many tokens on this mode sends less.

    Why:
        All modes but '1d' send weights besides activations. Weights are sent once a micro-batch, however small it is;
        in return less is sent a token. Below the break-even, '1d' sends less.

    Example:
        model = dict(type='GPT', num_layers=2, hidden_size=96, num_heads=4, vocab_size=256, max_seq_len=96)
        parallel = dict(tensor=dict(size=4, mode='2d'))
        batch = dict(micro_size=2)

    Use instead:
        model = dict(type='GPT', num_layers=2, hidden_size=96, num_heads=4, vocab_size=256, max_seq_len=96)
        parallel = dict(tensor=dict(size=4, mode='2d'))
        batch = dict(micro_size=4)
    """
    cuboid, model = cx.cuboid, cx.model_of(Model)
    if cuboid.x == cuboid.z == 1:
        return  # it is 1d, by whatever name
    seq_len = seq_len_of(cx.spec)
    if cx.batch.micro_size < 1:
        return  # BAT101 has the word
    if not all(each.holds for each in conditions(model, cuboid, seq_len, cx.batch.micro_size)):
        return  # what is not legal is not slow
    from dslpar.forecast.comparison import break_even  # here: most configs need none of it

    found = break_even(model, cuboid, cx.batch.micro_size * seq_len)
    fixes = list(_fixes(cx, found, seq_len))
    if found.sent > found.sent_in_1d and fixes:
        message = (
            f"mode {cuboid.mode!r} sends {_rounded(found.sent)} elements a rank and layer for a micro-batch of"
            f" {found.tokens} tokens, and '1d' {_rounded(found.sent_in_1d)}: {_words(found)}"
        )
        yield cx.problem("parallel.tensor.mode", message, " or ".join(fixes))


def _fixes(cx: Context, found: BreakEven, seq_len: int) -> Iterator[str]:
    if found.needed is not None:
        least = least_micro_size(cx.cuboid)
        samples = -(-found.needed // seq_len)
        yield f"batch.micro_size at least {-(-samples // least) * least}"
    in_1d = Tensor(y=cx.cuboid.size, mode="1d")
    if all(each.holds for each in conditions(cx.model_of(Model), in_1d, seq_len)):
        yield "mode '1d'"


def _words(found: BreakEven) -> str:
    if found.needed is None:
        return "it never sends less"
    return f"it sends less from {found.needed} tokens on"


def _rounded(elements: Any) -> str:
    return f"{round(elements):,}"


# Stages that wait for micro-batches --------------------------------------------------------------------------------


@rule("PERF104", "bubble", "warning")
def bubble(cx: Context) -> Iterator[Problem]:
    """The stages of the pipeline wait for more than 20 % of the step.

    What it does:
        Computes (S - 1) / (m + S - 1) for S stages and m micro-batches, the share of a step in which a stage has
        nothing to do while the pipeline fills and drains. It is 20 % or less from 4 * (S - 1) micro-batches on.

    Why:
        Ranks that wait cost as much as ranks that compute. More, smaller micro-batches shorten the wait; the samples
        of a step may stay as they are.

    Example:
        parallel = dict(pipeline=4)
        batch = dict(global_size=64, accumulation=8)

    Use instead:
        parallel = dict(pipeline=4)
        batch = dict(global_size=64, accumulation=16)
    """
    stages, count = cx.stages, _micro_batches(cx)
    share = (stages - 1) / (count + stages - 1)
    if count >= stages and share > _BUBBLE:
        message = (
            f"{stages} stages wait for {_percent(share)} of the step: (S-1) / (m+S-1) with m = {count} micro-batches"
        )
        yield cx.problem(_batch_keys(cx), message, _more(cx))


@rule("PERF105", "too-few-micro-batches", "warning")
def too_few_micro_batches(cx: Context) -> Iterator[Problem]:
    """The pipeline has fewer micro-batches than stages.

    What it does:
        Compares the micro-batches of a step (batch.accumulation, 1 where nothing says more) with the stages.

    Why:
        A stage works on one micro-batch at a time, so at any moment some stages have none. With a single micro-batch
        a pipeline is as slow as one rank.

    Example:
        parallel = dict(pipeline=4)
        batch = dict(micro_size=4)

    Use instead:
        parallel = dict(pipeline=4)
        batch = dict(micro_size=1, accumulation=12)
    """
    stages, count = cx.stages, _micro_batches(cx)
    if count < stages:
        share = (stages - 1) / (count + stages - 1)
        batches = f"{count} micro-batch{'es' if count > 1 else ''}"
        message = (
            f"{batches} for {stages} stages: {stages - count} of them or more always wait, {_percent(share)} of all"
        )
        yield cx.problem(_batch_keys(cx), message, _more(cx))


_BUBBLE = 0.2


def _micro_batches(cx: Context) -> int:
    """The micro-batches of a step of a pipeline; unknown where there is none, or where the layout is no legal one."""
    asked = cx.requested_batch
    if cx.stages == 1 or (not cx.unlisted and cx.stages > cx.num_layers):
        raise UnknownValueError("pipeline")
    if cx.world_size is None and (asked.accumulation or asked.global_size is None):
        return int(asked.accumulation or 1)
    whole, micro, accumulation = cx.batch
    if whole != micro * accumulation * cx.data_size or micro % least_micro_size(cx.cuboid):
        raise UnknownValueError("batch")
    return accumulation


def _batch_keys(cx: Context) -> tuple[str, ...]:
    """Where the number of micro-batches comes from."""
    micro = ("batch.micro_size",) if cx.requested_batch.global_size is not None else ()
    return "batch.accumulation", "schedule.num_microbatches", *micro, "batch.global_size", cx.pipeline_key


def _more(cx: Context) -> str:
    """What to write for enough micro-batches: of as many samples a step as before, where that can be."""
    needed, asked = 4 * (cx.stages - 1), cx.requested_batch
    at_schedule = cx.given("schedule.num_microbatches") and not cx.spec.batch.accumulation
    name = "schedule.num_microbatches" if at_schedule else "batch.accumulation"
    if asked.global_size is None:
        return f"{name}={needed}: {_percent(_BUBBLE)}"
    if cx.world_size is None:
        return f"{name}={needed} or more, and a global_size to fit"
    data, least = cx.data_size, least_micro_size(cx.cuboid)
    samples = asked.global_size // data
    fits = [micro for micro in divisors(samples) if micro % least == 0 and samples // micro >= needed]
    if not fits:
        micro = asked.micro_size or least
        more = "" if asked.micro_size and not asked.accumulation else f" with {name}={needed}"
        return f"batch.global_size={micro * needed * data}{more}"
    micro_size, accumulation = f"batch.micro_size={fits[-1]}", f"{name}={samples // fits[-1]}"
    if asked.micro_size is None:
        return accumulation
    return micro_size if asked.accumulation is None else f"{micro_size} with {accumulation}"


# Stages that wait for each other -----------------------------------------------------------------------------------


@rule("PERF106", "uneven-stages", "warning")
def uneven_stages(cx: Context) -> Iterator[Problem]:
    """One stage computes over 15 % more than the mean of the stages.

    What it does:
        Adds up the multiplications of each stage: its layers, and on the last one the head. Compares the busiest stage
        with the mean. Cuts by method='parameters' and 'type:...' are left alone: they spread something else.

    Why:
        In a full pipeline all stages keep the pace of the busiest one.

    Example:
        parallel = dict(pipeline=dict(size=2, counts=[2, 6]))
        batch = dict(accumulation=4)

    Use instead:
        parallel = dict(pipeline=dict(size=2, counts=[4, 4]))
        batch = dict(accumulation=4)
    """
    counts, model = cut_of(cx), cx.model_of(Model)
    fits = cx.world_size is None or cx.data_size > 0  # unknown where it does not: what is not legal is not slow
    if counts is None or len(counts) == 1 or not fits:
        return
    if (cx.multi_stage_pipeline.method or "").startswith(("parameters", "type:")):
        return
    weights = layout_of(model).pipeline_weights(model, "cost", seq_len_of(cx.spec))
    loads = weights.loads(counts)
    share = imbalance(loads)
    if share > _UNEVEN:
        busiest = loads.index(max(loads))
        worth = ", ".join(f"{load / weights.layer:.2g}" for load in loads[:16]) + (", ..." if len(loads) > 16 else "")
        message = f"stage {busiest} computes {_percent(share)} more than the mean: stages are worth {worth} layers"
        cuts = "parallel.pipeline.counts", cx.ids_key, "parallel.pipeline.method", cx.pipeline_key
        yield cx.problem(cuts, message, _evener(cx, share, weights))


_UNEVEN = 0.15


def _evener(cx: Context, share: float, weights: EvenWeights) -> str:
    num_layers = cx.num_layers

    def best(stages: int) -> tuple[tuple[int, ...], float]:
        counts = balanced(weights, num_layers, stages)
        return counts, imbalance(weights.loads(counts))

    counts, least = best(cx.stages)
    if least < share - 1e-9:
        return f"{_cut(cx, counts)}: {_percent(least)}"
    for stages in reversed(divisors(cx.stages)[1:-1]):
        if best(stages)[1] <= _UNEVEN:
            return f"no cut of {num_layers} layers is evener; {stages} stages: {_percent(best(stages)[1])}"
    return f"no cut of {num_layers} layers is evener: more layers, or fewer stages"


def _cut(cx: Context, counts: tuple[int, ...]) -> str:
    if cx.from_parallel("pipeline"):
        return f"counts={list(counts)}"
    return "custom_pipeline_stage_id=" + " + ".join(f"[{stage}] * {count}" for stage, count in enumerate(counts))


# What is sent or computed for nothing ------------------------------------------------------------------------------


@rule("PERF108", "all-reduce-of-gradients", "warning")
def all_reduce_of_gradients(cx: Context) -> Iterator[Problem]:
    """ZeRO 1 or 2 with use_multi_rank_bucket_allreduce.

    What it does:
        Finds zero.use_multi_rank_bucket_allreduce=True. dslpar's default is False; DeepSpeed's is True.

    Why:
        DeepSpeed 0.19 then sums each gradient on all ranks, though one rank alone needs it: 3 (N-1)/N instead of
        2 (N-1)/N elements a parameter and step, for N data ranks.

    Example:
        zero = dict(stage=1, use_multi_rank_bucket_allreduce=True)

    Use instead:
        zero = dict(stage=1)
    """
    zero, key = cx.spec.zero, "zero.use_multi_rank_bucket_allreduce"
    read = zero.stage == 2 or (zero.stage == 1 and not takes_bf16_optimizer(cx))  # else DEAD116 says so
    if read and zero.extra.get("use_multi_rank_bucket_allreduce") and cx.data_size > 1:
        sums = cx.batch.accumulation if zero.stage == 2 else 1
        message = f"{_sent(cx, 2 * sums + 1)} are sent a step and rank, where {_sent(cx, sums + 1)} do"
        yield cx.problem(key, message, "leave it out")


@rule("PERF109", "gradients-sent-many-times", "info")
def gradients_sent_many_times(cx: Context) -> Iterator[Problem]:
    """ZeRO 2 with accumulation: gradients are sent at every micro-batch.

    What it does:
        Finds stage 2 with more than one micro-batch a step, and counts what is sent: (m + 1) (N-1)/N elements a
        parameter for m micro-batches and N data ranks, where ZeRO 1 sends 2 (N-1)/N.

    Why:
        ZeRO 2 keeps no whole gradient to add to, so each micro-batch's is reduced at once. ZeRO 1 adds them up first,
        and needs memory for a whole gradient.

    Example:
        zero = 2
        batch = dict(accumulation=4)

    Use instead:
        zero = 1
        batch = dict(accumulation=4)
    """
    count = cx.batch.accumulation
    if cx.spec.zero.stage == 2 and cx.stages == 1 and count > 1 and cx.data_size > 1:
        message = (
            f"ZeRO 2 sends {_sent(cx, count + 1)} a step and rank with {count} micro-batches, ZeRO 1 {_sent(cx, 2)}"
        )
        yield cx.problem("zero.stage", message, "stage 1, if a whole gradient fits; or larger micro-batches, and fewer")


def _sent(cx: Context, times: int) -> str:
    return f"{times * (cx.data_size - 1) / cx.data_size:.3g} elements a parameter"


def _percent(share: float) -> str:
    return f"{100 * share:.1f}".removesuffix(".0") + " %"


RULES = (
    below_break_even,
    bubble,
    too_few_micro_batches,
    uneven_stages,
    all_reduce_of_gradients,
    gradients_sent_many_times,
)
