"""Conversions for Megatron-Bridge's recipes and YAML overrides (rows: data/megatron_bridge.txt), beside Megatron-LM's.

The values of the functions that most recipes begin with (recipes/common.py) are in data/megatron_bridge_bases.json.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from typing import Any

from dslpar.language.tree import Node
from dslpar.migrate import conversions, megatron
from dslpar.migrate.defaults import read_defaults
from dslpar.migrate.recipes import Helper
from dslpar.migrate.table import Outcome, Row, View, changed, dropped, needed

LAYERS = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc2": ("down_proj",),
}
"""Linear layers of Megatron, and those of a Llama in transformers."""


@cache
def _silences() -> Mapping[str, frozenset[str]]:
    """Return the defaults of each name, in whichever section, as text."""
    made: dict[str, set[str]] = {}
    for default in read_defaults("megatron_bridge"):
        made.setdefault(default.key, set()).add(repr(default.value))
        made.setdefault(default.key.partition(".")[2], set()).add(repr(default.value))
    return {key: frozenset(values) for key, values in made.items()}


def unless_default(value: object, view: View, row: Row) -> Outcome:
    """Drop a value that is Megatron-Bridge's own default, or says nothing; any other value needs the author."""
    if value is False or value == [] or repr(value) in _silences().get(row.pattern, ()):
        return dropped("off, as if left out")
    return megatron.unless_default(value, view, row)


_CALL, _PARTIAL = "_call_", "_partial_"


def with_functions(root: Node) -> Node:
    """Return a saved config with the names of functions in place of the mappings that stand for them.

    Megatron-Bridge saves `activation_func: {_call_: false, _target_: torch.nn.functional.silu}`, and a function with
    some of its arguments with `_partial_: true` (utils/instantiate_utils.py).
    """
    made: dict[object, Node] = {}
    for key, node in root.value.items():
        if node.is_mapping and node.target is not None and not {_CALL, _PARTIAL}.isdisjoint(node.value):
            made[key] = Node(str(node.target), node.target_location or node.location, node.key_location)
        else:
            made[key] = with_functions(node) if node.is_mapping else node
    return root._replace(value=made)


# The model --------------------------------------------------------------------------------------------------------


def hf_model(value: object, view: View, row: Row) -> Outcome:
    """Say what to write for a model of Hugging Face."""
    kind = f"choose model=dict(type='transformers.CLASS', pretrained='FOLDER') with {value!r} in a folder"
    return needed(f"the sizes are those of {value!r}: {kind}, or config=dict(...) for new weights", row.to)


def provider(value: object, view: View, row: Row) -> Outcome:
    """Drop the class of a model whose sizes the source sets; another's sizes are in its code."""
    if str(value).rpartition(".")[2] in ("GPTModelProvider", "GPTModelConfig", "TransformerConfig"):
        return Outcome("changed", "model.type", "GPT", "Megatron's GPT")
    return needed(f"{row.why} (those of {value})", row.to)


def experts(value: object, view: View, row: Row) -> Outcome:
    """Convert the number of experts, as Megatron-LM's argument."""
    no_biases = view.value("add_bias_linear") is False
    made = megatron.number_of_experts(
        value, view._replace(values={**view.values, "disable_bias_linear": no_biases}), row
    )
    return made._replace(why=made.why.replace("--disable-bias-linear", "add_bias_linear=False"))


def biases(value: object, view: View, row: Row) -> Outcome:
    """Convert the switch of the linear layers' biases; Megatron's LayerNorm keeps its own without them."""
    if value is False:
        return megatron.no_biases(True, view, row)
    return unchanged(value, view, row)


def unchanged(value: object, view: View, row: Row) -> Outcome:
    """Keep a value under dslpar's name."""
    return Outcome("renamed", row.to, value)


def activation(value: object, view: View, row: Row) -> Outcome:
    """Convert the activation, which a gate makes another one."""
    name = str(value).rpartition(".")[2]
    gated = view.value("gated_linear_unit") is True or name == "swiglu"
    made = {("silu", True): "swiglu", ("swiglu", True): "swiglu", ("gelu", False): "gelu"}.get((name, gated))
    if made is None:
        gate = "with" if gated else "without"
        return needed(f"{name} {gate} a gate: dslpar has 'gelu', 'gelu_tanh' and 'swiglu': choose one", row.to)
    return changed(row.to, made, f"{value} {'with' if gated else 'without'} a gate")


def adapter(value: object, view: View, row: Row) -> Outcome:
    """Drop the class of adapters if it is LoRA, whose rank is `dim`."""
    if str(value).rpartition(".")[2] != "LoRA":
        return needed(f"{value}: dslpar has LoRA: choose model.lora", "model.lora")
    if view.values.get("peft.dim") is None:
        return changed(row.to, 32, "Megatron-Bridge's default of dim (peft/lora.py)", {"model.lora.lora_alpha": 32})
    return dropped("LoRA: model.lora")


def lora_modules(value: object, view: View, row: Row) -> Outcome:
    """Convert the names of Megatron's linear layers to those of a Llama in transformers."""
    names = value if isinstance(value, list) else [value]
    if not all(isinstance(name, str) and name in LAYERS for name in names):
        return needed("choose the layers that have adapters, by transformers' names", row.to)
    made = [other for name in names for other in LAYERS[str(name)]]
    return changed(row.to, made, "by the names that a Llama of transformers has")


