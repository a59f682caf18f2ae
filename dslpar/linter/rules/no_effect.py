"""DEAD: keys without an effect in this combination of sections; a few other DEAD rules are beside their subject.

A key that nothing reads costs the most and shows the least: the run is another one than was meant. Which keys have an
effect was looked up one by one: those of dslpar's sections in dslpar, those of DeepSpeed in DeepSpeed 0.19.8
(`_configure_zero_optimizer`, `_configure_bf16_optimizer` and `_do_optimizer_sanity_check` of runtime/engine.py,
runtime/zero/partition_parameters.py). That such a key is a warning and not an error comes from clippy and actionlint.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping

from dslpar.core import mesh
from dslpar.core.errors import COMMAND_LINE
from dslpar.layout.modes import MODES
from dslpar.layout.resolve import offloads
from dslpar.linter.context import Context
from dslpar.linter.problem import Problem
from dslpar.linter.rule import rule


@rule("DEAD110", "options-of-one-rank", "warning")
def options_of_one_rank(cx: Context) -> Iterator[Problem]:
    """Options of a tensor mode with a tensor group of one rank.

    What it does:
        Finds sequence, depth, shape, impl, residual, inner and keep if parallel.tensor has size 1 and a mode with these
        options. A mode by itself is accepted: dict(size=1, mode='1d') is a form that ColossalAI documents.

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
    """An order of the axes that makes no difference.

    What it does:
        Finds order=('data', 'pipe', 'tensor') if the pipeline has one stage, or if the data size is 1.

    Why:
        The orders exchange the data and pipeline axes; if one of them has size 1, they are the same.

    Example:
        parallel = dict(order=('data', 'pipe', 'tensor'))

    Use instead:
        parallel = dict(pipeline=2, order=('data', 'pipe', 'tensor'))
    """
    if cx.spec.parallel.order == mesh.LEGACY_ORDER and (cx.stages == 1 or cx.data_size == 1):
        why = "the pipeline has one stage" if cx.stages == 1 else "data is 1"
        yield cx.problem("parallel.order", f"order has no effect: {why}", "leave it out")


@rule("DEAD112", "evaluation-that-never-runs", "info")
def evaluation_that_never_runs(cx: Context) -> Iterator[Problem]:
    """train.eval_steps without an evaluation.

    What it does:
        Finds train.eval_steps if train.eval_interval is left out.

    Why:
        Only `train.py --eval-only` uses it then. Probably eval_interval is missing.

    Example:
        train = dict(steps=100, eval_steps=4)

    Use instead:
        train = dict(steps=100, eval_steps=4, eval_interval=50)
    """
    train = cx.spec.train
    if cx.given("train.eval_steps") and train.eval_interval is None and train.eval_steps:
        message = "eval_steps has no effect on training, which never evaluates; only --eval-only uses it"
        yield cx.problem("train.eval_steps", message, "add train.eval_interval, or leave it out")


@rule("DEAD113", "interval-longer-than-the-run", "warning")
def interval_longer_than_the_run(cx: Context) -> Iterator[Problem]:
    """An interval of more steps than the run has.

    What it does:
        Compares train.eval_interval, log_interval and save_interval with train.steps. A run that is shortened on the
        command line is a trial, and accepted.

    Why:
        The interval has no effect: only the last step logs, evaluates and saves, and an evaluation precedes the first
        one. A run that should be saved along the way is saved only at its end.

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
    "eval_interval": "it evaluates only before the first step and after the last",
    "log_interval": "it logs only the last step",
    "save_interval": "it saves only after the last step",
}


@rule("DEAD114", "floor-of-a-constant", "warning")
def floor_of_a_constant(cx: Context) -> Iterator[Problem]:
    """min_lr with a constant learning rate.

    What it does:
        Finds lr_scheduler.min_lr above 0 if the type is 'constant', the default.

    Why:
        After its warm-up a constant learning rate never falls; probably the type is missing.

    Example:
        lr_scheduler = dict(warmup_steps=10, min_lr=1e-5)

    Use instead:
        lr_scheduler = dict(type='cosine', warmup_steps=10, min_lr=1e-5)
    """
    scheduler = cx.own_lr_scheduler
    low, peak = scheduler.min_lr, cx.spec.optimizer.lr
    if scheduler.type == "constant" and 0 < low <= peak:  # BAT106 reports one above the peak
        message = f"min_lr {low} has no effect: the learning rate is constant"
        yield cx.problem("lr_scheduler.min_lr", message, "type='cosine'")


@rule("DEAD115", "nothing-to-shard", "warning")
def nothing_to_shard(cx: Context) -> Iterator[Problem]:
    """ZeRO with one data rank.

    What it does:
        Finds zero.stage 1 to 3 in fp32, without offload, if pipeline and tensor take all ranks. (Half precision and
        offload need ZeRO, even if it shards nothing. A run of one rank is a trial, and accepted.)

    Why:
        ZeRO shards over the data ranks. With one it saves nothing, and still costs buffers and copies.

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
    """A key of `zero` that DeepSpeed does not use at this stage.

    What it does:
        Compares the keys with those that DeepSpeed 0.19 uses at the stage. At stage 1 in bf16, without offload, it uses
        another optimizer, which has only allgather_bucket_size; with a pipeline it turns overlap_comm off.

    Why:
        DeepSpeed silently accepts all of them at any stage.

    Example:
        zero = dict(stage=2, stage3_prefetch_bucket_size=5e7)

    Use instead:
        zero = dict(stage=3, stage3_prefetch_bucket_size=5e7)
    """
    stage, extra = cx.spec.zero.stage, cx.spec.zero.extra
    bf16_optimizer = uses_bf16_optimizer(cx)
    for name in extra:
        stages = _stages_of(name)
        hint = f"leave {name} out"
        if stage not in stages:
            where = f"it is used at stage {_either(stages)}" if stages else "DeepSpeed never uses it"
            message = f"{name} has no effect at ZeRO stage {stage}: {where}"
            legal = [stage for stage in stages if stage < 2 or cx.stages == 1]
            hint += f", or stage {_either(legal)}" if legal else ""
        elif bf16_optimizer and name in _NOT_IN_BF16:
            message = f"{name} has no effect at ZeRO stage 1 in bf16: DeepSpeed's BF16_Optimizer does not use it"
        elif name == "overlap_comm" and extra[name] and cx.stages > 1:
            message = "overlap_comm has no effect with a pipeline: DeepSpeed turns it off"
        else:
            continue
        yield cx.problem(f"zero.{name}", message, hint)


