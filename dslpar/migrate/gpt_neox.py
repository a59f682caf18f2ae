"""Conversions for GPT-NeoX's YAML (rows: data/gpt_neox.txt), with the arithmetic of its code, beside Megatron-LM's."""

from __future__ import annotations

import math
from typing import Any

from dslpar.migrate.conversions import number
from dslpar.migrate.megatron import choice
from dslpar.migrate.table import Outcome, Row, View, changed, dead, dropped, needed

_GATED = ("geglu", "reglu", "bilinear", "swiglu", "glu")
_MULTIPLE, _OLD_MULTIPLE = 1, 256
"""What ParallelMLP rounds up to: mlp_multiple_of's default (neox_args.py:122), and what it was until September 2024."""
_ACTIVATIONS = "{'gelu': 'gelu', 'swiglu': 'swiglu'}"


# The model --------------------------------------------------------------------------------------------------------


def activation(value: object, view: View, row: Row) -> Outcome:
    """Convert the activation; a gated one narrows the MLP's hidden layer, even if no key sets its width."""
    if value == "gelu" and view.value("bias_gelu_fusion") is True and view.value("onnx_safe") is not True:
        return changed(row.to, "gelu_tanh", "bias_gelu_fusion computes the approximate gelu")
    made = choice(value, view, row._replace(argument=_ACTIVATIONS, why=""))
    given = any(view.values.get(key) is not None for key in ("intermediate_size", "expansion_factor"))
    hidden = view.get("hidden_size")
    if value not in _GATED or given or type(hidden) is not int:
        return made
    width, why = _gated_size(4 * hidden, view)
    also = {"model.ffn_hidden_size": width}
    return changed(row.to, made.value, why, also) if made.fate == "renamed" else made._replace(also=also)


