"""DEAD: keys without an effect in this combination of sections; some DEAD rules are in the file of their subject.

A key without an effect is easily missed, and the run then differs from the intended one. For each key we read in the
source when it has an effect. For DeepSpeed's keys the source is DeepSpeed 0.19.8 as dslpar runs it
(`_configure_zero_optimizer` of runtime/engine.py, runtime/zero/partition_parameters.py). The severity, a warning and
not an error, comes from clippy and actionlint.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping

from dslpar.core import mesh
from dslpar.core.errors import COMMAND_LINE
from dslpar.layout.deepspeed_config import overlaps_reduction
from dslpar.layout.divisors import ranks
from dslpar.layout.modes import MODES
from dslpar.layout.resolve import offloads, seq_len_of
from dslpar.layout.sharding import residual_cuts
from dslpar.linter.context import Context
from dslpar.linter.problem import Problem, require
from dslpar.linter.rule import rule
from dslpar.schema.sections import LRScheduler, Model, OtherLRScheduler, OtherModel, TokenModel


@rule("DEAD110", "options-of-one-rank", "warning")
def options_of_one_rank(cx: Context) -> Iterator[Problem]:
    """The config sets options of a tensor mode, but the tensor group has one rank."""
    tensor = cx.spec.parallel.tensor
    if tensor is None or tensor.size > 1 or tensor.mode is None:
        return
    if MODES[tensor.mode].axes(tensor) is None:
        return
    given = [name for name in (*MODES[tensor.mode].options, "keep") if getattr(tensor, name) is not None]
    if given:
        message = (
            f"{' and '.join(given)} {'have' if len(given) > 1 else 'has'} no effect: the tensor group has only one rank"
        )
        yield cx.problem(
            f"parallel.tensor.{given[0]}", message, f"leave {' and '.join(given)} out; or choose a size over 1"
        )


@rule("DEAD123", "chunks-without-effect", "warning")
def chunks_without_effect(cx: Context) -> Iterator[Problem]:
    """loss_chunks or mlp_chunks has no effect: no head over a vocabulary, no dslpar blocks, or too few tokens."""
    checkpoint, model = cx.spec.activation_checkpoint, cx.spec.model
    no_head = "" if _has_vocabulary_head(model) else "the model has no head over a vocabulary"
    counts = [("train.loss_chunks", cx.spec.train.loss_chunks, no_head)]
    if checkpoint is not None:
        no_blocks = "" if isinstance(model, TokenModel) else "the model's blocks are not dslpar's own"
        counts.append(("activation_checkpoint.mlp_chunks", checkpoint.mlp_chunks, no_blocks))
    for key, count, why in counts:
        if count > 1 and why:
            yield cx.problem(key, f"{key.rpartition('.')[2]} has no effect: {why}", "leave it out")
    tokens = seq_len_of(cx.spec) // ranks(cx.tensor.cuboid, residual_cuts(cx.tensor.cuboid).sequence)
    for key, count, why in counts:
        if not why and count > max(tokens, 1):
            yield cx.problem(key, f"{count} chunks for {tokens} tokens of a sequence on each rank", f"at most {tokens}")


def _has_vocabulary_head(model: Model | OtherModel) -> bool:
    """Return whether the model's last layer gives logits of tokens; for a transformers class, by its name."""
    if isinstance(model, Model):
        return isinstance(model, TokenModel)
    return model.transformers is not None and model.transformers.is_causal


@rule("DEAD111", "order-of-one-axis", "warning")
def order_of_one_axis(cx: Context) -> Iterator[Problem]:
    """parallel.order makes no difference, since the pipeline size or the data size is 1."""
    if cx.spec.parallel.order == mesh.LEGACY_ORDER and (cx.pipeline.stages == 1 or cx.layout.data_size == 1):
        why = "the pipeline has one stage" if cx.pipeline.stages == 1 else "data is 1"
        yield cx.problem("parallel.order", f"order has no effect: {why}", "leave it out")


@rule("DEAD112", "evaluation-that-never-runs", "info")
def evaluation_that_never_runs(cx: Context) -> Iterator[Problem]:
    """train.eval_steps or eval_train is set, but the run never evaluates."""
    train = cx.spec.train
    if train.eval_train and train.eval_interval is None:
        message = "eval_train has no effect: without eval_interval training never evaluates"
        yield cx.problem("train.eval_train", message, "leave it out; or add eval_interval=... to train")
    if cx.source.given("train.eval_steps") and train.eval_interval is None and train.eval_steps:
        message = "eval_steps has no effect on training, which never evaluates; only --eval-only uses it"
        yield cx.problem("train.eval_steps", message, "leave it out; or add eval_interval=... to train")


