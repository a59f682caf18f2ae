"""DeepSpeed's own keys as dslpar takes them: which section decides each, which pass through, and of which kind.

Which keys there are, their types and defaults come from `dslpar.schema.deepspeed_keys`, which is generated from the
installed
DeepSpeed. By hand stand dslpar's own decisions alone: OURS, UNSUPPORTED, and kinds that are narrower than DeepSpeed's
types. DeepSpeed itself accepts any unknown top-level key in silence (its issues 653, 774 and 1809). Nothing here is
imported where a config names no key of DeepSpeed's.

    >>> known("zero_optimization.reduce_bucket_size")
    ('int', 500000000)
    >>> ZERO["reduce_bucket_size"], kinds("flops_profiler")["profile_step"]
    ('PositiveSize', 'Count')
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from dslpar.schema.deepspeed_keys import BOUNDS, DEPRECATED, KEYS, OTHER_NAMES
from dslpar.schema.deepspeed_keys import REMOVED as _REMOVED


def known(key: str) -> tuple[str, Any] | None:
    """(type, default) of a dotted key of DeepSpeed's; None of a key that it does not read."""
    section, _, name = key.rpartition(".")
    return KEYS.get(section, {}).get(name)


# dslpar's decisions -----------------------------------------------------------------------------------------------

OURS: Mapping[str, str] = {
    "train_batch_size": "batch.global_size",
    "train_micro_batch_size_per_gpu": "batch.micro_size",
    "gradient_accumulation_steps": "batch.accumulation",
    "gradient_clipping": "train.clip_grad_norm",
    "optimizer": "optimizer",
    "scheduler": "lr_scheduler",
    "zero_optimization": "zero",
    "bf16": "precision",
    "bfloat16": "precision",
    "fp16": "precision",
    "tensor_parallel": "parallel.tensor",
    "sequence_parallel_size": "parallel.tensor",
    "data_parallel_size": "parallel.data",
    "pipeline": "parallel.pipeline",
    "data_types": "precision",
    "activation_checkpointing": "activation_checkpoint",
    "csv_monitor": "monitor",
    "tensorboard": "monitor",
    "wandb": "monitor",
}
"""Keys that a section of dslpar's own decides, and which."""

REMOVED: tuple[str, ...] = tuple(name for name in _REMOVED if "." not in name)
"""Keys that DeepSpeed 0.19 raises on."""

UNSUPPORTED: tuple[str, ...] = (
    "expert_parallel",
    "use_data_before_expert_parallelism",
    "weight_quantization",
    "managed_gradient_accumulation",
    "checkpoint",
    "datastates_ckpt",
    "gradient_allreduce_op",
    "torch_autocast",
    "hybrid_engine",
    "compile",
    "autotuning",
    "data_efficiency",
    "comet",
)
"""Keys that DeepSpeed has and that do not go with how dslpar runs it: some would change the maths in silence
(`gradient_allreduce_op`), others fail at build."""

UNSUPPORTED_ZERO: Mapping[str, str] = {
    "zenflow": "it applies most of each gradient steps later, which is another algorithm",
    "stage3_module_granularity_threshold": "it fetches modules as one, and the first backward stops at shards",
}
"""Keys of `zero` of the same sort, and why."""

TOP: tuple[str, ...] = tuple(name for name in KEYS[""] if name not in (*OURS, *UNSUPPORTED))
"""Keys that pass through `deepspeed`."""

# Kinds ------------------------------------------------------------------------------------------------------------

_BY_TYPE: Mapping[str, str] = {
    "bool": "Flag",
    "int": "Size",
    "float": "Rate",
    "str": "Text",
    "list": "Texts",
    "list[str]": "Texts",
}
_BY_BOUNDS: Mapping[str, str] = {">= 0": "Size", "> 0": "PositiveSize", ">= 0, <= 1": "Share"}
_NARROWER: Mapping[str, str] = {
    "zero_optimization.stage": "ZeroStage",
    "zero_optimization.offload_param": "OffloadParam",
    "zero_optimization.offload_optimizer": "OffloadOptimizer",
    "zero_optimization.offload_param.device": "Device",
    "zero_optimization.offload_optimizer.device": "Device",
    "zero_optimization.leaf_module": "LeafModule",
    "fp16.initial_scale_power": "ScalePower",  # torch takes 2 ** this as an int64
    "fp16.loss_scale_window": "PositiveSize",  # a divisor
    "fp16.hysteresis": "PositiveSize",  # counts down to 1
    "fp16.min_loss_scale": "PositiveSize",
    "steps_per_print": "PositiveSize",  # a divisor
    "vocabulary_size": "Count",
    "log_level": "LogLevel",
    "communication_data_type": "DType",
    "seq_parallel_communication_data_type": "DType",
    "gradient_predivide_factor": "Positive",  # a divisor
    "flops_profiler.profile_step": "Count",
    "flops_profiler.module_depth": "Depth",
    "flops_profiler.top_modules": "Count",
    "flops_profiler.output_file": "Text",
    "aio.block_size": "Count",
    "aio.queue_depth": "Count",
    "aio.intra_op_parallelism": "Count",
}
"""Kinds of what DeepSpeed names no type of, or takes at its word and fails on later."""


