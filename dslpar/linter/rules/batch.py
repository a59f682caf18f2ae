"""BAT101 and following: the samples of a step, the tokens of a sample, optimizers, and learning-rate schedulers."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from dslpar.layout.divisors import least_micro_size
from dslpar.layout.lr_scheduler import learning_rate
from dslpar.linter.context import Context
from dslpar.linter.problem import Problem, require
from dslpar.linter.rule import rule
from dslpar.schema import sections
from dslpar.schema.datasets import Data, parts_by_key, type_name


@rule("BAT101", "batch-does-not-fit")
def batch_does_not_fit(cx: Context) -> Iterator[Problem]:
    """global_size is not micro_size * accumulation * data size."""
    global_size, micro, accumulation = cx.layout.batch
    data, given = cx.layout.data_size, cx.layout.requested_batch
    if micro * accumulation * data != global_size:
        product = f"micro_size {given.micro_size or '?'} * accumulation {given.accumulation or '?'} * data {data}"
        message = f"global_size {global_size} is not {product}"
        hint = " or ".join(_fitting_sizes(cx)) or "choose fewer ranks, or more ranks per replica"
        yield cx.problem("batch.global_size", message, hint)


def _fitting_sizes(cx: Context) -> list[str]:
    """Return changes of one batch size with which the product equals global_size; empty if all would be too large."""
    given, data, least = cx.layout.requested_batch, cx.layout.data_size, least_micro_size(cx.tensor.cuboid)
    global_size, micro, accumulation = given.global_size, given.micro_size, given.accumulation
    assert global_size is not None, "without a global_size the product fits"
    samples = (micro or least) * (accumulation or 1) * data
    from dslpar.layout.nearest import (
        LARGEST,
        multiples,
    )  # imported here, as below: only a config with a mistake needs it

    if not (micro and accumulation):
        return [f"global_size={size}" for size in multiples(global_size, samples)]
    fitting = [f"global_size={samples}"] if samples <= LARGEST else []
    if global_size % (micro * data) == 0:
        name = "accumulation" if cx.source.given("batch.accumulation") else "schedule.num_microbatches"
        fitting.append(f"{name}={global_size // (micro * data)}")
    if global_size % (accumulation * data * least) == 0:
        fitting.append(f"micro_size={global_size // (accumulation * data)}")
    return fitting


@rule("BAT102", "micro-size-does-not-divide")
def micro_size_does_not_divide(cx: Context) -> Iterator[Problem]:
    """micro_size is not a multiple of the number of ranks that split a micro-batch."""
    cuboid, given = cx.tensor.cuboid, cx.layout.requested_batch
    least = least_micro_size(cuboid)
    micro, accumulation = given.micro_size or cx.layout.batch.micro_size, given.accumulation or 1
    if micro % least == 0:
        return
    from dslpar.layout.nearest import multiples

    message = f"micro_size {micro} does not divide over the cuboid: mode {cuboid.mode!r} needs multiples of {least}"
    if given.micro_size is None:
        sizes = [str(size * accumulation * cx.layout.data_size) for size in multiples(micro, least)]
        yield cx.problem("batch.global_size", message, f"global_size={' or '.join(sizes)}")
        return
    samples = given.global_size
    nearest = [str(size) for size in multiples(micro, least) if samples is None or samples % (size * accumulation) == 0]
    hint = (
        f"nearest legal: {' or '.join(nearest)}"
        if nearest
        else f"choose a multiple of {least}, and a global_size to fit"
    )
    yield cx.problem("batch.micro_size", message, hint)


@rule("BAT103", "sequence-too-long")
def sequence_too_long(cx: Context) -> Iterator[Problem]:
    """data.seq_len is above the model's longest sequence."""
    length, (longest, key) = cx.spec.data.seq_len, cx.model.longest_sequence
    if length is not None and length > longest:
        unused = cx.model.unused_positions
        less = f", of which {unused} positions are never used" if unused else ""
        message = f"samples have {length} tokens, but {key.rpartition('.')[2]} is {longest + unused}{less}"
        longer = "" if cx.model.has_weights else f", or {key}={length + unused}"
        yield cx.problem("data.seq_len", message, f"at most {longest}{longer}")