@rule("DEAD113", "interval-longer-than-the-run", "warning")
def interval_longer_than_the_run(cx: Context) -> Iterator[Problem]:
    """An interval is longer than the run."""
    train, trial = cx.spec.train, cx.source.at("train.steps").path == COMMAND_LINE
    for name, what in _INTERVALS.items():
        interval = getattr(train, name)
        key = f"train.{name}"
        if interval is None or interval <= train.steps:
            continue
        if not trial or cx.source.at(key).path == COMMAND_LINE:
            message = f"{name} {interval} in a run of {train.steps} steps: {what}"
            yield cx.problem(key, message, f"at most {train.steps}, or train.steps={interval}")


_INTERVALS: Mapping[str, str] = {
    "eval_interval": "the run evaluates only before the first step and after the last",
    "log_interval": "the run logs only the last step",
    "save_interval": "the run saves only after the last step",
    "check_replicas": "the run compares only after the last step",
}


@rule("DEAD126", "no-copies-to-compare", "warning")
def no_copies_to_compare(cx: Context) -> Iterator[Problem]:
    """train.check_replicas has nothing to compare: no two ranks hold the same weight."""
    if cx.spec.train.check_replicas is None:
        return
    tied = getattr(cx.spec.model, "tie_embeddings", True)  # other classes may tie weights
    stages = cx.pipeline.stages
    if cx.layout.num_copies == 1 and cx.tensor.cuboid.size == 1 and (stages == 1 or not tied):
        why = "one rank" if cx.world.size == 1 else f"{stages} stages, each on one rank, and no tied weights"
        yield cx.problem("train.check_replicas", f"check_replicas has no copies to compare: {why}", "leave it out")


@rule("DEAD127", "difference-never-looked-for", "warning")
def difference_never_looked_for(cx: Context) -> Iterator[Problem]:
    """train.on_replica_difference is set without train.check_replicas."""
    if cx.source.given("train.on_replica_difference") and cx.spec.train.check_replicas is None:
        message = "on_replica_difference has no effect: without check_replicas nothing is compared"
        yield cx.problem("train.on_replica_difference", message, "add check_replicas=... to train; or leave it out")


@rule("DEAD114", "floor-of-a-constant", "warning")
def floor_of_a_constant(cx: Context) -> Iterator[Problem]:
    """min_lr or decay_steps is set, but the learning rate is constant."""
    scheduler = require(cx.spec.lr_scheduler, LRScheduler)
    low, peak = scheduler.min_lr, cx.spec.optimizer.lr
    if scheduler.type == "constant" and scheduler.decay_steps is not None:
        message = f"decay_steps {scheduler.decay_steps} has no effect: the learning rate is constant"
        yield cx.problem("lr_scheduler.decay_steps", message, "type='cosine'")
    if scheduler.type == "constant" and 0 < low <= peak:  # BAT106 reports a min_lr above the peak
        message = f"min_lr {low} has no effect: the learning rate is constant"
        yield cx.problem("lr_scheduler.min_lr", message, "type='cosine'")


@rule("DEAD115", "nothing-to-shard", "warning")
def nothing_to_shard(cx: Context) -> Iterator[Problem]:
    """ZeRO has nothing to shard: no two ranks hold the same weights."""
    if _shards_nothing(cx):
        ranks = f"{cx.world.size} / (pipeline {cx.pipeline.stages} * tensor {cx.tensor.cuboid.size}) = 1"
        message = f"ZeRO {cx.spec.zero.stage} saves nothing: data is {ranks}"
        yield cx.problem("zero.stage", message, "zero = 0; or choose smaller sizes of pipeline and tensor")


def _shards_nothing(cx: Context) -> bool:
    """Return whether ZeRO is on although no two ranks hold the same weights and no other setting needs it."""
    half = cx.spec.precision.dtype != "fp32"
    if not cx.spec.zero.stage or half or offloads(cx.spec, "optimizer") or offloads(cx.spec, "param"):
        return False
    return cx.layout.num_copies == 1 and cx.world.size > 1


