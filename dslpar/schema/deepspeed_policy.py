"""dslpar's policy for DeepSpeed's keys: the keys that dslpar sets, those that pass through, and their types.

A key passes through if the config may set it by DeepSpeed's own name, in `deepspeed`, `zero` or `precision`.

The keys, their types and their defaults are in data/deepspeed_keys.json, which tools/deepspeed_keys.py writes from the
installed DeepSpeed. Only dslpar's own decisions are written by hand: UNSUPPORTED, and types that are narrower than
DeepSpeed's. OURS follows from the sections. DeepSpeed itself silently accepts any unknown top-level key (DeepSpeed
issues 653, 774 and 1809). This module is imported only if a config uses a DeepSpeed key.

    >>> known("zero_optimization.reduce_bucket_size")
    ('int', 500000000)
    >>> ZERO["reduce_bucket_size"], types_in("flops_profiler")["profile_step"]
    ('PositiveWholeNumber', 'PositiveInt')
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from dslpar.core.errors import Fix
from dslpar.schema.keys import deepspeed_keys
from dslpar.schema.tables import load_table

_TABLE = load_table("deepspeed_keys")
VERSION: str = _TABLE["version"]
KEYS: Mapping[str, Mapping[str, tuple[str, Any]]] = _TABLE["keys"]
"""Section -> key -> (type, default). A section is a dotted path, or "" for the top level. The type is "bool", "int",
"list[str]", "int | str", "section" (then KEYS has the section's path too), or "" if DeepSpeed's source has no type. A
default of None means that there is no default."""
BOUNDS: Mapping[str, str] = _TABLE["bounds"]
"""Dotted key -> limits of its number, such as ">= 0"."""
DEPRECATED: Mapping[str, str] = _TABLE["deprecated"]
"""Keys that DeepSpeed still accepts -> their replacements."""
OTHER_NAMES: Mapping[str, str] = _TABLE["other_names"]
"""Second name of a key (a dotted key) -> its first name."""
ALL_REMOVED: Sequence[str] = _TABLE["removed"]
"""Dotted keys for which DeepSpeed raises an error, since it has removed the feature."""
OPTIMIZER_DEFAULTS: Mapping[str, Mapping[str, Any]] = _TABLE["optimizers"]
"""Arguments of DeepSpeed's optimizers, with their defaults."""
LR_SCHEDULER_DEFAULTS: Mapping[str, Mapping[str, Any]] = _TABLE["lr_schedulers"]
"""Arguments of DeepSpeed's learning-rate schedulers, with their defaults."""


def known(key: str) -> tuple[str, Any] | None:
    """Return (type, default) of a dotted DeepSpeed key; None for a key that DeepSpeed does not read."""
    section, _, name = key.rpartition(".")
    row = KEYS.get(section, {}).get(name)
    return None if row is None else (row[0], row[1])


# dslpar's decisions -----------------------------------------------------------------------------------------------

OURS: Mapping[str, str] = {theirs: key for theirs, key in deepspeed_keys().items() if "." not in theirs}
"""DeepSpeed's top-level keys that dslpar sets -> the dslpar key that determines each."""

_SAME_VALUES = (
    *("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"),
    *("zero_optimization", "data_parallel_size"),
)
"""Keys of OURS whose value has the same form in dslpar."""


def written_elsewhere(name: str) -> str:
    """Return the hint for a key that a dslpar section sets.

    >>> written_elsewhere("bfloat16")
    "leave it out, and write precision='bf16'"
    """
    key = OURS[name]
    if name in _SAME_VALUES:
        return f"write it under {key}"
    if key == "precision" and name != "data_types":
        return f"leave it out, and write precision={name.replace('bfloat', 'bf')!r}"
    return f"leave it out, and write {key}=True" if key.startswith("monitor.") else f"choose {key}, which decides it"


REMOVED: tuple[str, ...] = tuple(name for name in ALL_REMOVED if "." not in name)
"""Top-level keys for which DeepSpeed 0.19 raises an error."""

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
"""DeepSpeed keys that do not fit the way dslpar runs DeepSpeed: some would silently change the maths
(`gradient_allreduce_op`), others fail when the engine is built."""

UNSUPPORTED_ZERO: Mapping[str, str] = {
    "zenflow": "it applies most of each gradient steps later, which is another algorithm",
    "stage3_module_granularity_threshold": "it fetches modules as one, and the first backward stops at shards",
}
"""Unsupported keys of `zero` -> the reason."""

TOP: tuple[str, ...] = tuple(name for name in KEYS[""] if name not in (*OURS, *UNSUPPORTED))
"""Keys that pass through `deepspeed`."""

# Types ------------------------------------------------------------------------------------------------------------

_BY_TYPE: Mapping[str, str] = {
    "bool": "bool",
    "int": "WholeNumber",
    "float": "NonNegativeFloat",
    "str": "str",
    "list": "StrList",
    "list[str]": "StrList",
}
_BY_BOUNDS: Mapping[str, str] = {">= 0": "WholeNumber", "> 0": "PositiveWholeNumber", ">= 0, <= 1": "Probability"}
_NARROWER: Mapping[str, str] = {
    "zero_optimization.stage": "ZeroStage",
    "zero_optimization.offload_param": "OffloadParam",
    "zero_optimization.offload_optimizer": "OffloadOptimizer",
    "zero_optimization.offload_param.device": "OffloadDevice",
    "zero_optimization.offload_optimizer.device": "OffloadDevice",
    "zero_optimization.leaf_module": "LeafModule",
    "fp16.initial_scale_power": "ScalePower",  # torch takes 2 ** this as an int64
    "fp16.loss_scale_window": "PositiveWholeNumber",  # a divisor
    "fp16.hysteresis": "PositiveWholeNumber",  # counts down to 1
    "fp16.min_loss_scale": "PositiveWholeNumber",
    "steps_per_print": "PositiveWholeNumber",  # a divisor
    "vocabulary_size": "PositiveInt",
    "log_level": "LogLevel",
    "communication_data_type": "DType",
    "seq_parallel_communication_data_type": "DType",
    "gradient_predivide_factor": "PositiveFloat",  # a divisor
    "flops_profiler.profile_step": "PositiveInt",
    "flops_profiler.module_depth": "ModuleDepth",
    "flops_profiler.top_modules": "PositiveInt",
    "flops_profiler.output_file": "str",
    "aio.block_size": "PositiveInt",
    "aio.queue_depth": "PositiveInt",
    "aio.intra_op_parallelism": "PositiveInt",
}
"""Types of keys that have no type in DeepSpeed, or whose invalid values DeepSpeed does not reject at once."""


def types_in(section: str) -> Mapping[str, str]:
    """Return key -> type of a DeepSpeed section, by its dotted path; a nested section has the type "Section"."""
    return {name: type_of(f"{section}.{name}") for name in KEYS[section]}


def type_of(key: str) -> str:
    """Return the type of one key that passes through, by its dotted path."""
    if key in _NARROWER:
        return _NARROWER[key]
    section, _, name = key.rpartition(".")
    theirs = KEYS[section][name][0].removesuffix(" | None")
    if theirs == "section":
        return "Section"
    return _BY_BOUNDS[BOUNDS[key]] if key in BOUNDS else _BY_TYPE[theirs]


def _without(section: str, *names: str) -> Mapping[str, str]:
    return {name: type_of(f"{section}.{name}") for name in KEYS[section] if name not in names}


OFFLOAD_OPTIMIZER = types_in("zero_optimization.offload_optimizer")
OFFLOAD_PARAM = types_in("zero_optimization.offload_param")
LEAF_MODULE = types_in("zero_optimization.leaf_module")
ZERO = _without("zero_optimization", *UNSUPPORTED_ZERO)
BF16 = _without("bf16", "enabled")
FP16 = _without("fp16", "enabled")
TABLES: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "OffloadOptimizer": ("device", OFFLOAD_OPTIMIZER),
    "OffloadParam": ("device", OFFLOAD_PARAM),
    "LeafModule": ("", LEAF_MODULE),
}
"""Type of a mapping -> (required key, all keys with their types). A bare value in place of the mapping is the value of
the required key: offload_optimizer='cpu'. The required key is "" if there is none."""

