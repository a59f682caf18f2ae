"""Conversions for the arguments of Megatron-LM and its fork GPT-NeoX (rows: data/megatron.txt, gpt_neox.txt)."""

from __future__ import annotations

import ast
from typing import Any

from dslpar.migrate.conversions import chunks, number, on, one_dropout, only
from dslpar.migrate.table import Outcome, Row, View, changed, dropped, needed


def choice(value: object, view: View, row: Row) -> Outcome:
    """Convert a value by the dict in the row's argument; a value that is not in the dict needs the author."""
    known = ast.literal_eval(row.argument)
    if not isinstance(value, str) or value not in known:
        return needed(f"dslpar has {', '.join(map(repr, dict.fromkeys(known.values())))}, and not {value!r}", row.to)
    to = known[value]
    if to == value:
        return Outcome("renamed", row.to, value)
    return changed(row.to, to, row.why or f"{value!r}, by dslpar's name")


def query_groups(value: object, view: View, row: Row) -> Outcome:
    """Keep the number of key and value heads if grouped-query attention is on."""
    return (
        row.as_is(value)
        if view.get("group_query_attention")
        else dropped("without group_query_attention there are as many as heads")
    )


@number
def kv_channels(value: float, view: View, row: Row) -> Outcome:
    """Drop the width of a head if it is hidden_size / num_attention_heads."""
    hidden, heads = view.get("hidden_size"), view.get("num_attention_heads")
    usual = type(hidden) is int and type(heads) is int and value * heads == hidden
    return dropped(row.why) if usual else needed("dslpar's heads have hidden_size / num_heads features")