@rule("BAT104", "vocabulary-too-small")
def vocabulary_too_small(cx: Context) -> Iterator[Problem]:
    """The model's vocabulary is smaller than the data's."""
    vocabulary, key = cx.model.vocabulary
    needed, whose = max(_vocabulary_needed(cx, data) for _, data in parts_by_key(cx.spec.data))
    if vocabulary < needed:
        name = key.rpartition(".")[2]
        message = f"{name} is {vocabulary}, and {whose} {needed}{'' if whose.endswith('are') else ' tokens'}"
        yield cx.problem(key, message, _OWN_TOKENIZER if cx.model.has_weights else f"{name}={needed} or more")


_OWN_TOKENIZER = "choose data of the model's own tokenizer: data.tokenizer, or token files made with it"
"""Help for a model whose weights exist: its vocabulary is that of its tokenizer."""


def _vocabulary_needed(cx: Context, data: Data) -> tuple[int, str]:
    """Return the number of ids in the data, and a phrase for their source; 0 if unknown, which another rule reports."""
    kind = type_name(data)
    if data.tokenizer is None and kind == "text":  # most configs end here and skip the imports
        return BYTES, "byte-level text has"
    from dslpar.layout.resolve import seq_len_of
    from dslpar.schema.vocabularies import vocabulary_of

    found = vocabulary_of(data, cx.config.path, cx.spec.model, seq_len_of(cx.spec))
    if found.tokenizer is not None and found.tokenizer.problem:
        return 0, ""
    whose = "bytes and special tokens are" if found.tokenizer is None else "the tokenizer has"
    return found.size, "the token files have" if kind == "tokens" else whose


BYTES = 256
"""Size of the vocabulary of byte-level text."""


@rule("BAT111", "text-not-found", "warning")
def text_not_found(cx: Context) -> Iterator[Problem]:
    """A file or folder of `data` does not exist on this machine."""
    from dslpar.schema.paths import paths_of_data

    for each in paths_of_data(cx.spec, cx.config.path):
        if not (each.is_missing and each.is_mistaken):
            continue
        place = cx.source.at(each.key) if each.item is None else cx.source.at_item(each.key, each.item)
        hint = each.hint(f"choose {_WANTED.get(each.key.rpartition('.')[2], 'a path')} from the config's folder")
        yield Problem(place, each.message, hint, cx.source.key(each.key))


_WANTED = {"files": "text files, or folders of them, by their paths"}
"""Key -> what it names."""


@rule("BAT105", "warm-up-longer-than-the-run", "warning")
def warm_up_longer_than_the_run(cx: Context) -> Iterator[Problem]:
    """The warm-up is longer than the run, so the learning rate never reaches its peak."""
    scheduler, steps = cx.spec.lr_scheduler, cx.spec.train.steps
    if isinstance(scheduler, sections.OtherLRScheduler):
        key = "lr_scheduler.warmup_num_steps"
        if key in cx.reading.invalid:
            return
        warmup = scheduler.args.get("warmup_num_steps", _default_warmup(scheduler.target))
    else:
        key, warmup = "lr_scheduler.warmup_steps", scheduler.warmup_steps
    if warmup > steps:
        message = f"{warmup} steps of warm-up in a run of {steps} steps"
        message += "" if cx.source.given(key) else ": DeepSpeed's default"
        most = f"at most {steps}" if cx.source.given(key) else f"{key}={steps}"
        yield cx.problem((key, "lr_scheduler"), message, f"{most}, or train.steps={warmup}")


def _default_warmup(schedule: str) -> int:
    """Return DeepSpeed's default number of warm-up steps for a scheduler."""
    from dslpar.schema.deepspeed_policy import LR_SCHEDULER_DEFAULTS  # most configs do not need it

    return int(LR_SCHEDULER_DEFAULTS.get(schedule, {}).get("warmup_num_steps", 0))


@rule("BAT106", "min-lr-above-lr")
def min_lr_above_lr(cx: Context) -> Iterator[Problem]:
    """The last learning rate (min_lr) is above the peak (lr)."""
    low = require(cx.spec.lr_scheduler, sections.LRScheduler).min_lr
    peak = cx.spec.optimizer.lr
    if low > peak:
        yield cx.problem("lr_scheduler.min_lr", f"min_lr {low} is above lr {peak}", f"at most {peak}")