@number
def ffn_size(value: float, view: View, row: Row) -> Outcome:
    """Convert the width of the MLP's hidden layer: intermediate_size, or expansion_factor times hidden_size."""
    hidden, why = view.get("hidden_size"), ""
    if row.pattern == "expansion_factor":
        if type(hidden) is not int:
            return needed("times hidden_size, which is not known", row.to)
        value, why = value * hidden, f"{value:g} * {hidden}"
    if view.value("activation") in _GATED:
        return changed(row.to, *_gated_size(int(value), view))
    size, multiple = int(value), view.get("mlp_multiple_of", 1)
    if type(multiple) is int and multiple > 1:
        size, why = -(-size // multiple) * multiple, f"rounded up to a multiple of {multiple}"
    return row.as_is(size) if type(value) is int and not why else changed(row.to, size, why or "a whole number")


def _gated_size(size: int, view: View) -> tuple[int, str]:
    """Return the width of a gated MLP, and how GPT-NeoX computes it (ParallelMLP)."""
    multiple = view.get("mlp_multiple_of")
    multiple = multiple if type(multiple) is int and multiple > 0 else _MULTIPLE
    half = int(size * 2 / 3) // 2
    width = -(-half // multiple) * multiple
    why = f"{size} * 2/3 / 2, rounded up to a multiple of {multiple}: a gated MLP has as many weights as a plain one"
    old = -(-half // _OLD_MULTIPLE) * _OLD_MULTIPLE
    if view.get("mlp_multiple_of") is None and width != old:
        why += f" (releases before September 2024 round up to {_OLD_MULTIPLE}: for their checkpoints write {old})"
    return width, why


def epsilon(value: object, view: View, row: Row) -> Outcome:
    """Keep the epsilon of the norm that the model has; the row's argument is the norm's name."""
    norm = view.value("norm")
    return row.as_is(value) if norm == row.argument else dead(f"the norm is {norm!r}, which has an epsilon of its own")


def rotary_base(value: object, view: View, row: Row) -> Outcome:
    """Keep the base of rotary positions, if the model has them."""
    positions = view.value("pos_emb")
    return row.as_is(value) if positions == "rotary" else dropped(f"with pos_emb={positions!r} it has no effect")


def bias(value: object, view: View, row: Row) -> Outcome:
    """Merge the switches of biases in attention and MLP."""
    both = [view.value(key) for key in ("use_bias_in_attn_linear", "use_bias_in_mlp")]
    if both[0] is not both[1]:
        return needed("dslpar has one switch for the biases of attention and MLP, and the source's differ", row.to)
    if value is False and view.value("norm") != "rmsnorm":
        return needed("GPT-NeoX's LayerNorm keeps its bias, which model.bias=False takes out", row.to)
    return changed(row.to, value, "one switch for attention, MLP and LayerNorm")


def _std_of(method: object, view: View) -> float | None:
    """Return the standard deviation of an init method's normal distribution; None for other distributions."""
    std, layers, hidden = view.value("init_method_std"), view.get("num_layers"), view.get("hidden_size")
    if not all(isinstance(item, (int, float)) and item > 0 for item in (std, layers, hidden)):
        return None
    stds = {
        "normal": std,
        "scaled_normal": std / math.sqrt(2 * layers),
        "single_residual_scaled_normal": std / math.sqrt(layers),
        "small_init": math.sqrt(2 / (5 * hidden)),
        "wang_init": 2 / layers / math.sqrt(hidden),
    }
    return stds.get(str(method))


def init_method(value: object, view: View, row: Row) -> Outcome:
    """Convert an init method to the standard deviation that it draws with."""
    if row.pattern == "init_method" and value == "normal":
        return dropped("normal: init_method_std sets the standard deviation")
    if row.pattern != "init_method" and value == "scaled_normal" and view.value("init_method") == "normal":
        return dropped("scaled_normal: dslpar's default divides model.init_std by sqrt(2 * num_layers)")
    std = _std_of(value, view)
    if std is None:
        return needed(f"dslpar draws from a normal distribution, and {value!r} has no known one", row.to)
    return changed(row.to, std, f"{value!r}: the standard deviation that it draws with")


def init_std(value: object, view: View, row: Row) -> Outcome:
    """Keep the standard deviation of init_method='normal'."""
    method = view.value("init_method")
    return row.as_is(value) if method == "normal" else dropped(f"init_method={method!r} sets it")


# The run ----------------------------------------------------------------------------------------------------------


def accumulation(value: object, view: View, row: Row) -> Outcome:
    """Keep the micro-batches of a step; the default of 1 does not count beside two sizes that determine them."""
    silent = view.values.get(row.pattern) is None
    given = all(view.values.get(key) is not None for key in ("train_batch_size", "train_micro_batch_size_per_gpu"))
    if silent and (given or view.values.get("gas") is not None):
        return dropped("other sizes determine it")
    return row.as_is(value) if value != "auto" else needed('"auto": Hugging Face\'s Trainer fills it in', row.to)


@number
def min_lr(value: float, view: View, row: Row) -> Outcome:
    """Keep the smallest learning rate; a linear decay of GPT-NeoX aims at 0 and stops there."""
    if value and view.value("lr_decay_style") == "linear":
        return changed(row.to, value, "GPT-NeoX's linear decay aims at 0 and stops at min_lr; dslpar's aims at min_lr")
    return row.as_is(value)


def checkpoint_factor(value: object, view: View, row: Row) -> Outcome:
    """Keep the steps between checkpoints, unless their distance grows."""
    grows = view.value("checkpoint_scale") == "log"
    return needed("checkpoint_scale='log' multiplies it", row.to) if grows else row.as_is(value)


def with_switch(value: object, view: View, row: Row) -> Outcome:
    """Keep a value if the switch that the row's argument names is on."""
    on = view.value(row.argument) is True
    return row.as_is(value) if on else dropped(f"without {row.argument} it has no effect")


def needs_switch(value: object, view: View, row: Row) -> Outcome:
    """Drop a key of a feature that is off; the row's argument is "KEY VALUES-WHEN-OFF else TEXT"."""
    switch, _, text = row.argument.partition(" else ")
    key, *off = switch.split()
    state: Any = view.value(key)
    if state is None or str(state) in off:
        return dropped(f"{row.why}, and {key} is {state!r}" if state is not None else row.why)
    return needed(text)