@rule("DEAD116", "zero-key-of-another-stage", "warning")
def zero_key_of_another_stage(cx: Context) -> Iterator[Problem]:
    """DeepSpeed does not use a key of `zero` at this stage."""
    stage, extra = cx.spec.zero.stage, cx.spec.zero.extra
    for name in extra:
        stages = _stages_of(name)
        hint = f"leave {name} out"
        if stage not in stages:
            where = f"it is for stage {_either(stages)}" if stages else "DeepSpeed never uses it"
            message = f"{name} has no effect at ZeRO stage {stage}: {where}"
            legal = [stage for stage in stages if stage < 2 or cx.pipeline.stages == 1]
            legal = [3] if name == "pipeline_loading_checkpoint" and 3 in legal else legal  # ZER108 rejects 1 and 2
            hint += f", or stage={_either(legal)}" if legal else ""
        elif name == "overlap_comm" and extra[name] and overlaps_reduction(cx.spec):
            message = f"overlap_comm=True has no effect at ZeRO stage {stage}: dslpar overlaps the reduction anyway"
        elif name == "overlap_comm" and extra[name] and cx.pipeline.stages > 1:
            message = "overlap_comm has no effect with a pipeline: DeepSpeed turns it off"
        else:
            continue
        yield cx.problem(f"zero.{name}", message, hint)


@rule("DEAD120", "gather-without-effect", "warning")
def gather_without_effect(cx: Context) -> Iterator[Problem]:
    """zero.overlap_param_gather has no effect: no weights are gathered at the end of a step."""
    stage, key, hint = cx.spec.zero.stage, "zero.overlap_param_gather", "leave overlap_param_gather out"
    if not cx.spec.zero.overlap_param_gather:
        return
    if stage not in (1, 2):
        why = "each layer's weights are gathered before it runs" if stage else "each rank updates all weights"
        yield cx.problem(
            key,
            f"overlap_param_gather has no effect at ZeRO stage {stage}: {why}",
            f"{hint}, or stage={_either((1, 2) if cx.pipeline.stages == 1 else (1,))}",
        )
    elif cx.layout.num_copies == 1 and cx.world.size > 1 and not _shards_nothing(cx):
        yield cx.problem(key, "overlap_param_gather has no effect: data is 1, and each rank has all weights", hint)


def _either(stages: Iterable[int]) -> str:
    return " or ".join(map(str, stages))


def _stages_of(name: str) -> tuple[int, ...]:
    """Return the stages at which DeepSpeed uses a key; other rules check offload and compute_grad_norm."""
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


@rule("DEAD117", "raw-key-without-effect", "warning")
def raw_key_without_effect(cx: Context) -> Iterator[Problem]:
    """A known key of `deepspeed` has no effect with dslpar."""
    for name in cx.spec.deepspeed:
        if name in _IDLE:
            yield cx.problem_of_key(f"deepspeed.{name}", f"{name} has no effect: {_IDLE[name]}", "leave it out")


_IDLE: Mapping[str, str] = {
    "dataloader_drop_last": "dslpar loads the data itself, and every batch is whole",
    "vocabulary_size": "DeepSpeed only uses it in a warning",
    "disable_allgather": "DeepSpeed 0.19 reads it and never uses it",
    "seq_parallel_communication_data_type": "dslpar sets it to communication_data_type",
    "aio": "dslpar does not support offload to NVMe",
}


@rule("DEAD118", "bf16-key-of-another-stage", "warning")
def bf16_key_of_another_stage(cx: Context) -> Iterator[Problem]:
    """DeepSpeed does not use a key of bf16 at this stage of ZeRO."""
    stage = cx.spec.zero.stage
    if cx.spec.precision.dtype != "bf16" or not stage:
        return  # PRE101 reports stage 0
    dead = {"immediate_grad_update": True, "check_grad_overflow": stage == 3}
    for name in cx.spec.precision.extra:
        if dead.get(name):
            message = f"{name} has no effect in bf16 at ZeRO stage {stage}"
            yield cx.problem(f"precision.{name}", message, f"leave {name} out")


@rule("DEAD121", "overlap-in-compiled-layers", "warning")
def overlap_in_compiled_layers(cx: Context) -> Iterator[Problem]:
    """comm_overlap has no effect in layers that torch compiles."""
    if cx.tensor.cuboid.comm_overlap and cx.spec.train.compiles_layers:
        message = "comm_overlap has no effect if torch compiles the layers: their collectives are not split"
        yield cx.problem(
            "parallel.tensor.comm_overlap", message, "leave comm_overlap out; or train.compile_components=['loss']"
        )


@rule("DEAD125", "nothing-through-symmetric-memory", "warning")
def nothing_through_symmetric_memory(cx: Context) -> Iterator[Problem]:
    """comm_overlap='symmetric_memory' has no effect beyond True: the mode does not split tokens over y or z."""
    cuboid = cx.tensor.cuboid
    takes_it = cuboid.size > 1 and "comm_overlap" in MODES[str(cuboid.mode)].options
    if cuboid.symmetric_memory and takes_it and not (cuboid.token_axes or cx.spec.train.compiles_layers):
        message = "comm_overlap='symmetric_memory' has the effect of True: no layer gathers or sums tokens in this mode"
        more = "sequence=True; or " if cuboid.mode == "1d" else ""
        yield cx.problem("parallel.tensor.comm_overlap", message, f"{more}comm_overlap=True")


