"""DeepSpeed's JSON, also as Hugging Face's Trainer has it with "auto", key by key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dslpar.migrate.rows import Outcome, Row, Table, View, change, changed, drop, dropped, needed, on, rename, same
from dslpar.schema import deepspeed_policy
from dslpar.schema.torch_optimizers import OPTIMIZERS

AUTO = "auto"
_TRAINER = "Hugging Face's Trainer fills it in from its arguments: write it"


def auto(row: Row) -> Row:
    """The row, for values that may be "auto": there only the author can say."""
    inner = row.make

    def make(value: Any, view: View) -> Any:
        if value == AUTO:
            return needed(_TRAINER, row.to)
        return Outcome(row.fate, row.to, value, row.why) if inner is None else inner(value, view)

    return row._replace(make=make)


def _left(value: Any, view: View) -> Outcome:
    """A key that may be left out: what is not "auto" stays."""
    if value == AUTO:
        return dropped('"auto": left out, so DeepSpeed\'s default holds')
    return Outcome("renamed", "zero.**", value)


def _stage(value: Any, view: View) -> Any:
    half = view.get("fp16.enabled") is True or view.get("bf16.enabled") is True
    if value == 0 and half:
        return changed("zero.stage", 1, "at stage 0 DeepSpeed's half-precision step is wrong, so it becomes 1")
    return Outcome("renamed", "zero.stage", value)


def _old_stage(value: Any, view: View) -> Any:
    return changed("zero.stage", 1, "True is stage 1") if value is True else dropped("off")


def _optimizer(value: Any, view: View) -> Any:
    known = OPTIMIZERS.get(value) if isinstance(value, str) else None
    if known is not None and known.refused:
        return needed(f"{value}: {known.refused}", "optimizer.type")
    if value in ("Adam", "AdamW"):
        decoupled = value == "AdamW" or view.get("optimizer.params.adam_w_mode", True)
        name = "AdamW" if decoupled else "Adam"
        if name == value:
            return Outcome("kept", "optimizer.type", value)
        return changed("optimizer.type", name, "DeepSpeed's Adam decays as AdamW does, unless adam_w_mode is false")
    return Outcome("kept", "optimizer.type", value)


def _correction(value: Any, view: View) -> Any:
    if view.get("optimizer.type") not in ("Adam", "AdamW"):
        return Outcome("renamed", "optimizer.bias_correction", value)
    return dropped("Adam always corrects") if value is True else needed("torch's Adam always corrects")


def _stages(value: Any, view: View) -> Any:
    if type(value) is int:
        return Outcome("renamed", "parallel.pipeline", value)
    return dropped(f"{value!r}: the program said how many; write parallel.pipeline")


def _precision(dtype: str, known: Mapping[str, str]) -> tuple[Row, ...]:
    def make(value: Any, view: View) -> Outcome:
        if view.get(f"{dtype}.enabled") is True:
            return Outcome("renamed", "precision.**", value)
        if view.get(f"{dtype}.enabled") == AUTO:
            return needed(f'it counts if {dtype} is enabled, which is "auto"')
        return dropped(f"{dtype} is not enabled")

    switch = on("precision.dtype", dtype, "a type in place of a switch", "off, as is leaving it out")
    return (
        auto(change(f"{dtype}.enabled", "precision.dtype", f"true: {dtype!r}", switch)),
        rename(f"{dtype}.**", "precision.**", "where it is enabled", make, among=tuple(known)),
    )


def _clip(value: Any, view: View) -> Any:
    return (
        dropped("0 is off, as is leaving it out") if value == 0 else Outcome("renamed", "train.clip_grad_norm", value)
    )


def _monitor(name: str, to: str, keys: Mapping[str, str]) -> tuple[Row, ...]:
    return tuple(same(f"{name}.{key}", f"monitor.{to}.{field}") for key, field in keys.items())


def _tensor(**also: Any) -> Any:
    """The size of a tensor group, and what goes with it."""

    def make(value: Any, view: View) -> Outcome:
        if value == 1:
            return dropped("1: none")
        message = "layers of dslpar's are cut, no others"
        return changed(
            "parallel.tensor.size", value, message, {f"parallel.tensor.{key}": item for key, item in also.items()}
        )

    return make


def _offload(value: Any, view: View) -> Any:
    return dropped("off") if not value else "cpu"


_FILES = {"enabled": "enabled", "output_path": "output_path", "job_name": "job_name"}
_PIPELINE = "a pipeline's cut is parallel.pipeline: stage_ids=, counts= or method="
ROWS: tuple[Row, ...] = (
    auto(same("train_batch_size", "batch.global_size")),
    auto(same("train_micro_batch_size_per_gpu", "batch.micro_size")),
    auto(same("gradient_accumulation_steps", "batch.accumulation")),
    auto(rename("gradient_clipping", "train.clip_grad_norm", "0 is off", _clip)),
    auto(rename("optimizer.type", "optimizer.type", "DeepSpeed's Adam is AdamW", _optimizer)),
    same(
        "optimizer.params.max_grad_norm",
        "train.clip_grad_norm",
        "the bound of the gradient's norm, as gradient_clipping",
    ),
    drop("optimizer.params.adam_w_mode", "the optimizer's name says it"),
    drop("optimizer.params.torch_adam", "dslpar takes the fused step where there is one"),
    rename(
        "optimizer.params.bias_correction", "optimizer.bias_correction", "torch's Adam always corrects", _correction
    ),
    auto(same("optimizer.params.**", "optimizer.**")),
    drop("optimizer.legacy_fusion", "DeepSpeed has removed it"),
    auto(same("scheduler.type", "lr_scheduler.type")),
    auto(same("scheduler.params.**", "lr_scheduler.**")),
    change("zero_optimization", "zero.stage", "true: stage 1", _old_stage),
    auto(rename("zero_optimization.stage", "zero.stage", "half precision needs 1 or more", _stage)),
    change("zero_optimization.cpu_offload", "zero.offload_optimizer.device", "true: 'cpu'", _offload),
    change("zero_optimization.cpu_offload_params", "zero.offload_param.device", "true: 'cpu'", _offload),
    same("zero_optimization.cpu_offload_use_pin_memory", "zero.offload_optimizer.pin_memory"),
    same(
        "zero_optimization.stage3_gather_fp16_weights_on_model_save", "zero.stage3_gather_16bit_weights_on_model_save"
    ),
    rename("zero_optimization.**", "zero.**", '"auto" is left out', _left, among=tuple(deepspeed_policy.ZERO)),
    *_precision("fp16", deepspeed_policy.FP16),
    *_precision("bf16", deepspeed_policy.BF16),
    drop("fp16.opt_level", "apex's choice of types"),
    drop("amp.**", "DeepSpeed 0.19 has removed apex: precision = 'bf16' or 'fp16'"),
    change(
        "tensor_parallel.autotp_size",
        "parallel.tensor.size",
        "in mode '1d'; the model's layers are dslpar's",
        _tensor(mode="1d"),
    ),
    change(
        "sequence_parallel_size",
        "parallel.tensor.size",
        "in mode 'sequence', impl='ulysses'",
        _tensor(mode="sequence", impl="ulysses"),
    ),
    same("data_parallel_size", "parallel.data"),
    rename("pipeline.stages", "parallel.pipeline", "where it is a number", _stages),
    same("pipeline.activation_checkpoint_interval", "activation_checkpoint"),
    drop("pipeline.**", _PIPELINE),
    drop(
        "activation_checkpointing.**", "it says how, and a model's code where; here activation_checkpoint=N does both"
    ),
    *_monitor("csv_monitor", "csv", _FILES),
    *_monitor("tensorboard", "tensorboard", _FILES),
    *_monitor("wandb", "wandb", {"enabled": "enabled", "project": "project", "group": "group", "team": "team"}),
    drop("data_types.**", "gradients are accumulated in fp32"),
    *(same(name, f"deepspeed.{name}") for name in deepspeed_policy.TOP),
    *(same(f"{name}.**", f"deepspeed.{name}.**") for name in deepspeed_policy.TOP),
    *(drop(f"{name}.**", "DeepSpeed 0.19 has removed it") for name in deepspeed_policy.REMOVED if name != "amp"),
    *(drop(f"{name}.**", "it does not go with how dslpar runs DeepSpeed") for name in deepspeed_policy.UNSUPPORTED),
)

TABLE = Table("deepspeed", "DeepSpeed", ROWS, own_names=False)
