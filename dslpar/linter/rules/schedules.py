"""BAT107 and on, PIP112, DEAD: the sections `schedule` and `lr_scheduler` by name, handlers and checkpoints."""

from __future__ import annotations

from collections.abc import Iterator

from dslpar.linter.context import Context
from dslpar.linter.problem import Problem
from dslpar.linter.rule import rule


@rule("BAT107", "two-accumulations")
def two_accumulations(cx: Context) -> Iterator[Problem]:
    """schedule.num_microbatches is not batch.accumulation.

    What it does:
        Compares the two, where both are given.

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
        message = f"num_microbatches is {theirs}, and batch.accumulation {ours}"
        yield cx.problem("schedule.num_microbatches", message, "keep one of the two")


@rule("PIP112", "interleaved-schedule")
def interleaved_schedule(cx: Context) -> Iterator[Problem]:
    """More than one run of layers on each stage.

    What it does:
        Refuses schedule.num_chunks above 1.

    Why:
        Stages of several runs need the interleaved schedule, which is not part of this version of dslpar.

    Example:
        parallel = dict(pipeline=2)
        schedule = dict(type='1f1b', num_chunks=2)

    Use instead:
        parallel = dict(pipeline=2)
        schedule = dict(type='1f1b')
    """
    if cx.spec.schedule is not None and cx.spec.schedule.num_chunks > 1:
        message = f"num_chunks {cx.spec.schedule.num_chunks} needs the interleaved schedule, which this version has not"
        yield cx.problem("schedule.num_chunks", message, "num_chunks=1")


@rule("DEAD102", "schedule-without-stages", "warning")
def schedule_without_stages(cx: Context) -> Iterator[Problem]:
    """The order of a pipeline's micro-batches is said, and there is no pipeline.

    What it does:
        Finds schedule.type where the pipeline has one stage.

    Why:
        It has no effect; probably a size is missing. (num_microbatches alone counts also without a pipeline.)

    Example:
        schedule = dict(type='1f1b', num_microbatches=4)

    Use instead:
        parallel = dict(pipeline=2)
        schedule = dict(type='1f1b', num_microbatches=4)
    """
    schedule = cx.spec.schedule
    if cx.stages == 1 and cx.given("schedule.type") and schedule is not None and schedule.type:
        message = "schedule.type has no effect: the pipeline has one stage"
        yield cx.problem("schedule.type", message, "give the pipeline a size, or say batch = dict(accumulation=...)")


@rule("DEAD103", "handler-with-nothing-to-do", "warning")
def handler_with_nothing_to_do(cx: Context) -> Iterator[Problem]:
    """A handler of ColossalAI's own, whose work DeepSpeed or dslpar does already.

    What it does:
        Finds DataParallelGradientHandler, ZeROGradientHandler, PipelineSharedModuleGradientHandler and
        SequenceParallelGradientHandler, and leaves them out.

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
    """checkpoint.keep, and no checkpoint is ever written.

    What it does:
        Finds checkpoint.keep where train.save_interval is 0.

    Why:
        It has no effect; probably save_interval was meant to be left out, which keeps the last step.

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
    """The optimizer's lr, and a schedule that has a peak of its own.

    What it does:
        Finds optimizer.lr beside another number in the schedule's own key for its peak: cycle_max_lr of OneCycle,
        max_lr of CyclicLR and OneCycleLR, warmup_max_lr of WarmupLR and WarmupDecayLR, lr_range_test_min_lr of
        LRRangeTest.

    Why:
        The schedule's number holds. Left out there, the optimizer's is the peak.

    Example:
        optimizer = dict(type='SGD', lr=0.1, momentum=0.9)
        lr_scheduler = dict(type='OneCycleLR', max_lr=0.5, total_steps=100)

    Use instead:
        optimizer = dict(type='SGD', lr=0.5, momentum=0.9)
        lr_scheduler = dict(type='OneCycleLR', total_steps=100)
    """
    name, args = cx.other_lr_scheduler.target, cx.other_lr_scheduler.args
    from dslpar.schema.torch_schedulers import SCHEDULES

    key = SCHEDULES[name].sets_lr
    lr = cx.spec.optimizer.lr
    if cx.given("optimizer.lr") and args.get(key, lr) != lr:
        message = f"optimizer.lr {lr} has no effect: {name} has {key} {args[key]}"
        yield cx.problem("optimizer.lr", message, f"keep one of optimizer.lr and lr_scheduler.{key}")


@rule("BAT108", "schedule-ends-too-early")
def schedule_ends_too_early(cx: Context) -> Iterator[Problem]:
    """A schedule that has no learning rate for the last steps of the run.

    What it does:
        Compares total_steps of OneCycleLR with train.steps.

    Why:
        torch's OneCycleLR raises an error at the first step past its end.

    Example:
        lr_scheduler = dict(type='OneCycleLR', total_steps=50)
        train = dict(steps=100)

    Use instead:
        lr_scheduler = dict(type='OneCycleLR', total_steps=100)
        train = dict(steps=100)
    """
    total, steps = cx.other_lr_scheduler.args.get("total_steps"), cx.spec.train.steps
    if total is not None and total < steps:
        message = f"the schedule has {total} steps, and the run {steps}"
        yield cx.problem("lr_scheduler.total_steps", message, f"total_steps={steps}, or a shorter run")


@rule("BAT109", "no-momentum-to-cycle")
def no_momentum_to_cycle(cx: Context) -> Iterator[Problem]:
    """A schedule that cycles momentum, and an optimizer that has none.

    What it does:
        Checks that the optimizer of CyclicLR and OneCycleLR has momentum or betas, unless cycle_momentum is False.

    Why:
        torch's schedules raise an error when they are made.

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
    """All layers of the model are one piece of activation checkpointing.

    What it does:
        Compares activation_checkpoint.interval with the layers of the model, where there is no pipeline.

    Why:
        The backward of that piece stores the activations of all layers again at once, and saves no memory at its peak.
        (A stage of a pipeline holds several micro-batches, of which only one is computed again at a time.)

    Example:
        activation_checkpoint = 100

    Use instead:
        activation_checkpoint = 2
    """
    if cx.spec.activation_checkpoint is None or cx.stages > 1:
        return
    interval, layers = cx.spec.activation_checkpoint.interval, cx.num_layers
    if interval >= layers > 1:
        message = f"a piece of {interval} layers, and the model has {layers}: at its peak nothing is saved"
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
