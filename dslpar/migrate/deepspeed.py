"""Conversions for DeepSpeed's JSON, including Hugging Face's "auto" (rows: data/deepspeed.txt)."""

from __future__ import annotations

import ast

from dslpar.migrate import conversions
from dslpar.migrate.conversions import on
from dslpar.migrate.table import Outcome, Row, View, changed, dropped, needed
from dslpar.schema.torch_optimizers import OPTIMIZERS

AUTO = "auto"


def auto(value: object, view: View, row: Row) -> Outcome:
    """Keep a value, unless it is "auto", which needs the author."""
    if value == AUTO:
        return needed('"auto": Hugging Face\'s Trainer fills it in from its arguments', row.to)
    return row.as_is(value)


def clip(value: object, view: View, row: Row) -> Outcome:
    """Convert gradient_clipping."""
    return auto(value, view, row) if value == AUTO else conversions.clip(value, view, row)


def auto_left_out(value: object, view: View, row: Row) -> Outcome:
    """Keep the value of an optional key, but drop the value "auto"."""
    return dropped('"auto": left out, so DeepSpeed\'s default holds') if value == AUTO else row.as_is(value)


def stage(value: object, view: View, row: Row) -> Outcome:
    """Convert the ZeRO stage; half precision needs at least 1."""
    half = any(view.get(f"{name}.enabled") is True for name in ("fp16", "bf16", "bfloat16"))
    half = half or view.get("precision") in ("fp16", "bfloat16")  # GPT-NeoX's key
    if value == 0 and half:
        return changed(row.to, 1, "at stage 0 DeepSpeed's half-precision step is wrong, so it becomes 1")
    return auto(value, view, row)


def stage_of_switch(value: object, view: View, row: Row) -> Outcome:
    """Convert the old form of zero_optimization, which is a switch."""
    return changed(row.to, 1, "True is stage 1") if value is True else dropped("off")


def optimizer(value: object, view: View, row: Row) -> Outcome:
    """Convert the optimizer's name, which is case-insensitive in DeepSpeed."""
    if not isinstance(value, str) or value == AUTO:
        return auto(value, view, row)
    names = {name.lower(): name for name in ("Adam", "AdamW", "SGD", *OPTIMIZERS)}
    name = names.get(value.lower(), value)
    if name in OPTIMIZERS and OPTIMIZERS[name].refused:
        return needed(f"{value}: {OPTIMIZERS[name].refused}", row.to)
    if name == "Adam" and view.get("optimizer.params.adam_w_mode", True):
        return changed(row.to, "AdamW", "DeepSpeed's Adam decays as AdamW does, unless adam_w_mode is false")
    return row.as_is(name) if name == value else Outcome("renamed", row.to, name, "the name as DeepSpeed's list has it")


def bias_correction(value: object, view: View, row: Row) -> Outcome:
    """Convert a switch that torch's Adam does not have."""
    if view.get("optimizer.type") not in ("Adam", "AdamW"):
        return row.as_is(value)
    return dropped("Adam always corrects") if value is True else needed("torch's Adam always corrects")


def stages(value: object, view: View, row: Row) -> Outcome:
    """Convert the number of pipeline stages."""
    if type(value) is int:
        return row.as_is(value)
    return dropped(f"{value!r}: the program sets the number; write parallel.pipeline")


def half_precision(value: object, view: View, row: Row) -> Outcome:
    """Convert the switch of fp16 or bf16."""
    return auto(value, view, row) if value == AUTO else on(value, view, row)


def of_half_precision(value: object, view: View, row: Row) -> Outcome:
    """Keep a key of fp16 or bf16 if that precision is enabled."""
    dtype = row.pattern.partition(".")[0]
    enabled = view.get(f"{dtype}.enabled")
    if enabled == AUTO:
        return needed(f'it applies if {dtype} is enabled, which is "auto"')
    return row.as_is(value) if enabled is True else dropped(f"{dtype} is not enabled")


def tensor_size(value: object, view: View, row: Row) -> Outcome:
    """Convert the size of a tensor or context group. The row's argument is a dict of further keys that it implies."""
    if value == 1:
        return dropped("1 means none")
    section = row.to.rpartition(".")[0]
    also = {f"{section}.{key}": item for key, item in ast.literal_eval(row.argument).items()}
    return changed(row.to, value, "only dslpar's layers are partitioned", also)


def expert_size(value: object, view: View, row: Row) -> Outcome:
    """Convert AutoEP's size to the number of ranks that hold all experts, if AutoEP is enabled."""
    of_one = view.get("expert_parallel.expert_tensor_parallel_size", 1)
    if view.get("expert_parallel.enabled") is not True or (value == 1 and of_one == 1):
        return dropped("1 means none" if value == 1 else "AutoEP is not enabled")
    if type(value) is not int or type(of_one) is not int:
        return needed("it is the number of ranks that together hold all experts", row.to)
    return changed(row.to, value * of_one, "the ranks that together hold all experts")


def enabled_experts(value: object, view: View, row: Row) -> Outcome:
    """Drop AutoEP's switch."""
    return dropped(row.why if value is True else "off")


def offload(value: object, view: View, row: Row) -> object:
    """Convert a switch of offloading: True becomes the device "cpu", and False is dropped."""
    return "cpu" if value else dropped("off")
