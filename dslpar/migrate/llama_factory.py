"""Conversions for LLaMA-Factory's YAML (rows: data/llama_factory.txt)."""

from __future__ import annotations

from dslpar.migrate.huggingface import lora_key, unless_default
from dslpar.migrate.table import Outcome, Row, View, changed, dropped, needed


def only_stage(value: object, view: View, row: Row) -> Outcome:
    """Drop the stage whose loss is a language model's."""
    if value in ("sft", "pt"):
        return dropped(row.why)
    return needed(f"{value!r}: dslpar trains with the loss of a language model")


def finetuning(value: object, view: View, row: Row) -> Outcome:
    """Drop the kind of fine-tuning that dslpar has; other kinds need the author."""
    if value == "full":
        return dropped("all weights are trained")
    if value == "lora":
        return dropped("lora_rank and further keys are model.lora")
    return needed(f"{value!r}: dslpar trains all weights, or LoRA", row.to)


def lora_target(value: object, view: View, row: Row) -> Outcome:
    """Convert the modules that have adapters; LLaMA-Factory splits a text at commas, and "all" means linear ones."""
    used = lora_key(value, view, row._replace(argument="finetuning_type lora"))
    if used.fate == "dropped":
        return used
    if value == "all":
        return changed(row.to, "all-linear", "all linear layers, by PEFT's name")
    names = [name.strip() for name in value.split(",")] if isinstance(value, str) else value
    return row.as_is(value, row.why) if names == value else changed(row.to, names, "a list")


def lora_rank(value: object, view: View, row: Row) -> Outcome:
    """Keep the rank; without lora_alpha, alpha is twice as much (FinetuningArguments.__post_init__)."""
    used = lora_key(value, view, row._replace(argument="finetuning_type lora"))
    if used.fate == "dropped" or view.get("lora_alpha") or type(value) is not int:
        return used
    return used._replace(also={"model.lora.lora_alpha": value * 2})


def not_disabled(value: object, view: View, row: Row) -> Outcome:
    """Convert the switch that turns activation checkpointing off: LLaMA-Factory recomputes each block without it."""
    return dropped("off") if value is True else changed(row.to, 1, "each block is recomputed")


def of_preferences(value: object, view: View, row: Row) -> Outcome:
    """Drop a value that only the stages with preferences or rewards read; in them it needs the author."""
    if view.value("stage") in ("sft", "pt"):
        return dropped(f"stage is {view.value('stage')!r}, which does not read it")
    return unless_default(value, view, row)


def mca_optimizer(value: object, view: View, row: Row) -> Outcome:
    """Convert the switch of Megatron's distributed optimizer."""
    return changed(row.to, 1, "it shards optimizer states, as ZeRO 1") if value is True else dropped("off")