def swiglu(value: object, view: View, row: Row) -> Outcome:
    """Convert the switch of SwiGLU; without ffn_hidden_size, Megatron-LM narrows its hidden layer by a third."""
    made, hidden = on(value, view, row._replace(argument="'swiglu': three weights")), view.get("hidden_size")
    if made.fate == "changed" and type(hidden) is int and view.get("ffn_hidden_size") is None:
        return made._replace(also={"model.ffn_hidden_size": int(4 * hidden * 2 / 3) // 64 * 64})
    return made


def gelu(value: object, view: View, row: Row) -> Outcome:
    """Convert the switch that turns off the fusion of bias and GELU, which computes the approximate GELU."""
    other = next((key for key in ("swiglu", "openai_gelu", "squared_relu", "quick_geglu") if view.get(key)), "")
    if other:
        return dropped(f"{other} is the activation")
    if value is True:
        return changed(row.to, "gelu", "without the fusion, the exact GELU")
    if view.get("disable_bias_linear") is True:
        return changed(row.to, "gelu", "the exact GELU: without biases nothing is fused")
    return changed(row.to, "gelu_tanh", "the fusion of bias and GELU computes GELU's approximation by tanh")


def dropout(value: object, view: View, row: Row) -> Outcome:
    """Merge the dropout probabilities, which the row's argument names."""
    return one_dropout(value, [view.value(name) for name in row.argument.split()], row)


@number
def tensor_size(value: float, view: View, row: Row) -> Outcome:
    """Convert the size of tensor parallelism. The row's argument is a dict of further keys that the size implies."""
    if value == 1:
        return dropped("1 means none")
    also = {f"parallel.tensor.{key}": item for key, item in ast.literal_eval(row.argument).items()}
    return changed(row.to, value, "Megatron-LM's tensor parallelism is mode '1d'", also)


@number
def expert_size(value: float, view: View, row: Row) -> Outcome:
    """Convert the size of expert parallelism to the number of ranks that hold all experts.

    Megatron-LM divides each expert over as many ranks as a layer, unless expert_tensor_parallel_size says otherwise.
    dslpar's ranks hold whole experts, fewer of them.
    """
    of_one = view.any_of("expert_tensor_parallel_size", "tensor_model_parallel_size") or 1
    if type(of_one) is not int or value != int(value):
        return needed("it is the number of ranks that together hold all experts", row.to)
    if value * of_one == 1:
        return dropped("1 means none")
    factor = f"{value:g} * {of_one} ranks of one expert" if of_one > 1 else f"{value:g} ranks"
    return changed(row.to, int(value) * of_one, f"{factor}: those that together hold all experts")


def dispatcher(value: object, view: View, row: Row) -> Outcome:
    """Drop the way of tokens to experts, which parallel.expert decides."""
    return dropped(row.why) if value in ("alltoall", "allgather") else needed(f"{value!r}: dslpar has no such way")


@number
def context_parallel(value: float, view: View, row: Row) -> Outcome:
    """Convert the size of context parallelism."""
    return dropped("1 means none") if value == 1 else row.as_is(value)


def context_type(value: object, view: View, row: Row) -> Outcome:
    """Convert the communication type of context parallelism."""
    if (view.any_of("context_parallel_size") or 1) == 1:
        return dropped("without context parallelism it has no effect")
    impl = {"p2p": "ring", "a2a": "ulysses", "a2a+p2p": "hybrid"}.get(str(value))
    if impl is None:
        return needed(f"{value!r}: of dslpar's three, 'ring' sends as little as can be overlapped", row.to)
    return changed(row.to, impl, f"Megatron-LM's {value!r}")


def sequence_parallel(value: object, view: View, row: Row) -> Outcome:
    """Keep sequence parallelism if there is tensor parallelism."""
    size = view.any_of("tensor_model_parallel_size", "model_parallel_size") or 1
    return row.as_is(value) if value is True and size != 1 else dropped("without tensor parallelism it has no effect")


def pipeline_size(value: object, view: View, row: Row) -> Outcome:
    """Keep the number of stages; 1, or 0 in GPT-NeoX, means no pipeline."""
    return dropped(f"{value} means none") if value in (0, 1) else row.as_is(value)


def virtual_stages(value: object, view: View, row: Row) -> Outcome:
    """Convert the number of virtual stages per rank of a pipeline."""
    return chunks(value, _num_stages(view) != 1, row)


def layers_of_virtual_stage(value: object, view: View, row: Row) -> Outcome:
    """Convert the layers per virtual stage to the number of virtual stages per rank of a pipeline."""
    layers, num_stages = view.get("num_layers"), _num_stages(view)
    sizes = (value, layers, num_stages)
    known = all(type(size) is int and size > 0 for size in sizes)
    if not known or layers % (num_stages * value):
        rule = "num_layers / pipeline_model_parallel_size / num_layers_per_virtual_pipeline_stage"
        return needed(f"each rank has {rule} of them, which is not a whole number", row.to)
    made = chunks(layers // num_stages // value, num_stages != 1, row)
    why = f"{layers} layers / {num_stages} ranks / {value}: the number of stages per rank"
    return made._replace(why=why) if made.fate == "changed" else made


def _num_stages(view: View) -> Any:
    """Return the size of the pipeline, which may be `UNREAD`."""
    size = view.values.get("pipeline_model_parallel_size")
    return 1 if size is None else size


def betas(value: object, view: View, row: Row) -> Outcome:
    """Combine both betas of Adam in one value."""
    return changed(row.to, (value, view.value("adam_beta2")), "adam_beta1 and adam_beta2")


@number
def warmup(value: float, view: View, row: Row) -> Outcome:
    """Convert a fraction of the run to steps; the row's argument names the keys of the total."""
    if view.get("lr_warmup_iters"):
        return dropped("lr_warmup_iters sets the warm-up")
    key = next((key for key in row.argument.split() if view.values.get(key) is not None), "")
    total = _steps(key, view)
    if not value:
        return dropped("no warm-up, as if left out")
    if total is None:
        return needed("dslpar counts steps of warm-up: this fraction of train.steps", row.to)
    return changed(row.to, int(value * total), f"{value} * {total} steps")


def _steps(key: str, view: View) -> int | None:
    """Return a key's number of steps, or of samples in steps; None if it is unknown."""
    count, size = view.get(key), view.get("global_batch_size")
    if not key.endswith("_samples"):
        return count if type(count) is int else None
    known = type(count) is int and type(size) is int and size > 0 and view.values.get("rampup_batch_size") is None
    return count // size if known else None


def steps_of_samples(value: object, view: View, row: Row) -> Outcome:
    """Convert the samples of a run to steps, as Megatron-LM does: whole global batches."""
    steps = _steps(row.pattern, view)
    if steps is None:
        return needed("dslpar counts steps: samples // the global batch, which is not known or grows", row.to)
    return changed(row.to, steps, f"{value} samples // {view.get('global_batch_size')} per step")


def warmup_of_samples(value: object, view: View, row: Row) -> Outcome:
    """Convert the samples of the warm-up to steps."""
    return dropped("no warm-up, as if left out") if value == 0 else steps_of_samples(value, view, row)


def decay_samples(value: object, view: View, row: Row) -> Outcome:
    """Drop the length of the schedule if it equals the run's; any other length needs the author."""
    samples = view.get("train_samples")
    return only(value, view, row._replace(argument=f"{samples!r} else dslpar's schedules reach min_lr at train.steps"))


def decay_iters(value: object, view: View, row: Row) -> Outcome:
    """Drop the length of the schedule if it equals the run's; any other length needs the author."""
    steps = view.get("train_iters")
    return only(value, view, row._replace(argument=f"{steps!r} else dslpar's schedules reach min_lr at train.steps"))


def precision(value: object, view: View, row: Row) -> Outcome:
    """Convert a switch of half precision."""
    return on(value, view, row._replace(argument=f"{row.pattern!r}: a type in place of a switch"))


def recompute(value: object, view: View, row: Row) -> Outcome:
    """Convert the granularity of activation recomputation."""
    if value == "selective":
        return dropped("scores of attention are not stored: it is fused")
    if value != "full":
        return needed("dslpar has 'full', by activation_checkpoint=N", row.to)
    return changed(row.to, view.get("recompute_num_layers", 1), "'full': the number of layers per stored input")


def checkpoint_layers(value: object, view: View, row: Row) -> Outcome:
    """Convert the switch of activation checkpointing and its number of layers per checkpoint."""
    if value is not True:
        return dropped("off")
    return changed(row.to, view.get("checkpoint_num_layers", 1), "the number of layers per stored input")


def switched_on(value: object, view: View, row: Row) -> Outcome:
    """Keep a value that turns something on; the row's argument is dslpar's switch for it."""
    return changed(row.to, value, f"{row.argument} = True goes with it", {row.argument: True})


def negated(value: object, view: View, row: Row) -> Outcome:
    """Invert a switch."""
    return changed(row.to, not value, f"inverted: {row.pattern} = {value!r}")


def stage_method(value: object, view: View, row: Row) -> Outcome:
    """Convert the method that divides layers among stages."""
    if value in ("uniform", "parameters"):
        return row.as_is(value)
    if value == "type:transformer|mlp":
        return dropped("GPT-NeoX's default divides the blocks evenly, but dslpar's divides them by cost")
    return needed("it matches names of GPT-NeoX's classes: dslpar has 'cost', 'uniform' and 'parameters'", row.to)


def global_attention(value: object, view: View, row: Row) -> Outcome:
    """Drop a list of attention types if all are global."""
    kinds = (
        {kind for group in value if isinstance(group, list) for kind in group[0]}
        if isinstance(value, list)
        else {value}
    )
    return dropped("all layers are global") if kinds <= {"global", "flash"} else needed("dslpar's attention is global")
