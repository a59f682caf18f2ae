"""BAT107 and on, PIP112, DEAD102 and on: the pipeline's schedule, torch's and DeepSpeed's learning-rate schedulers,
gradient handlers, checkpoints and activation checkpointing.
"""

from __future__ import annotations

from collections.abc import Iterator

from dslpar.linter.context import Context
from dslpar.linter.problem import Problem
from dslpar.linter.rule import rule


@rule("BAT107", "two-accumulations")
def two_accumulations(cx: Context) -> Iterator[Problem]:
    """schedule.num_microbatches differs from batch.accumulation.

    What it does:
        Compares the two, if both are given.

    Why:
        They are the same number: the micro-batches of one step.

    Example:
        parallel = dict(pipeline=2)
        batch = dict(accumulation=2)
        schedule = dict(type='1f1b', num_microbatches=4)

    Use instead:
        parallel = dict(pipeline=2)
        schedule = dict(type='1f1b', num_microbatches=4)
    """
    if cx.spec.schedule is None:
        return
    theirs, ours = cx.spec.schedule.num_microbatches, cx.spec.batch.accumulation
    if None not in (theirs, ours) and theirs != ours:
        message = f"num_microbatches is {theirs}, and batch.accumulation is {ours}"
        yield cx.problem("schedule.num_microbatches", message, "keep one of the two")


@rule("PIP112", "interleaved-schedule")
def interleaved_schedule(cx: Context) -> Iterator[Problem]:
    """Several chunks of layers on each stage.

    What it does:
        Finds schedule.num_chunks above 1.

    Why:
        Several chunks need the interleaved schedule, which is not part of this version of dslpar.

    Example:
        parallel = dict(pipeline=2)
        schedule = dict(type='1f1b', num_chunks=2)

    Use instead:
        parallel = dict(pipeline=2)
        schedule = dict(type='1f1b')
    """
    if cx.spec.schedule is not None and cx.spec.schedule.num_chunks > 1:
        message = f"num_chunks {cx.spec.schedule.num_chunks} needs the interleaved schedule, which is not supported"
        yield cx.problem("schedule.num_chunks", message, "num_chunks=1")


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


@rule("BAT108", "schedule-ends-too-early")
def schedule_ends_too_early(cx: Context) -> Iterator[Problem]:
    """A learning-rate scheduler that ends before the run.

    What it does:
        Compares total_steps of OneCycleLR with train.steps.

    Why:
        torch's OneCycleLR raises an error at the first step beyond its end.

    Example:
        lr_scheduler = dict(type='OneCycleLR', total_steps=50)
        train = dict(steps=100)

    Use instead:
        lr_scheduler = dict(type='OneCycleLR', total_steps=100)
        train = dict(steps=100)
    """
    total, steps = cx.other_lr_scheduler.args.get("total_steps"), cx.spec.train.steps
    if total is not None and total < steps:
        message = f"the scheduler has {total} steps, and the run {steps}"
        yield cx.problem("lr_scheduler.total_steps", message, f"total_steps={steps}, or a shorter run")


@rule("BAT109", "no-momentum-to-cycle")
def no_momentum_to_cycle(cx: Context) -> Iterator[Problem]:
    """A scheduler that cycles the momentum with an optimizer without momentum.

    What it does:
        Checks that the optimizer has momentum or betas for CyclicLR and OneCycleLR, unless cycle_momentum is False.

    Why:
        torch's schedulers raise an error when they are built.

    Example:
        optimizer = dict(type='Adadelta', lr=1.0)
        lr_scheduler = dict(type='OneCycleLR', total_steps=100)

    Use instead:
        optimizer = dict(type='Adadelta', lr=1.0)
        lr_scheduler = dict(type='OneCycleLR', total_steps=100, cycle_momentum=False)
    """
    schedule, optimizer = cx.other_lr_scheduler, cx.other_optimizer
    from dslpar.schema.torch_optimizers import named

    row = named(optimizer.target)
    cycles = schedule.target in ("CyclicLR", "OneCycleLR") and schedule.args.get("cycle_momentum") is not False
    if cycles and row is not None and not {"momentum", "betas"} & set(row.args):
        message = f"{schedule.target} cycles the momentum, and {optimizer.target} has none"
        yield cx.problem("lr_scheduler", message, "add cycle_momentum=False to lr_scheduler")


@rule("PERF102", "whole-stage-recomputed", "info")
def whole_stage_recomputed(cx: Context) -> Iterator[Problem]:
    """All layers of the model are one segment of activation checkpointing.

    What it does:
        Compares activation_checkpoint.interval with the number of layers, if there is no pipeline.

    Why:
        The backward pass of that segment stores the activations of all layers at once, so the peak memory is the same.
        (A pipeline stage holds several micro-batches, of which only one is recomputed at a time.)

    Example:
        activation_checkpoint = 100

    Use instead:
        activation_checkpoint = 2
    """
    if cx.spec.activation_checkpoint is None or cx.stages > 1:
        return
    interval, layers = cx.spec.activation_checkpoint.interval, cx.num_layers
    if interval >= layers > 1:
        message = f"a segment has {interval} layers, and the model {layers}: the peak memory is not reduced"
        yield cx.problem("activation_checkpoint.interval", message, f"fewer than {layers}, such as 1")


RULES = (
    two_accumulations,
    interleaved_schedule,
    schedule_without_stages,
    handler_with_nothing_to_do,
    nothing_to_keep,
    lr_without_effect,
    schedule_ends_too_early,
    no_momentum_to_cycle,
    whole_stage_recomputed,
)