# Explanations of wrong keys ------------------------------------------------------------------------------------------


class Explanation(NamedTuple):
    """Finding about a key that DeepSpeed knows but that dslpar's section does not accept."""

    code: str
    message: str
    help: str
    fix: Fix | None = None


def explain(source_key: str, has_zero: bool = True) -> Explanation | None:
    """Explain an unknown key of a dslpar section that is a DeepSpeed key; None if it is not.

    `has_zero`: the config has a section `zero`, without which half precision is not possible.

    >>> explain("zero.cpu_offload").help
    "write zero.offload_optimizer='cpu' in its place"
    """
    section, _, name = source_key.partition(".")
    if section == "zero":
        return _of_zero(name)
    if name == "params" and section in ("optimizer", "lr_scheduler"):
        message = f"unknown key 'params' in {section}: its arguments are keys of {section} itself"
        argument = "lr=..." if section == "optimizer" else "warmup_num_steps=..."
        return Explanation("CFG101", message, f"leave params out, and add {argument} to {section}")
    if section == "precision" and name in ("enabled", "bf16", "bfloat16", "fp16"):
        message = f"unknown key {name!r} in precision: a precision is switched on by its name"
        meant = name.replace("bfloat", "bf") if name != "enabled" else "bf16"
        return Explanation(
            "CFG101",
            message,
            f"leave it out, and write precision.dtype={meant!r}{'' if has_zero else ' with zero.stage=1'}",
        )
    return _at_the_top(section, name)