@rule("DEAD124", "compile-options-alone", "warning")
def compile_options_alone(cx: Context) -> Iterator[Problem]:
    """train.compile_components or train.compile_backend is set without train.compile."""
    given = [name for name in ("compile_components", "compile_backend") if cx.source.given(f"train.{name}")]
    if given and not cx.spec.train.compile:
        message = f"{' and '.join(given)} {'have' if len(given) > 1 else 'has'} no effect without train.compile=True"
        yield cx.problem(f"train.{given[0]}", message, f"train.compile=True; or leave {' and '.join(given)} out")


@rule("DEAD102", "schedule-without-stages", "warning")
def schedule_without_stages(cx: Context) -> Iterator[Problem]:
    """A pipeline schedule is set, but there is no pipeline."""
    schedule = cx.spec.schedule
    if cx.pipeline.stages == 1 and cx.source.given("schedule.type") and schedule is not None and schedule.type:
        message = "schedule.type has no effect: the pipeline has one stage"
        count = f", and write batch.accumulation={schedule.num_microbatches}" if schedule.num_microbatches else ""
        hint = f"leave schedule out{count}; or choose a size of the pipeline"
        yield cx.problem("schedule.type", message, hint)


@rule("DEAD122", "one-chunk-interleaved", "warning")
def one_chunk_interleaved(cx: Context) -> Iterator[Problem]:
    """The interleaved schedule has one chunk per rank, and so is the same as '1f1b'."""
    schedule, key = cx.spec.schedule, "schedule.num_model_chunks"
    if cx.pipeline.stages == 1 or schedule is None:
        return
    if schedule.type == "interleaved" and schedule.num_model_chunks == 1:
        name = cx.source.key(key).rpartition(".")[2]
        message = f"type='interleaved' has no effect: with {name} 1 the schedule is '1f1b'"
        yield cx.problem(key, message, f"{name}=2; or schedule.type='1f1b'")


@rule("DEAD103", "handler-with-nothing-to-do", "warning")
def handler_with_nothing_to_do(cx: Context) -> Iterator[Problem]:
    """DeepSpeed or dslpar already does the work of a ColossalAI gradient handler."""
    yield from cx.misreads("DEAD103")


@rule("DEAD105", "nothing-to-keep", "warning")
def nothing_to_keep(cx: Context) -> Iterator[Problem]:
    """checkpoint.keep or keep_best is set, but the run saves no checkpoint, or measures none."""
    kept, train = cx.spec.checkpoint, cx.spec.train
    named = {"keep": kept.keep is not None, "keep_best": kept.keep_best}
    for name in (name for name, is_set in named.items() if is_set and train.save_interval == 0):
        message = f"{name} has no effect: save_interval 0 writes no checkpoint"
        yield cx.problem(f"checkpoint.{name}", message, f"leave {name} out; or choose a train.save_interval")
    if kept.keep_best and train.eval_interval is None and train.save_interval != 0:
        message = "keep_best has no effect: without eval_interval no checkpoint is measured"
        yield cx.problem("checkpoint.keep_best", message, "add eval_interval=... to train; or leave keep_best out")


@rule("DEAD106", "lr-without-effect", "warning")
def lr_without_effect(cx: Context) -> Iterator[Problem]:
    """optimizer.lr has no effect, since the scheduler sets another peak."""
    scheduler = require(cx.spec.lr_scheduler, OtherLRScheduler)
    name, args = scheduler.target, scheduler.args
    from dslpar.schema.torch_schedulers import LR_SCHEDULERS

    key = LR_SCHEDULERS[name].sets_lr
    lr = cx.spec.optimizer.lr
    if cx.source.given("optimizer.lr") and args.get(key, lr) != lr:
        message = f"optimizer.lr {lr} has no effect: {name} has {key} {args[key]}"
        yield cx.problem("optimizer.lr", message, f"keep one of optimizer.lr and lr_scheduler.{key}")


RULES = (
    options_of_one_rank,
    chunks_without_effect,
    order_of_one_axis,
    evaluation_that_never_runs,
    interval_longer_than_the_run,
    no_copies_to_compare,
    difference_never_looked_for,
    floor_of_a_constant,
    nothing_to_shard,
    zero_key_of_another_stage,
    gather_without_effect,
    raw_key_without_effect,
    bf16_key_of_another_stage,
    overlap_in_compiled_layers,
    nothing_through_symmetric_memory,
    compile_options_alone,
    schedule_without_stages,
    one_chunk_interleaved,
    handler_with_nothing_to_do,
    nothing_to_keep,
    lr_without_effect,
)
