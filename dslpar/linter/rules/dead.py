"""DEAD110 and on: keys without effect in this combination of sections; the rest of DEAD stands beside what it is of.

A key that nothing reads is the mistake that costs most and shows least: the run goes on, as another one. Who reads what
was looked up, key by key: of dslpar's own sections in dslpar, of DeepSpeed's keys in DeepSpeed 0.19.8
(`_configure_zero_optimizer`, `_configure_bf16_optimizer` and `_do_optimizer_sanity_check` of runtime/engine.py,
runtime/zero/partition_parameters.py). That a key with no effect is a finding of its own, and no error, is clippy's and
actionlint's way.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from dslpar.core import mesh
from dslpar.core.errors import COMMAND_LINE
from dslpar.layout.resolve import MODES, offloads
from dslpar.linter.context import Context
from dslpar.linter.problem import Problem
from dslpar.linter.rule import rule


@rule("DEAD110", "options-of-one-rank", "warning")
def options_of_one_rank(cx: Context) -> Iterator[Problem]:
    """Options of a tensor mode, and the tensor group is one rank.

    What it does:
        Finds sequence, depth, shape, impl, residual, inner and keep where parallel.tensor has size 1 and a mode that
        they belong to. A mode by itself is left alone: dict(size=1, mode='1d') is a form that ColossalAI documents.

    Why:
        One rank holds the whole layer in every mode; probably the size is missing.

    Example:
        parallel = dict(tensor=dict(size=1, mode='1d', sequence=True))

    Use instead:
        parallel = dict(tensor=dict(size=2, mode='1d', sequence=True))
    """
    tensor = cx.spec.parallel.tensor
    if tensor is None or tensor.size > 1 or tensor.mode is None or tensor.mode not in MODES:
        return
    if MODES[tensor.mode].axes(tensor) is None:
        return
    given = [name for name in (*MODES[tensor.mode].options, "keep") if getattr(tensor, name) is not None]
    if given:
        message = f"{' and '.join(given)} {'have' if len(given) > 1 else 'has'} no effect: the tensor group is one rank"
        yield cx.problem(f"parallel.tensor.{given[0]}", message, "a size over 1, or leave out what has no effect")


@rule("DEAD111", "order-of-one-axis", "warning")
def order_of_one_axis(cx: Context) -> Iterator[Problem]:
    """An order of the axes, and one of the two that it exchanges has one rank.

    What it does:
        Finds order=('data', 'pipe', 'tensor') where the pipeline has one stage, or where data is 1.

    Why:
        The orders differ in which of data and pipeline is the slow axis; with one of them alone they are the same.

    Example:
        parallel = dict(order=('data', 'pipe', 'tensor'))

    Use instead:
        parallel = dict(pipeline=2, order=('data', 'pipe', 'tensor'))
    """
    order = cx.spec.parallel.order
    if order != mesh.LEGACY_ORDER:
        return
    alone = "the pipeline has one stage" if cx.stages == 1 else "data is 1" if cx.data_size == 1 else ""
    if alone:
        yield cx.problem("parallel.order", f"order has no effect: {alone}", "leave it out")


@rule("DEAD112", "evaluation-that-never-runs", "info")
def evaluation_that_never_runs(cx: Context) -> Iterator[Problem]:
    """train.eval_steps, and training never evaluates.

    What it does:
        Finds train.eval_steps where train.eval_interval is left out.

    Why:
        Only `train.py --eval-only` reads it then. Probably eval_interval was meant too.

    Example:
        train = dict(steps=100, eval_steps=4)

    Use instead:
        train = dict(steps=100, eval_steps=4, eval_interval=50)
    """
    train = cx.spec.train
    if cx.given("train.eval_steps") and train.eval_interval is None and train.eval_steps:
        message = "eval_steps has no effect on training, which never evaluates; --eval-only alone reads it"
        yield cx.problem("train.eval_steps", message, "add train.eval_interval, or leave it out")


@rule("DEAD113", "interval-longer-than-the-run", "warning")
def interval_longer_than_the_run(cx: Context) -> Iterator[Problem]:
    """Something that happens every so many steps, and the run has fewer.

    What it does:
        Compares train.eval_interval, log_interval and save_interval with train.steps. A run that the command line
        makes shorter is a trial, and left alone.

    Why:
        The number has no effect: what remains is the last step, and of evaluations also the one before the first. A
        run that was to be saved on its way is saved at its end.

    Example:
        train = dict(steps=100, save_interval=1000)

    Use instead:
        train = dict(steps=100, save_interval=10)
    """
    train, trial = cx.spec.train, cx.at("train.steps").path == COMMAND_LINE
    for name, what in _INTERVALS.items():
        interval = getattr(train, name)
        key = f"train.{name}"
        if interval is None or interval <= train.steps:
            continue
        if not trial or cx.at(key).path == COMMAND_LINE:
            message = f"{name} {interval} in a run of {train.steps} steps: {what}"
            yield cx.problem(key, message, f"at most {train.steps}, or a longer run")


_INTERVALS: Mapping[str, str] = {
    "eval_interval": "it evaluates before the first step and after the last alone",
    "log_interval": "it logs the last step alone",
    "save_interval": "it saves after the last step alone",
}


@rule("DEAD114", "floor-of-a-constant", "warning")
def floor_of_a_constant(cx: Context) -> Iterator[Problem]:
    """min_lr, and a learning rate that never falls.

    What it does:
        Finds lr_scheduler.min_lr above 0 where the type is 'constant', which is the default.

    Why:
        After its warm-up a constant rate stays; probably the type is missing.

    Example:
        lr_scheduler = dict(warmup_steps=10, min_lr=1e-5)

    Use instead:
        lr_scheduler = dict(type='cosine', warmup_steps=10, min_lr=1e-5)
    """
    schedule = cx.own_lr_scheduler
    low, peak = schedule.min_lr, cx.spec.optimizer.lr
    if schedule.type == "constant" and 0 < low <= peak:  # above the peak it is BAT106's
        yield cx.problem("lr_scheduler.min_lr", f"min_lr {low} has no effect: the rate is constant", "type='cosine'")


@rule("DEAD115", "nothing-to-shard", "warning")
def nothing_to_shard(cx: Context) -> Iterator[Problem]:
    """ZeRO, and there is one data rank.

    What it does:
        Finds zero.stage 1 to 3 in fp32, without offload, where pipeline and tensor take all ranks. (Half precision and
        offload need ZeRO, whatever it shards. A run of one rank is left alone: it is a trial.)

    Why:
        ZeRO shards over data ranks. Over one it saves nothing, and its buffers and copies remain.

    Example:
        parallel = dict(pipeline=8)
        zero = 1

    Use instead:
        parallel = dict(pipeline=4)
        zero = 1
    """
    stage, half = cx.spec.zero.stage, cx.spec.precision.dtype != "fp32"
    if not stage or half or offloads(cx.spec, "optimizer") or offloads(cx.spec, "param"):
        return
    if cx.data_size == 1 and cx.world > 1:
        ranks = f"{cx.world} / (pipeline {cx.stages} * tensor {cx.cuboid.size}) = 1"
        message = f"ZeRO {stage} saves nothing: data is {ranks}"
        yield cx.problem("zero.stage", message, "zero = 0, or smaller sizes of pipeline and tensor")


@rule("DEAD116", "zero-key-of-another-stage", "warning")
def zero_key_of_another_stage(cx: Context) -> Iterator[Problem]:
    """A key of `zero` that DeepSpeed does not read at this stage.

    What it does:
        Compares the keys with those that DeepSpeed 0.19 reads at the stage. At stage 1 in bf16, without offload, it
        takes another optimizer, which reads allgather_bucket_size alone; with a pipeline it switches overlap_comm off.

    Why:
        DeepSpeed accepts all of them at any stage, in silence.

    Example:
        zero = dict(stage=2, stage3_prefetch_bucket_size=5e7)

    Use instead:
        zero = dict(stage=3, stage3_prefetch_bucket_size=5e7)
    """
    stage, extra = cx.spec.zero.stage, cx.spec.zero.extra
    whole = takes_bf16_optimizer(cx)
    for name in extra:
        stages = _stages_of(name)
        if stage not in stages:
            where = f"it is read at stage {_either(stages)}" if stages else "DeepSpeed never reads it"
            message = f"{name} has no effect at ZeRO stage {stage}: {where}"
        elif whole and name in _NOT_IN_BF16:
            message = f"{name} has no effect at ZeRO stage 1 in bf16: DeepSpeed's BF16_Optimizer does not read it"
        elif name == "overlap_comm" and extra[name] and cx.stages > 1:
            message = "overlap_comm has no effect with a pipeline: DeepSpeed switches it off"
        else:
            continue
        yield cx.problem(f"zero.{name}", message, f"leave {name} out{_or_stage(cx, stages)}")


def _or_stage(cx: Context, stages: tuple[int, ...]) -> str:
    legal = [stage for stage in stages if stage < 2 or cx.stages == 1]
    return f", or stage {_either(legal)}" if cx.spec.zero.stage not in stages and legal else ""


def _either(stages: Iterable[int]) -> str:
    return " or ".join(map(str, stages))


def _stages_of(name: str) -> tuple[int, ...]:
    """The stages at which DeepSpeed reads a key; other rules speak of offload and compute_grad_norm."""
    if name.startswith(("stage3_", "zero_")) or name in _STAGE_3:
        return (3,)
    if name in _STAGES_1_2:
        return (1, 2)
    if name in _NEVER:
        return ()
    return (1, 2, 3) if name in _ALL_STAGES else (0, 1, 2, 3)


_ALL_STAGES = frozenset(
    (
        "contiguous_gradients",
        "reduce_scatter",
        "reduce_bucket_size",
        "overlap_comm",
        "load_from_fp32_weights",
        "pipeline_loading_checkpoint",
    )
)
_STAGES_1_2 = frozenset(
    (
        "use_multi_rank_bucket_allreduce",
        "allgather_bucket_size",
        "round_robin_gradients",
        "parameter_alignment",
        "ignore_unused_parameters",
    )
)
_STAGE_3 = frozenset(
    (
        "sub_group_size",
        "memory_efficient_linear",
        "override_module_apply",
        "log_trace_cache_warnings",
        "enable_sanity_checks",
        "save_muon_momentum_buffer_in_memory",
        "leaf_module",
    )
)
_NEVER = frozenset(("allgather_partitions",))
_NOT_IN_BF16 = (_ALL_STAGES | _STAGES_1_2) - {
    "allgather_bucket_size",
    "load_from_fp32_weights",
    "pipeline_loading_checkpoint",
}


@rule("DEAD117", "raw-key-without-effect", "warning")
def raw_key_without_effect(cx: Context) -> Iterator[Problem]:
    """A key of `deepspeed` that DeepSpeed knows, and that changes nothing in a run of dslpar's.

    What it does:
        Finds dataloader_drop_last, vocabulary_size, disable_allgather, seq_parallel_communication_data_type and aio.

    Why:
        dslpar feeds the engine itself, and splits sequences itself; offload to NVMe is not part of this version; and
        two of the keys DeepSpeed reads and never uses.

    Example:
        deepspeed = dict(dataloader_drop_last=True)

    Use instead:
        deepspeed = dict(steps_per_print=10)
    """
    for name in cx.spec.deepspeed:
        if name in _IDLE:
            key = f"deepspeed.{name}"
            message = f"{name} has no effect: {_IDLE[name]}"
            yield Problem(cx.config.key_at(key), message, "leave it out", key)


_IDLE: Mapping[str, str] = {
    "dataloader_drop_last": "dslpar feeds the engine itself, and every batch is whole",
    "vocabulary_size": "DeepSpeed only warns of it",
    "disable_allgather": "DeepSpeed 0.19 reads it and never uses it",
    "seq_parallel_communication_data_type": "DeepSpeed's own sequence parallelism is never on",
    "aio": "it is of NVMe, and nothing is offloaded there",
}


@rule("DEAD118", "bf16-key-of-another-stage", "warning")
def bf16_key_of_another_stage(cx: Context) -> Iterator[Problem]:
    """A key of bf16 that DeepSpeed does not read at this stage of ZeRO.

    What it does:
        Finds immediate_grad_update where ZeRO is not 1 or has offload, and check_grad_overflow at stage 3, and at
        stage 1 without offload.

    Why:
        In bf16 DeepSpeed has three optimizers: of its own for stage 1 without offload, for stage 1 with offload and
        stage 2, and for stage 3. Each reads keys of its own.

    Example:
        precision = dict(dtype='bf16', immediate_grad_update=True)
        zero = 2

    Use instead:
        precision = dict(dtype='bf16', immediate_grad_update=True)
        zero = 1
    """
    stage, own = cx.spec.zero.stage, takes_bf16_optimizer(cx)
    if cx.spec.precision.dtype != "bf16" or not stage:
        return  # PRE101 refuses stage 0
    dead = {"immediate_grad_update": not own, "check_grad_overflow": own or stage == 3}
    for name in cx.spec.precision.extra:
        if dead.get(name):
            offload = " with offload" if stage == 1 and not own else ""
            message = f"{name} has no effect in bf16 at ZeRO stage {stage}{offload}"
            yield cx.problem(f"precision.{name}", message, f"leave {name} out")


def takes_bf16_optimizer(cx: Context) -> bool:
    """Whether DeepSpeed takes its BF16_Optimizer: gradients add up in fp32 here, always."""
    return cx.spec.precision.dtype == "bf16" and cx.spec.zero.stage == 1 and not offloads(cx.spec, "optimizer")


RULES = (
    options_of_one_rank,
    order_of_one_axis,
    evaluation_that_never_runs,
    interval_longer_than_the_run,
    floor_of_a_constant,
    nothing_to_shard,
    zero_key_of_another_stage,
    raw_key_without_effect,
    bf16_key_of_another_stage,
)