def _of_zero(name: str) -> Explanation | None:
    """Explain an unknown key of `zero`."""
    dotted = f"zero_optimization.{name}"
    if dotted in DEPRECATED:
        message = f"DeepSpeed's {name!r} is deprecated: {DEPRECATED[dotted]} took its place"
        moved = f"write it under zero.{DEPRECATED[dotted]}"
        return Explanation(
            "DSC106", message, f"write zero.{_INSTEAD[name]} in its place" if name in _INSTEAD else moved
        )
    if dotted in ALL_REMOVED:
        return Explanation("DSC103", f"DeepSpeed has removed {name!r}, and raises on it", "leave it out")
    if name in UNSUPPORTED_ZERO:
        return Explanation(
            "DSC104", f"dslpar does not support DeepSpeed's {name!r}: {UNSUPPORTED_ZERO[name]}", "leave it out"
        )
    if dotted in OTHER_NAMES:
        message = f"{name!r} is DeepSpeed's other name of {OTHER_NAMES[dotted]!r}"
        return Explanation("DSC106", message, f"write it under zero.{OTHER_NAMES[dotted]}")
    if name == "zero_optimization":
        message = "unknown key 'zero_optimization' in zero: the section zero is DeepSpeed's zero_optimization"
        return Explanation(
            "CFG101", message, "leave zero.zero_optimization out, and add its keys to zero: zero = dict(stage=1, ...)"
        )
    return _at_the_top("zero", name)


_INSTEAD: Mapping[str, str] = {
    "cpu_offload": "offload_optimizer='cpu'",
    "cpu_offload_param": "offload_param='cpu'",
    "cpu_offload_use_pin_memory": "offload_optimizer=dict(device='cpu', pin_memory=True)",
    "stage3_gather_fp16_weights_on_model_save": "stage3_gather_16bit_weights_on_model_save=True",
}
"""Deprecated key -> what to write instead."""


def _at_the_top(section: str, name: str) -> Explanation | None:
    """Explain a key that belongs to the top level of DeepSpeed's config; None if it does not, or in other sections."""
    if section not in ("zero", "precision", "optimizer", "lr_scheduler"):
        return None
    message = f"unknown key {name!r} in {section}: in DeepSpeed it is a key of the top level"
    if name in OURS:
        return Explanation("CFG101", message, written_elsewhere(name))
    return Explanation("CFG101", message, f"write it under deepspeed.{name}") if name in TOP else None
