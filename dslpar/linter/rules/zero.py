"""ZER: ZeRO's stages and keys; PRE: half precision; DEAD104: keys of a dynamic loss scale when the scale is fixed."""

from __future__ import annotations

from collections.abc import Iterator

from dslpar.layout.divisors import divisors
from dslpar.layout.resolve import offloads
from dslpar.linter.context import Context
from dslpar.linter.problem import Problem, require
from dslpar.linter.rule import rule
from dslpar.linter.rules.offload import is_cpu_adam
from dslpar.schema.sections import OtherOptimizer


@rule("ZER101", "zero-with-pipeline")
def zero_with_pipeline(cx: Context) -> Iterator[Problem]:
    """ZeRO 2 or 3 does not work with a pipeline."""
    stage = cx.spec.zero.stage
    if stage > 1 and cx.pipeline.stages > 1:
        message = f"ZeRO stage {stage} is not supported with a pipeline of {cx.pipeline.stages} stages"
        yield cx.problem("zero.stage", message, f"zero.stage=1, or {cx.pipeline.key}=1")


@rule("ZER102", "no-gradient-norm")
def no_gradient_norm(cx: Context) -> Iterator[Problem]:
    """zero.compute_grad_norm is off."""
    if cx.spec.zero.extra.get("compute_grad_norm") is False:
        key = "zero.compute_grad_norm"
        yield cx.problem(key, "clipping and the report of each step need the gradient norm", "leave it out")


@rule("ZER103", "optimizer-not-elementwise")
def optimizer_not_elementwise(cx: Context) -> Iterator[Problem]:
    """The optimizer needs whole tensors, but ZeRO or tensor parallelism shards them."""
    optimizer = require(cx.spec.optimizer, OtherOptimizer)
    from dslpar.schema.torch_optimizers import elementwise, named

    if elementwise(optimizer.target):
        return
    known = named(optimizer.target) is not None
    if not known and cx.spec.deepspeed.get("zero_allow_untested_optimizer"):
        return  # the author asserts that it is elementwise
    message = f"{optimizer.target} is not {'' if known else 'known to be '}elementwise"
    more = "" if known else "; or deepspeed.zero_allow_untested_optimizer=True (if it is)"
    elementwise_one = f"optimizer = dict(type='AdamW', lr={optimizer.lr})"
    if cx.spec.zero.stage:
        hint = f"zero = 0, or {elementwise_one}{more}"
        yield cx.problem("optimizer", f"{message}, and ZeRO {cx.spec.zero.stage} shards tensors", hint)
    if cx.tensor.cuboid.q * cx.tensor.cuboid.y * cx.tensor.cuboid.z > 1:
        hint = f"{cx.tensor.key}=1, or {elementwise_one}{more}"
        yield cx.problem("optimizer", f"{message}, and tensor parallelism shards tensors", hint)


@rule("ZER106", "handler-with-zero")
def handler_with_zero(cx: Context) -> Iterator[Problem]:
    """A gradient handler needs whole gradients, which ZeRO shards."""
    if cx.spec.gradient_handler and cx.spec.zero.stage:
        message = f"gradient handlers need whole gradients, which ZeRO stage {cx.spec.zero.stage} shards"
        yield cx.problem("gradient_handler", message, "zero = 0, or leave gradient_handler out")


@rule("PRE101", "half-precision-needs-zero")
def half_precision_needs_zero(cx: Context) -> Iterator[Problem]:
    """Half precision needs ZeRO stage 1 or more."""
    dtype = cx.spec.precision.dtype
    if dtype != "fp32" and cx.spec.zero.stage == 0:
        message = f"{dtype} needs ZeRO stage 1 or more: at stage 0 DeepSpeed's step in half precision is wrong"
        yield cx.problem("precision.dtype", message, "zero.stage=1")


@rule("PRE102", "low-precision-masters")
def low_precision_masters(cx: Context) -> Iterator[Problem]:
    """The optimizer does not support master weights in half precision."""
    extra, offloaded = cx.spec.precision.extra, offloads(cx.spec, "optimizer")
    on_accelerator = extra.get("bf16_optimizer_states") and not offloaded
    for dtype in ("fp16", "bf16"):
        key = f"{dtype}_master_weights_and_grads"
        if extra.get(key) and not (on_accelerator or (offloaded and is_cpu_adam(cx))):
            message = f"master weights in {dtype} need the optimizer 'DeepSpeedCPUAdam' and zero.offload_optimizer"
            stage = "" if cx.spec.zero.stage else "zero.stage=1 and "  # a pipeline forbids 2 and 3
            hint = f"optimizer.type='DeepSpeedCPUAdam' with {stage}zero.offload_optimizer='cpu'"
            yield cx.problem(f"precision.{key}", message, hint)
    if extra.get("bf16_optimizer_states") and not extra.get("bf16_master_weights_and_grads"):
        message = "optimizer states in bf16 need master weights in bf16"
        yield cx.problem("precision.bf16_optimizer_states", message, "add bf16_master_weights_and_grads=True")