@rule("BAT126", "decay-and-run-differ", "warning")
def decay_and_run_differ(cx: Context) -> Iterator[Problem]:
    """The run ends before the learning rate's decay does, or goes on with a learning rate of 0."""
    scheduler, steps = require(cx.spec.lr_scheduler, sections.LRScheduler), cx.spec.train.steps
    decay, key = scheduler.decay_steps, "lr_scheduler.decay_steps"
    if decay is None or scheduler.type == "constant" or decay <= scheduler.warmup_steps:
        return
    if decay > steps:
        last = learning_rate(scheduler, cx.spec.optimizer.lr, steps, steps - 1)
        message = f"the decay takes {decay} steps, and the run {steps}: it ends at lr {last:.4g}, and not at min_lr"
        yield cx.problem(key, message, f"at most {steps}, or train.steps={decay}")
    elif decay < steps and not scheduler.min_lr:
        message = f"the decay to 0 takes {decay} steps, so the last {steps - decay} of {steps} steps change nothing"
        yield cx.problem(key, message, f"decay_steps={steps}, or a lr_scheduler.min_lr above 0")


@rule("BAT127", "decay-within-the-warm-up")
def decay_within_the_warm_up(cx: Context) -> Iterator[Problem]:
    """The learning rate's decay ends before its warm-up does."""
    scheduler = require(cx.spec.lr_scheduler, sections.LRScheduler)
    decay, warmup = scheduler.decay_steps, scheduler.warmup_steps
    if decay is not None and scheduler.type != "constant" and decay <= warmup:
        message = f"decay_steps {decay} counts the warm-up, which takes {warmup} steps"
        yield cx.problem(
            "lr_scheduler.decay_steps", message, "leave decay_steps out: the decay then ends at the last step"
        )


@rule("BAT110", "nesterov-without-momentum")
def nesterov_without_momentum(cx: Context) -> Iterator[Problem]:
    """SGD has nesterov=True and a momentum of 0."""
    optimizer = cx.spec.optimizer
    if isinstance(optimizer, sections.SGD) and optimizer.nesterov and not optimizer.momentum:
        yield cx.problem(
            "optimizer.nesterov", "nesterov=True with a momentum of 0", "momentum=0.9, or leave nesterov out"
        )


@rule("BAT130", "differentiable-step")
def differentiable_step(cx: Context) -> Iterator[Problem]:
    """The optimizer has differentiable=True."""
    if require(cx.spec.optimizer, sections.OtherOptimizer).args.get("differentiable"):
        message = "differentiable=True fails at the first step: torch cannot update leaves in place with autograd"
        yield cx.problem("optimizer.differentiable", message, "leave differentiable out")


@rule("BAT131", "fused-and-foreach")
def fused_and_foreach(cx: Context) -> Iterator[Problem]:
    """The optimizer has both fused=True and foreach=True."""
    args = require(cx.spec.optimizer, sections.OtherOptimizer).args
    if args.get("fused") and args.get("foreach"):
        message = "fused=True and foreach=True are two implementations of one step"
        yield cx.problem("optimizer.foreach", message, "keep one of fused and foreach")


@rule("BAT132", "rate-at-its-floor", "warning")
def rate_at_its_floor(cx: Context) -> Iterator[Problem]:
    """The learning rate reaches its floor long before the run ends."""
    scheduler, steps = require(cx.spec.lr_scheduler, sections.OtherLRScheduler), cx.spec.train.steps
    args = scheduler.args
    total = args.get("total_num_steps")
    floor = args.get("cos_min_ratio", 1e-4) if scheduler.target == "WarmupCosineLR" else 0
    if total is not None and total < steps and floor < _LEAST_USEFUL_RATIO:
        message = f"the schedule ends after {total} steps; the other {steps - total} have {floor:g} times the peak rate"
        yield cx.problem("lr_scheduler.total_num_steps", message, f"total_num_steps={steps}, or train.steps={total}")


_LEAST_USEFUL_RATIO = 0.01


@rule("BAT107", "two-accumulations")
def two_accumulations(cx: Context) -> Iterator[Problem]:
    """schedule.num_microbatches differs from batch.accumulation."""
    if cx.spec.schedule is None:
        return
    theirs, ours = cx.spec.schedule.num_microbatches, cx.spec.batch.accumulation
    if None not in (theirs, ours) and theirs != ours:
        message = f"num_microbatches is {theirs}, but batch.accumulation is {ours}"
        hint = "keep one of schedule.num_microbatches and batch.accumulation"
        yield cx.problem("schedule.num_microbatches", message, hint)


