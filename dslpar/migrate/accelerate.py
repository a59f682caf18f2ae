"""Conversions for Accelerate's YAML (rows: data/accelerate.txt)."""

from __future__ import annotations

from dslpar.migrate.huggingface import implied_size, off
from dslpar.migrate.table import Outcome, Row, View, changed, dropped, needed

_PLUGINS = ("DEEPSPEED", "FSDP", "MEGATRON_LM", "MULTI_GPU", "MULTI_CPU", "NO")


def distributed_type(value: object, view: View, row: Row) -> Outcome:
    """Drop the kind of run; one of other hardware needs the author."""
    if value in _PLUGINS or value is False:  # YAML reads a plain NO as False
        return dropped(row.why)
    return needed(f"{value!r}: dslpar runs on GPUs and CPUs, by DeepSpeed")


def _unused(view: View) -> Outcome | None:
    kind = view.value("distributed_type")
    if kind in (None, "MEGATRON_LM"):
        return None
    return dropped(f"distributed_type is {kind!r}, so Accelerate does not read it")


def megatron_size(value: object, view: View, row: Row) -> Outcome:
    """Convert a group's size of Megatron's plugin, if it is used."""
    return _unused(view) or implied_size(value, view, row)


def megatron_sequence(value: object, view: View, row: Row) -> Outcome:
    """Keep Megatron's sequence parallelism, which needs a tensor group."""
    size = view.value("megatron_lm_config.megatron_lm_tp_degree")
    if size in (None, 1):
        return dropped("without a tensor group it has no effect")
    return _unused(view) or row.as_is(value)


def distributed_optimizer(value: object, view: View, row: Row) -> Outcome:
    """Convert the switch of Megatron's distributed optimizer."""
    made = changed(row.to, 1, "it shards optimizer states, as ZeRO 1") if value is True else dropped("off")
    return _unused(view) or made


def recomputed(value: object, view: View, row: Row) -> Outcome:
    """Convert the granularity of recomputation: 'full' with its method and its number of layers."""
    section = "megatron_lm_config.megatron_lm_recompute"
    method, layers = view.get(f"{section}_method"), view.get(f"{section}_num_layers", 1)
    if value != "full":
        return _unused(view) or dropped("attention is fused")
    if method == "block":
        made = needed("method 'block' recomputes only some layers: choose activation_checkpoint", row.to)
    else:
        made = changed(row.to, layers, "each block is recomputed" if layers == 1 else f"in groups of {layers} layers")
    return _unused(view) or made


def of_megatron(value: object, view: View, row: Row) -> Outcome:
    """Ask for a value of the model, if Megatron's plugin is used and the value is none of dslpar's default, 0."""
    return _unused(view) or off(value, view, row)