@rule("DEAD104", "scale-that-never-changes", "warning")
def scale_that_never_changes(cx: Context) -> Iterator[Problem]:
    """Keys of the dynamic loss scale are set, but the loss scale is fixed."""
    extra = cx.spec.precision.extra
    for name in _DYNAMIC if extra.get("loss_scale") else ():
        if name in extra:
            message = f"{name} has no effect: loss_scale {extra['loss_scale']} is fixed"
            yield cx.problem(f"precision.{name}", message, f"keep one of {name} and loss_scale")


_DYNAMIC = ("initial_scale_power", "loss_scale_window", "hysteresis", "consecutive_hysteresis", "min_loss_scale")


@rule("ZER108", "refused-by-zero")
def refused_by_zero(cx: Context) -> Iterator[Problem]:
    """DeepSpeed rejects a value of `zero`."""
    stage, extra = cx.spec.zero.stage, cx.spec.zero.extra
    size = extra.get("allgather_bucket_size", 0)
    if stage and extra.get("legacy_stage1"):
        yield cx.problem("zero.legacy_stage1", "DeepSpeed has removed its old stage 1", "leave legacy_stage1 out")
    if stage == 3 and extra.get("elastic_checkpoint"):
        message = "DeepSpeed does not write elastic checkpoints at ZeRO stage 3"
        yield cx.problem("zero.elastic_checkpoint", message, "leave elastic_checkpoint out")
    if stage in (1, 2) and extra.get("pipeline_loading_checkpoint"):
        message = f"DeepSpeed loads checkpoints rank by rank only at ZeRO stage 3; at stage {stage} a resume would fail"
        yield cx.problem("zero.pipeline_loading_checkpoint", message, "leave pipeline_loading_checkpoint out")
    if stage in (1, 2) and size % 2:
        message = f"allgather_bucket_size {size:.0f} is odd: ZeRO aligns to two elements"
        yield cx.problem("zero.allgather_bucket_size", message, f"such as {size + 1:.0f}: an even number")
    if stage == 3 and extra.get("zero_quantized_gradients") and not extra.get("reduce_scatter", True):
        message = "zero_quantized_gradients needs reduce_scatter"
        yield cx.problem("zero.reduce_scatter", message, "leave reduce_scatter out")


@rule("ZER109", "secondary-shards")
def secondary_shards(cx: Context) -> Iterator[Problem]:
    """Secondary parameter shards (zero_hpz_partition_size) do not fit the ranks."""
    size, key = int(cx.spec.zero.extra.get("zero_hpz_partition_size", 1)), "zero.zero_hpz_partition_size"
    if size < 2 or cx.spec.zero.stage != 3:
        return
    if cx.tensor.cuboid.size > 1:
        message = f"secondary shards are not supported with tensor parallelism over {cx.tensor.cuboid.size} ranks"
        yield cx.problem(key, message, f"leave zero_hpz_partition_size out, or {cx.tensor.key}=1")
    elif (world := cx.world.size) % min(size, world):
        fitting = " or ".join(map(str, divisors(world)[1:]))
        message = f"{world} ranks are not a multiple of zero_hpz_partition_size {size}"
        yield cx.problem(key, message, f"{fitting}: best the ranks of one host")


@rule("ZER110", "compiled-with-zero-3")
def compiled_with_zero_3(cx: Context) -> Iterator[Problem]:
    """train.compile of the layers does not work at ZeRO stage 3."""
    if cx.spec.train.compiles_layers and cx.spec.zero.stage == 3:
        message = "train.compile does not work at ZeRO stage 3, which gathers weights between the operations of a layer"
        yield cx.problem("train.compile", message, "zero.stage=2, or train.compile_components=['loss']")


@rule("PRE103", "optimizer-keeps-fp32")
def optimizer_keeps_fp32(cx: Context) -> Iterator[Problem]:
    """Optimizer states should be in bf16, but the offloaded optimizer keeps them in fp32."""
    extra = cx.spec.precision.extra
    if not (extra.get("bf16_optimizer_states") and extra.get("bf16_master_weights_and_grads")):
        return  # PRE102 reports bf16 states without bf16 masters
    offloaded = offloads(cx.spec, "optimizer") and is_cpu_adam(cx)
    if offloaded and require(cx.spec.optimizer, OtherOptimizer).args.get("fp32_optimizer_states", True):
        message = "bf16_optimizer_states is on, but DeepSpeedCPUAdam keeps its states in fp32"
        yield cx.problem(("optimizer.fp32_optimizer_states", "optimizer"), message, "add fp32_optimizer_states=False")


RULES = (
    zero_with_pipeline,
    no_gradient_norm,
    optimizer_not_elementwise,
    handler_with_zero,
    half_precision_needs_zero,
    low_precision_masters,
    scale_that_never_changes,
    refused_by_zero,
    secondary_shards,
    compiled_with_zero_3,
    optimizer_keeps_fp32,
)