@rule("BAT108", "schedule-ends-too-early")
def schedule_ends_too_early(cx: Context) -> Iterator[Problem]:
    """The learning-rate scheduler ends before the run, or has a phase of one step."""
    scheduler, steps = require(cx.spec.lr_scheduler, sections.OtherLRScheduler), cx.spec.train.steps
    total = scheduler.args.get("total_steps")
    if total is None:
        return
    if total < steps:
        message = f"the scheduler has {total} steps, but the run has {steps}"
        yield cx.problem("lr_scheduler.total_steps", message, f"total_steps={steps}, or train.steps={total}")
    share, three = scheduler.args.get("pct_start", 0.3), scheduler.args.get("three_phase", False)
    if _has_phase_of_one_step(share, total, three, ends=steps >= total):
        message = f"a phase of the scheduler has one step, with pct_start {share:g} of {total} steps"
        legal = next((each for each in (0.3, 0.4, 0.2) if not _has_phase_of_one_step(each, total, three, True)), 0.3)
        yield cx.problem("lr_scheduler.pct_start", message, f"pct_start={legal:g}")


def _has_phase_of_one_step(share: float, total: int, three: bool, ends: bool) -> bool:
    """Return whether torch's OneCycleLR divides by 0: the difference of a phase's last step and that of the one before.

    The last steps are computed here as there. `ends`: the run takes all steps, and computes a rate of the last phase.
    """
    last = [0.0, float(share * total) - 1, *([float(2 * share * total) - 2] if three else []), float(total - 1)]
    return any(before == end for before, end in pairwise(last if ends else last[:-1]))


@rule("BAT109", "no-momentum-to-cycle")
def no_momentum_to_cycle(cx: Context) -> Iterator[Problem]:
    """The scheduler changes the momentum, but the optimizer has no momentum."""
    schedule = require(cx.spec.lr_scheduler, sections.OtherLRScheduler)
    optimizer = require(cx.spec.optimizer, sections.OtherOptimizer)
    from dslpar.schema.torch_optimizers import named

    row = named(optimizer.target)
    cycles = schedule.target in ("CyclicLR", "OneCycleLR") and schedule.args.get("cycle_momentum") is not False
    if cycles and row is not None and not {"momentum", "betas"} & set(row.args):
        message = f"{schedule.target} cycles the momentum, but {optimizer.target} has none"
        yield cx.problem("lr_scheduler", message, "add cycle_momentum=False to lr_scheduler")


@rule("BAT116", "statistics-of-the-layout", "warning")
def statistics_of_the_layout(cx: Context) -> Iterator[Problem]:
    """Statistics of micro-batches, of batch norms or of a load-balancing loss, depend on the layout."""
    model, given = cx.spec.model, cx.source.given
    if "model.layers_cfg" in cx.reading.invalid:
        return
    norm = _batch_norm(model) if isinstance(model, sections.OtherModel) else ""
    if norm and not given("batch.micro_size"):
        micro = cx.layout.batch.micro_size
        message = (
            f"{norm} computes its statistics over a micro-batch, whose size ({micro} here) changes with the layout"
        )
        yield cx.problem("model", message, f"add micro_size={micro} to batch")
    follows = given("batch.global_size") and given("batch.micro_size") and not given("batch.accumulation")
    count = cx.layout.batch.accumulation if follows and model.is_balanced else 0
    if count:  # 0: BAT101 reports the batch
        message = (
            "the load-balancing loss takes statistics of each micro-batch of all replicas, and their number"
            f" (accumulation {count} here) changes with the layout"
        )
        yield cx.problem("batch.micro_size", message, f"replace micro_size by accumulation={count}")


def _batch_norm(model: sections.OtherModel) -> str:
    """Return the name of a batch-norm layer of the model; empty if none is known."""
    names = [str(layer.get("type", "")) for layer in model.layers or ()]
    if found := [name for name in names if name.removeprefix("torch.nn.").startswith("BatchNorm")]:
        return found[0]
    if not model.is_of_transformers:
        return ""
    from dslpar.schema.transformers_policies import POLICIES  # most configs name no transformers class

    policy = POLICIES.get(model.target.rpartition(".")[2])
    return "BatchNorm" if policy and policy.batch_norms else ""


RULES = (
    batch_does_not_fit,
    micro_size_does_not_divide,
    statistics_of_the_layout,
    sequence_too_long,
    vocabulary_too_small,
    text_not_found,
    warm_up_longer_than_the_run,
    min_lr_above_lr,
    decay_and_run_differ,
    decay_within_the_warm_up,
    nesterov_without_momentum,
    differentiable_step,
    fused_and_foreach,
    rate_at_its_floor,
    two_accumulations,
    schedule_ends_too_early,
    no_momentum_to_cycle,
)