# Precision --------------------------------------------------------------------------------------------------------


def mixed_precision(value: object, view: View, row: Row) -> Outcome:
    """Convert the name of a mixed precision."""
    name = str(value).replace("-", "_")
    made = {"bf16_mixed": "bf16", "fp16_mixed": "fp16", "16_mixed": "fp16"}.get(name)
    if made is None:
        return needed(f"{value!r}: dslpar trains in fp32, bf16 or fp16: choose one", row.to)
    return changed(row.to, made, f"{value!r}: weights stay fp32, as DeepSpeed keeps them")


def half(value: object, view: View, row: Row) -> Outcome:
    """Convert a switch of half precision."""
    name = row.pattern.rpartition(".")[2]
    return conversions.on(value, view, row._replace(argument=f"{name!r}: a type in place of a switch"))


def of_fp16(value: object, view: View, row: Row) -> object:
    """Convert a setting of the loss scale, if the run is in fp16."""
    is_fp16 = view.values.get("mixed_precision.fp16") is True or str(view.values.get("mixed_precision")) == "16_mixed"
    if not is_fp16 and view.values.get("mixed_precision") != "fp16_mixed":
        return dropped("without fp16 it has no effect")
    return conversions.exponent(value, view, row) if row.to.endswith("scale_power") else row.as_is(value)


def only_fp32(value: object, view: View, row: Row) -> Outcome:
    """Drop the type fp32 of the optimizer's state; any other needs the author."""
    return (
        dropped("fp32, as DeepSpeed keeps it") if str(value).endswith("float32") or value == "fp32" else needed(row.why)
    )


# The run ----------------------------------------------------------------------------------------------------------


def seed_of_data(value: object, view: View, row: Row) -> Outcome:
    """Drop the seed of the data set if it is that of the run."""
    seed = view.get("seed", 1234)
    return (
        dropped("train.seed")
        if value == seed
        else needed(f"dslpar has one seed, and {seed} is the run's: leave it out")
    )


# Recipes ----------------------------------------------------------------------------------------------------------


@cache
def bases() -> Mapping[str, Any]:
    """Return what the functions return that most recipes begin with, by their names."""
    text = resources.files("dslpar.migrate").joinpath("data/megatron_bridge_bases.json").read_text(encoding="utf-8")
    made: Mapping[str, Any] = json.loads(text)
    return made


def helpers(tree: ast.Module, path: str) -> Mapping[str, Helper]:
    """Return what Megatron-Bridge's functions return that its recipes call."""

    def base(name: str) -> Helper:
        return lambda args, words: json.loads(json.dumps(bases()[name]))

    made: dict[str, Helper] = {name: base(name) for name in bases() if name.startswith("_")}
    return made | {
        "from_hf_pretrained": _from_hf, "from_hf_config": _from_hf,
        "bf16_mixed": lambda args, words: {"bf16": True},
        "fp16_mixed": lambda args, words: {"fp16": True},
        "get_mixed_precision_config": _precision,
        "distributed_fused_adam_with_cosine_annealing": _cosine,
        "default_peft_config": _peft,
    }  # fmt: skip


def _from_hf(args: Sequence[Any], words: Mapping[str, Any]) -> Any:
    return {"hf_model_id": args[0]} if args and isinstance(args[0], str) else None


def _precision(args: Sequence[Any], words: Mapping[str, Any]) -> Any:
    return {"bf16_mixed": {"bf16": True}, "fp16_mixed": {"fp16": True}}.get(str(args[0])) if args else None


def _peft(args: Sequence[Any], words: Mapping[str, Any]) -> Any:
    name = args[0] if args else words.get("peft_scheme")
    if not isinstance(name, str) or name.lower() != "lora":
        return None
    given = {key: value for key, value in words.items() if key != "peft_scheme"}
    return {"dim": 32, "alpha": 32, "dropout": 0.0, "target_modules": list(LAYERS)} | given


def _cosine(args: Sequence[Any], words: Mapping[str, Any]) -> Any:
    """Return the optimizer and the schedule of distributed_fused_adam_with_cosine_annealing (optimizer_utils.py)."""
    if args:
        return None
    rate = words.get("max_lr", 1e-4)
    least = words.get("min_lr")
    optimizer = {
        "optimizer": "adam", "lr": rate, "min_lr": 0.1 * rate if least is None else least,
        "use_distributed_optimizer": True,
    } | {
        key: words.get(key, default)
        for key, default in (("weight_decay", 0.1), ("adam_beta1", 0.9), ("adam_beta2", 0.95), ("adam_eps", 1e-8),
                             ("clip_grad", 1.0))
    }  # fmt: skip
    scheduler = {
        "weight_decay_incr_style": words.get("weight_decay_incr_style", "constant"),
        "lr_decay_style": words.get("lr_decay_style", "cosine"),
        "lr_warmup_iters": words.get("lr_warmup_iters", 2000),
        "lr_decay_iters": words.get("lr_decay_iters"),
    }
    return [optimizer, scheduler]
