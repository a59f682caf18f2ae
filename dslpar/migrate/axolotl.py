"""Conversions for Axolotl's YAML (rows: data/axolotl.txt)."""

from __future__ import annotations

from dslpar.migrate.conversions import number
from dslpar.migrate.huggingface import compiled, steps_of, warmup, without_warmup
from dslpar.migrate.table import Outcome, Row, View, changed, dropped, needed


def adapter(value: object, view: View, row: Row) -> Outcome:
    """Drop the name of the adapter that dslpar has; other adapters need the author."""
    if value in ("", "none", False):
        return dropped("all weights are trained")
    if value == "lora":
        return dropped("lora_r and further keys are model.lora")
    return needed(f"{value!r}: dslpar has LoRA of weights that are not quantized", row.to)


@number
def min_lr_ratio(value: float, view: View, row: Row) -> Outcome:
    """Convert the share of the learning rate at which the cosine ends."""
    if view.value("lr_scheduler") != "cosine":
        return dropped("lr_scheduler is not cosine, so Axolotl does not read it")
    rate = view.value("learning_rate")
    if not isinstance(rate, int | float):
        return needed(f"choose {value:g} * learning_rate", row.to)
    return changed(row.to, value * rate, f"{value:g} * learning_rate")


def lora_linear(value: object, view: View, row: Row) -> Outcome:
    """Convert the switch that gives every linear layer an adapter."""
    if value is not True:
        return dropped("off")
    if view.value("adapter") != "lora":
        return dropped(f"adapter is {view.value('adapter')!r}, so there is no LoRA")
    if view.get("lora_target_modules"):
        return needed("lora_target_modules names layers, and this adds all linear ones: choose", row.to)
    return changed(row.to, "all-linear", "all linear layers but the head")


def axolotl_compiled(value: object, view: View, row: Row) -> Outcome:
    """Keep the switch of torch.compile; 'auto' depends on the machine."""
    if isinstance(value, bool):
        return compiled(value, view, row)
    return needed("it depends on the machine: choose", row.to)


def axolotl_tf32(value: object, view: View, row: Row) -> Outcome:
    """Drop TF32 that is off, or without effect in half precision; else it needs the author."""
    half = any(view.value(key) for key in ("bf16", "bfloat16", "fp16", "float16"))
    return dropped("without effect in half precision") if half or value is False else needed(row.why)


_KERNELS = ("cut_cross_entropy", "liger", "kernels", "lm_eval", "swanlab", "expert_parallel")
"""Plugins of axolotl.integrations that change no result, or whose keys have rows of their own."""


def plugins(value: object, view: View, row: Row) -> Outcome:
    """Drop plugins that only bring kernels, trackers or keys with rows; others need the author."""
    names = value if isinstance(value, list) else [value]
    other = [name for name in names if not any(f"integrations.{known}." in str(name) for known in _KERNELS)]
    return needed(f"{', '.join(map(str, other))}: {row.why}") if other and value else dropped("kernels and trackers")


@number
def axolotl_warmup(value: float, view: View, row: Row) -> object:
    """Convert warm-up as Axolotl's TrainerBuilderBase does (core/builders/base.py:235)."""
    if without := without_warmup(view):
        return without
    if row.pattern == "warmup_steps" and value == 1:
        return changed(row.to, 2, "Axolotl takes 2 for 1")
    steps = steps_of(view)
    if row.pattern == "warmup_steps" or value == 0 or steps is None:
        return warmup(value, view, row)
    if view.get("warmup_steps") is not None:
        return dropped("warmup_steps sets it")
    made = int(value * steps) if view.get("warmup_ratio") is not None else min(int(value * steps), 100)
    made = 2 if made == 1 else made
    return changed(row.to, made, f"{value:g} * {steps} steps") if made else dropped("no warm-up in so few steps")


def model_class(value: object, view: View, row: Row) -> Outcome:
    """Drop the names of language models' classes; a class of another task needs the author."""
    is_language = isinstance(value, str) and value.endswith("ForCausalLM")
    return dropped(row.why) if is_language else needed(f"{value!r}: write the section `model`", "model")