def _either(stages: Iterable[int]) -> str:
    return " or ".join(map(str, stages))


def _stages_of(name: str) -> tuple[int, ...]:
    """The stages at which DeepSpeed uses a key; other rules check offload and compute_grad_norm."""
    if name.startswith(("stage3_", "zero_")):
        return (3,)
    return next((stages for stages, names in _KEYS_OF_STAGES.items() if name in names), (0, 1, 2, 3))


_KEYS_OF_STAGES: Mapping[tuple[int, ...], Collection[str]] = {
    (): ("allgather_partitions",),
    (1, 2): (
        *("use_multi_rank_bucket_allreduce", "allgather_bucket_size", "round_robin_gradients", "parameter_alignment"),
        "ignore_unused_parameters",
    ),
    (1, 2, 3): (
        *("contiguous_gradients", "reduce_scatter", "reduce_bucket_size", "overlap_comm", "load_from_fp32_weights"),
        "pipeline_loading_checkpoint",
    ),
    (3,): (
        *("sub_group_size", "memory_efficient_linear", "override_module_apply", "log_trace_cache_warnings"),
        *("enable_sanity_checks", "save_muon_momentum_buffer_in_memory", "leaf_module"),
    ),
}
_NOT_IN_BF16 = {*_KEYS_OF_STAGES[1, 2], *_KEYS_OF_STAGES[1, 2, 3]} - {
    *("allgather_bucket_size", "load_from_fp32_weights", "pipeline_loading_checkpoint")
}


@rule("DEAD117", "raw-key-without-effect", "warning")
def raw_key_without_effect(cx: Context) -> Iterator[Problem]:
    """A known key of `deepspeed` that has no effect with dslpar.

    What it does:
        Finds dataloader_drop_last, vocabulary_size, disable_allgather, seq_parallel_communication_data_type and aio.

    Why:
        dslpar loads the data and splits sequences itself; offload to NVMe is not part of this version; and DeepSpeed
        reads two of the keys without using them.

    Example:
        deepspeed = dict(dataloader_drop_last=True)

    Use instead:
        deepspeed = dict(steps_per_print=10)
    """
    for name in cx.spec.deepspeed:
        if name in _IDLE:
            yield cx.problem_of_key(f"deepspeed.{name}", f"{name} has no effect: {_IDLE[name]}", "leave it out")


_IDLE: Mapping[str, str] = {
    "dataloader_drop_last": "dslpar loads the data itself, and every batch is whole",
    "vocabulary_size": "DeepSpeed only uses it in a warning",
    "disable_allgather": "DeepSpeed 0.19 reads it and never uses it",
    "seq_parallel_communication_data_type": "DeepSpeed's own sequence parallelism is never on",
    "aio": "it is for NVMe, and nothing is offloaded there",
}