def kinds(section: str) -> Mapping[str, str]:
    """Key -> kind of a section of DeepSpeed's, by its dotted path; a section in it has the kind "Section"."""
    return {name: kind(f"{section}.{name}") for name in KEYS[section]}


def kind(key: str) -> str:
    """The kind of one key that passes through, by its dotted path."""
    if key in _NARROWER:
        return _NARROWER[key]
    section, _, name = key.rpartition(".")
    type_ = KEYS[section][name][0].removesuffix(" | None")
    if type_ == "section":
        return "Section"
    return _BY_BOUNDS[BOUNDS[key]] if key in BOUNDS else _BY_TYPE[type_]


def _without(section: str, *names: str) -> Mapping[str, str]:
    return {name: kind(f"{section}.{name}") for name in KEYS[section] if name not in names}


OFFLOAD_OPTIMIZER = kinds("zero_optimization.offload_optimizer")
OFFLOAD_PARAM = kinds("zero_optimization.offload_param")
LEAF_MODULE = kinds("zero_optimization.leaf_module")
ZERO = _without("zero_optimization", *UNSUPPORTED_ZERO)
BF16 = _without("bf16", "enabled")
FP16 = _without("fp16", "enabled")
TABLES: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "OffloadOptimizer": ("device", OFFLOAD_OPTIMIZER),
    "OffloadParam": ("device", OFFLOAD_PARAM),
    "LeafModule": ("", LEAF_MODULE),
}
"""Kinds that are mappings: the key that must be there and for which a bare value stands ("": none), and all keys."""

# What a wrong key is told -----------------------------------------------------------------------------------------


class Told(NamedTuple):
    """What is said of a key that DeepSpeed knows, and that its section here does not take."""

    code: str
    message: str
    help: str


def told(source_key: str) -> Told | None:
    """What to say of an unknown key of a section of ours, where DeepSpeed explains what was meant.

    >>> told("zero.cpu_offload").help
    "zero = dict(..., offload_optimizer='cpu')"
    """
    section, _, name = source_key.partition(".")
    if section == "zero":
        return _of_zero(name)
    if name == "params" and section in ("optimizer", "lr_scheduler"):
        message = f"unknown key 'params' in {section}: its arguments stand in {section} itself"
        argument = "lr=..." if section == "optimizer" else "warmup_num_steps=..."
        return Told("CFG101", message, f"{section} = dict(type=..., {argument}), without params=dict(...)")
    if section == "precision" and name in ("enabled", "bf16", "bfloat16", "fp16"):
        message = f"unknown key {name!r} in precision: a precision is on by its name"
        return Told("CFG101", message, "precision = 'bf16', or precision = dict(dtype='fp16', loss_scale=...)")
    return _at_the_top(section, name)


def _of_zero(name: str) -> Told | None:
    """Of a key of `zero`."""
    dotted = f"zero_optimization.{name}"
    if dotted in DEPRECATED:
        message = f"DeepSpeed's {name!r} is deprecated: {DEPRECATED[dotted]} took its place"
        return Told("DSC106", message, f"zero = dict(..., {_INSTEAD.get(name, DEPRECATED[dotted] + '=...')})")
    if dotted in _REMOVED:
        return Told("DSC103", f"DeepSpeed has removed {name!r}, and raises on it", "leave it out")
    if name in UNSUPPORTED_ZERO:
        return Told("DSC104", f"dslpar does not support DeepSpeed's {name!r}: {UNSUPPORTED_ZERO[name]}", "leave it out")
    if dotted in OTHER_NAMES:
        message = f"unknown key {name!r} in zero: its name is {OTHER_NAMES[dotted]!r}"
        return Told("CFG101", message, f"did you mean {OTHER_NAMES[dotted]!r}?")
    if name == "zero_optimization":
        message = "unknown key 'zero_optimization' in zero: the section zero is DeepSpeed's zero_optimization"
        return Told("CFG101", message, "zero = dict(stage=1, ...), without another dict in it")
    return _at_the_top("zero", name)


_INSTEAD: Mapping[str, str] = {
    "cpu_offload": "offload_optimizer='cpu'",
    "cpu_offload_param": "offload_param='cpu'",
    "cpu_offload_use_pin_memory": "offload_optimizer=dict(device='cpu', pin_memory=True)",
    "stage3_gather_fp16_weights_on_model_save": "stage3_gather_16bit_weights_on_model_save=True",
}
"""What a person writes in the place of a deprecated key."""


def _at_the_top(section: str, name: str) -> Told | None:
    """Of a key that DeepSpeed has at its top level, in a section of DeepSpeed's."""
    if section not in ("zero", "precision", "optimizer", "lr_scheduler"):
        return None
    message = f"unknown key {name!r} in {section}: in DeepSpeed it stands at the top level"
    if name in OURS:
        return Told("CFG101", message, f"{OURS[name]} decides it")
    return Told("CFG101", message, f"deepspeed = dict({name}=...)") if name in TOP else None