@rule("DEAD118", "bf16-key-of-another-stage", "warning")
def bf16_key_of_another_stage(cx: Context) -> Iterator[Problem]:
    """A key of bf16 that DeepSpeed does not use at this stage of ZeRO.

    What it does:
        Finds immediate_grad_update at other stages than 1 and with offload, and check_grad_overflow at stage 3, and at
        stage 1 without offload.

    Why:
        In bf16 DeepSpeed has three optimizers: one for stage 1 without offload, one for stage 1 with offload and stage
        2, and one for stage 3. Each has keys of its own.

    Example:
        precision = dict(dtype='bf16', immediate_grad_update=True)
        zero = 2

    Use instead:
        precision = dict(dtype='bf16', immediate_grad_update=True)
        zero = 1
    """
    stage, bf16_optimizer = cx.spec.zero.stage, uses_bf16_optimizer(cx)
    if cx.spec.precision.dtype != "bf16" or not stage:
        return  # PRE101 reports stage 0
    dead = {"immediate_grad_update": not bf16_optimizer, "check_grad_overflow": bf16_optimizer or stage == 3}
    for name in cx.spec.precision.extra:
        if dead.get(name):
            offload = " with offload" if stage == 1 and not bf16_optimizer else ""
            message = f"{name} has no effect in bf16 at ZeRO stage {stage}{offload}"
            yield cx.problem(f"precision.{name}", message, f"leave {name} out")


def uses_bf16_optimizer(cx: Context) -> bool:
    """Whether DeepSpeed uses its BF16_Optimizer; dslpar always accumulates gradients in fp32."""
    return cx.spec.precision.dtype == "bf16" and cx.spec.zero.stage == 1 and not offloads(cx.spec, "optimizer")


@rule("DEAD102", "schedule-without-stages", "warning")
def schedule_without_stages(cx: Context) -> Iterator[Problem]:
    """A pipeline schedule without a pipeline.

    What it does:
        Finds schedule.type if the pipeline has one stage.

    Why:
        It has no effect; probably the pipeline's size is missing. (num_microbatches has an effect without a pipeline.)

    Example:
        schedule = dict(type='1f1b', num_microbatches=4)

    Use instead:
        parallel = dict(pipeline=2)
        schedule = dict(type='1f1b', num_microbatches=4)
    """
    schedule = cx.spec.schedule
    if cx.stages == 1 and cx.given("schedule.type") and schedule is not None and schedule.type:
        message = "schedule.type has no effect: the pipeline has one stage"
        yield cx.problem("schedule.type", message, "give the pipeline a size, or write batch = dict(accumulation=...)")


@rule("DEAD103", "handler-with-nothing-to-do", "warning")
def handler_with_nothing_to_do(cx: Context) -> Iterator[Problem]:
    """A gradient handler of ColossalAI, whose work DeepSpeed or dslpar already does.

    What it does:
        Finds DataParallelGradientHandler, ZeROGradientHandler, PipelineSharedModuleGradientHandler and
        SequenceParallelGradientHandler, which are left out.

    Why:
        Gradients that are reduced twice would be wrong.

    Example:
        gradient_handler = [dict(type='PipelineSharedModuleGradientHandler')]

    Use instead:
        gradient_handler = []
    """
    yield from cx.misreads("DEAD103")


@rule("DEAD105", "nothing-to-keep", "warning")
def nothing_to_keep(cx: Context) -> Iterator[Problem]:
    """checkpoint.keep without any checkpoint.

    What it does:
        Finds checkpoint.keep if train.save_interval is 0.

    Why:
        It has no effect; probably save_interval was meant to be left out, which saves the last step.

    Example:
        train = dict(save_interval=0)
        checkpoint = dict(keep=2)

    Use instead:
        train = dict(save_interval=50)
        checkpoint = dict(keep=2)
    """
    if cx.spec.train.save_interval == 0 and cx.spec.checkpoint.keep is not None:
        message = "keep has no effect: save_interval 0 writes no checkpoint"
        yield cx.problem("checkpoint.keep", message, "leave keep out, or give train.save_interval")


@rule("DEAD106", "lr-without-effect", "warning")
def lr_without_effect(cx: Context) -> Iterator[Problem]:
    """optimizer.lr with a scheduler that has another peak.

    What it does:
        Finds optimizer.lr together with another value of the scheduler's key for its peak: cycle_max_lr of OneCycle,
        max_lr of CyclicLR and OneCycleLR, warmup_max_lr of WarmupLR and WarmupDecayLR, lr_range_test_min_lr of
        LRRangeTest.

    Why:
        The scheduler's value is used. If it is left out, optimizer.lr is the peak.

    Example:
        optimizer = dict(type='SGD', lr=0.1, momentum=0.9)
        lr_scheduler = dict(type='OneCycleLR', max_lr=0.5, total_steps=100)

    Use instead:
        optimizer = dict(type='SGD', lr=0.5, momentum=0.9)
        lr_scheduler = dict(type='OneCycleLR', total_steps=100)
    """
    name, args = cx.other_lr_scheduler.target, cx.other_lr_scheduler.args
    from dslpar.schema.torch_schedulers import LR_SCHEDULERS

    key = LR_SCHEDULERS[name].sets_lr
    lr = cx.spec.optimizer.lr
    if cx.given("optimizer.lr") and args.get(key, lr) != lr:
        message = f"optimizer.lr {lr} has no effect: {name} has {key} {args[key]}"
        yield cx.problem("optimizer.lr", message, f"keep one of optimizer.lr and lr_scheduler.{key}")


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
    schedule_without_stages,
    handler_with_nothing_to_do,
    nothing_to_keep,
    lr_without_effect,
)
