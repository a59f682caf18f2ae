"""Conversions for torchtitan's TOML files and Python configs (rows: data/torchtitan.txt).

The sizes that a model's flavor stands for are in data/torchtitan_models.json, each with its place in torchtitan 0.2.2.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from typing import Any

from dslpar.migrate.conversions import number
from dslpar.migrate.megatron import choice as _choice
from dslpar.migrate.recipes import Helper
from dslpar.migrate.table import Outcome, Row, View, changed, dropped, needed

choice = _choice
CHUNKS = 2
"""Stages of a rank in an interleaved schedule if nothing sets their layers (pipeline_parallel.py:110)."""


_POSITIONS = 2048
"""transformers' default of max_position_embeddings, for the classes whose flavors have none."""
# The model --------------------------------------------------------------------------------------------------------


@cache
def models() -> Mapping[str, Any]:
    """Return the flavors of each model: the class in transformers, its sizes, and the line that defines them."""
    text = resources.files("dslpar.migrate").joinpath("data/torchtitan_models.json").read_text(encoding="utf-8")
    made: Mapping[str, Any] = json.loads(text)
    return made


def _flavor(view: View) -> tuple[str, Any, Any]:
    """Return the model's name, what is known of the model, and of its flavor; None where nothing is."""
    name = view.get("model_spec.name") or view.value("model.name")
    flavor = view.get("model_spec.flavor") or view.value("model.flavor")
    of_model = models().get(str(name))
    plain = re.sub(r"_(flex|varlen)(_attn)?$|_flex_attn$|_varlen_attn$", "", str(flavor))
    return str(name), of_model, (of_model or {}).get("flavors", {}).get(plain)


def flavor(value: object, view: View, row: Row) -> Outcome:
    """Convert a flavor to the sizes that it stands for, of transformers' class of the same model."""
    name, of_model, known = _flavor(view)
    if known is None:
        has = f"{name} has {', '.join(of_model['flavors'])}" if of_model else f"its models are {', '.join(models())}"
        why = f"the sizes of {name} {value} are not among those known ({has})"
        return needed(f"{why}: choose model=dict(type='transformers.CLASS', config=dict(...))", "model")
    place = f"{of_model['source']}:{known['line']}"
    if not known["type"]:
        return needed(f"choose a class of transformers with the sizes of {name} {value} ({place})", "model")
    sizes, why = dict(known["config"]), f"the sizes of {name} {value} ({place})"
    length = view.value("training.seq_len") or view.value("training.max_context_length")
    if type(length) is int and length > sizes.get("max_position_embeddings", _POSITIONS):
        sizes["max_position_embeddings"] = length
        why += f"; positions reach training.seq_len {length}, as torchtitan makes them"
    return changed(row.to, sizes, why, {"model.type": known["type"]})


def name_of_model(value: object, view: View, row: Row) -> Outcome:
    """Drop the model's name, which the sizes of its flavor have."""
    if view.value("model.flavor") is None and view.value("model_spec.flavor") is None:
        return needed("choose model=dict(type='transformers.CLASS', config=dict(...))", "model")
    return dropped(row.why)


def converters(value: object, view: View, row: Row) -> Outcome:
    """Drop an empty list of converters; any converter needs the author."""
    return dropped("none") if not value else needed(row.why, row.to)


def of_converters(value: object, view: View, row: Row) -> Outcome:
    """Drop a setting of converters that the source does not use."""
    name = row.pattern.partition(".")[0]
    used = view.get("model.converters") or []
    names = ("float8", "mx", "quantize.linear.float8", "quantize.linear.mx")
    is_on = not isinstance(used, list) or any(item in names or str(item).startswith("quantize") for item in used)
    if name == "float8" and view.get("float8.enable_float8_linear") is True:
        is_on = True
    return needed(row.why) if is_on else dropped("model.converters does not use it")


# Layout -----------------------------------------------------------------------------------------------------------


def _of(view: View, *names: str, default: int = 1) -> Any:
    """Return a degree, under the names of several releases."""
    for name in names:
        value = view.get(name)
        if value is not None:
            return value
    found = next((view.defaults[name] for name in names if name in view.defaults), None)
    return default if found is None else found


def _pipeline(view: View) -> Any:
    return _of(view, "parallelism.pipeline_parallel_degree", "experimental.pipeline_parallel_degree")


@number
def shard(value: float, view: View, row: Row) -> Outcome:
    """Convert the degree of FSDP to a ZeRO stage; a pipeline in DeepSpeed has ZeRO 1."""
    replicas = _of(view, "parallelism.data_parallel_replicate_degree", "training.data_parallel_replicate_degree")
    also = {"parallel.data.size": int(value) * replicas} if value > 0 and type(replicas) is int else {}
    if value == 1:
        return dropped("1 means no FSDP", also if replicas != 1 else None)
    if value == 0 or value < -1:
        return needed("choose -1, the rest of the world, or a degree of 1 or more", row.to)
    if _pipeline(view) != 1:
        return changed(row.to, 1, "with a pipeline, DeepSpeed divides the optimizer's state alone", also)
    if view.value("parallelism.fsdp_reshard_after_forward") == "never":
        return changed(row.to, 2, "parameters stay gathered after the forward: ZeRO 2", also)
    rest = "-1, the rest of the world: " if value == -1 else ""
    return changed(row.to, 3, f"{rest}fully sharded is ZeRO 3", also)


def compiled(value: object, view: View, row: Row) -> Outcome:
    """Convert the switch of torch.compile, which changes no result; ZeRO 3 does not work with it (ZER110)."""
    if value is True and _is_fully_sharded(view):
        return dropped("torch.compile does not work at ZeRO 3, which gathers weights between a layer's operations")
    return changed(row.to, True, "torch.compile") if value is True else row.as_is(value)


def _is_fully_sharded(view: View) -> bool:
    """Return whether FSDP becomes ZeRO 3, as `shard` decides it."""
    sections = ("parallelism.data_parallel_shard_degree", "training.data_parallel_shard_degree")
    degree = _of(view, *sections, "training.data_parallel_degree")
    kept = view.value("parallelism.fsdp_reshard_after_forward") == "never"
    return degree not in (0, 1) and _pipeline(view) == 1 and not kept


@number
def warmup(value: float, view: View, row: Row) -> Outcome:
    """Keep the steps of warm-up; torchtitan shortens them to the run (components/optimizer/lr_scheduler.py:107)."""
    steps = view.value("lr_scheduler.total_steps") or view.value("training.steps")
    if type(steps) is int and value > steps:
        return changed(row.to, steps, "torchtitan shortens the warm-up to the steps of the run")
    return row.as_is(value)


@number
def tensor(value: float, view: View, row: Row) -> Outcome:
    """Convert the degree of tensor parallelism, which torchtitan combines with sequence parallelism."""
    if value == 1:
        return dropped("1 means none")
    sequence = view.value("parallelism.enable_sequence_parallel") is not False
    also: dict[str, object] = {"parallel.tensor.mode": "1d", "parallel.tensor.sequence": sequence}
    return changed(row.to, value, "torchtitan's tensor parallelism is mode '1d'", also)


def sequence(value: object, view: View, row: Row) -> Outcome:
    """Drop the switch of sequence parallelism, which the degree of tensor parallelism reads."""
    size = _of(view, "parallelism.tensor_parallel_degree", "training.tensor_parallel_degree")
    return dropped(row.why if size != 1 else "without tensor parallelism it has no effect")


@number
def degree(value: float, view: View, row: Row) -> Outcome:
    """Keep a degree; 1 means none."""
    return dropped("1 means none") if value == 1 else row.as_is(value)


@number
def context(value: float, view: View, row: Row) -> Outcome:
    """Convert the degree of context parallelism: torch's ring attention."""
    if value == 1:
        return dropped("1 means none")
    return changed(row.to, value, "torch's context parallelism is a ring", {"parallel.context.impl": "ring"})


@number
def expert(value: float, view: View, row: Row) -> Outcome:
    """Convert the degree of expert parallelism to the number of ranks that hold all experts."""
    of_one = view.value("parallelism.expert_tensor_parallel_degree") or 1
    if type(of_one) is not int or value != int(value):
        return needed("choose the number of ranks that together hold all experts", row.to)
    if value * of_one == 1:
        return dropped("1 means none")
    return changed(row.to, int(value) * of_one, "the ranks that together hold all experts")


def schedule(value: object, view: View, row: Row) -> Outcome:
    """Convert the schedule of a pipeline."""
    if _pipeline(view) == 1:
        return dropped("without a pipeline it has no effect")
    name = str(value).lower()
    if name == "1f1b":
        return changed(row.to, "1f1b", f"{value!r}, by dslpar's name")
    if name == "gpipe":
        return changed(row.to, "1f1b", "the same gradient, and fewer micro-batches are stored")
    if name == "interleaved1f1b":
        chunks = _chunks(view)
        if chunks is None:
            return needed("choose schedule.num_model_chunks, the number of stages per rank", row.to)
        return changed(row.to, "interleaved", f"{value!r}, by dslpar's name", {"schedule.num_model_chunks": chunks})
    return needed(f"{value!r}: dslpar has '1f1b', 'interleaved' and 'zero_bubble': choose one", row.to)


def _chunks(view: View) -> int | None:
    """Return the stages of a rank of an interleaved schedule; None if they are unknown."""
    each, ranks = view.get("parallelism.pipeline_parallel_layers_per_stage"), _pipeline(view)
    if each is None:
        return CHUNKS
    known = _flavor(view)[2]
    layers = (known or {}).get("config", {}).get("num_hidden_layers")
    if type(each) is not int or type(ranks) is not int or each < 1 or ranks < 1 or type(layers) is not int:
        return None
    first, last = (view.value(f"parallelism.pipeline_parallel_{end}_stage_less_layers") for end in ("first", "last"))
    stages = -(-(layers + (first or 0) + (last or 0)) // each)
    return stages // ranks if stages % ranks == 0 and stages >= ranks else None


def layers_per_stage(value: object, view: View, row: Row) -> Outcome:
    """Drop the layers of a stage, which the schedule's number of chunks has."""
    if _pipeline(view) == 1:
        return dropped("without a pipeline it has no effect")
    return dropped(row.why)


def of_pipeline(value: object, view: View, row: Row) -> Outcome:
    """Drop a setting of the pipeline if there is none, or if it says nothing."""
    if _pipeline(view) == 1:
        return dropped("without a pipeline it has no effect")
    return dropped("empty") if value in ("", []) else needed(row.why, row.to)


# Batch and steps --------------------------------------------------------------------------------------------------


@number
def local_batch(value: float, view: View, row: Row) -> Outcome:
    """Convert the samples of a data rank; a pipeline divides them into micro-batches."""
    if _pipeline(view) == 1:
        return Outcome("renamed", row.to, value)
    micro = view.value("parallelism.pipeline_parallel_microbatch_size") or 1
    if type(micro) is not int or value != int(value) or micro < 1 or value % micro:
        return needed("choose a number that divides training.local_batch_size", row.to)
    has_global = (view.value("training.global_batch_size") or -1) != -1
    also = {} if has_global else {"batch.accumulation": int(value) // micro}
    why = f"pipeline_parallel_microbatch_size, of {value:g} samples of a data rank"
    return changed(row.to, micro, why, also)


def _samples(tokens: object, view: View) -> int | None:
    length = view.value("training.max_context_length")
    known = type(tokens) is int and type(length) is int and length > 0
    return tokens // length if known and tokens % length == 0 and tokens >= length else None


@number
def tokens_of_rank(value: float, view: View, row: Row) -> Outcome:
    """Convert the tokens of a data rank's micro-batch to samples."""
    made = _samples(value, view)
    if made is None:
        return needed("choose the samples of a micro-batch: these tokens are not whole samples", row.to)
    pieces = view.value("parallelism.num_pp_microbatches") or 1
    has_step = (view.value("training.num_tokens_per_train_step") or -1) != -1
    also = {"batch.accumulation": pieces} if _pipeline(view) != 1 and not has_step else {}
    return changed(row.to, made, f"{value:g} tokens / max_context_length", also)


@number
def tokens_of_step(value: float, view: View, row: Row) -> Outcome:
    """Convert the tokens of a step to samples."""
    if value == -1:
        return dropped("-1 is one micro-batch on each data rank")
    made = _samples(value, view)
    if made is None:
        return needed("choose the samples of a step: these tokens are not whole samples", row.to)
    return changed(row.to, made, f"{value:g} tokens / max_context_length")


@number
def unless_negative(value: float, view: View, row: Row) -> Outcome:
    """Keep a size; -1 means that others determine it."""
    return dropped(row.why) if value == -1 else row.as_is(value)


def betas(value: object, view: View, row: Row) -> Outcome:
    """Combine both betas of Adam in one value."""
    return changed(row.to, (value, view.value("optimizer.beta2")), "beta1 and beta2")


@number
def decay_ratio(value: float, view: View, row: Row) -> Outcome:
    """Drop a decay that begins after the warm-up, as dslpar's does."""
    steps = view.get("lr_scheduler.total_steps") or view.value("training.steps")
    warmup = view.value("lr_scheduler.warmup_steps")
    if all(isinstance(item, int) for item in (steps, warmup)) and round(steps * value) >= steps - warmup:
        return dropped("the decay begins after the warm-up")
    return needed("dslpar's decay begins after the warm-up: leave it out", row.to)


@number
def min_lr(value: float, view: View, row: Row) -> Outcome:
    """Convert a factor of the learning rate to a learning rate."""
    rate = view.value("optimizer.lr")
    if not value:
        return changed(row.to, 0.0, "0 times optimizer.lr")
    if not isinstance(rate, int | float):
        return needed("choose this factor of optimizer.lr, which is not known", row.to)
    return changed(row.to, value * rate, f"{value:g} * {rate:g}")


# Precision and memory -------------------------------------------------------------------------------------------


def _dtype(value: object) -> str:
    name = str(value).rpartition(".")[2]
    return {"bfloat16": "bf16", "float32": "fp32", "float16": "fp16"}.get(name, "")


def dtype(value: object, view: View, row: Row) -> Outcome:
    """Convert the type of computation; the weights are fp32."""
    made = _dtype(value)
    if not made:
        return needed(f"{value!r} is none of dslpar's types: choose 'fp32', 'bf16' or 'fp16'", row.to)
    if _dtype(view.value("training.dtype")) not in ("fp32", ""):
        return dropped("training.dtype has it")
    return changed(row.to, made, "weights stay fp32, as DeepSpeed keeps them")


def whole_dtype(value: object, view: View, row: Row) -> Outcome:
    """Convert the type of weights; fp32 is left to the type of computation."""
    made = _dtype(value)
    if made == "fp32":
        return dropped("mixed_precision_param decides the type of computation")
    if not made:
        return needed(f"{value!r} is none of dslpar's types: choose 'fp32', 'bf16' or 'fp16'", row.to)
    return changed(row.to, made, row.why)


def offload(value: object, view: View, row: Row) -> Outcome:
    """Convert the switch of FSDP's offloading."""
    if value is not True:
        return dropped("off")
    also = {"zero.offload_param.device": "cpu"} if _pipeline(view) == 1 else None
    return changed(row.to, "cpu", row.why, also)


def recompute(value: object, view: View, row: Row) -> Outcome:
    """Convert the mode of activation checkpointing, which changes no result."""
    name = str(value).rpartition(".")[2].removesuffix("AC").lower()
    if name == "full":
        return changed(row.to, 1, "'full': the input of each layer is stored, the rest computed again")
    if name == "none":
        return dropped("none")
    return dropped("attention stores no scores; where memory lacks, activation_checkpoint=N")


def components(value: object, view: View, row: Row) -> Outcome:
    """Drop the parts to compile: both, or those of a run that compiles nothing."""
    if not _compiles(view):
        return dropped("nothing is compiled, so it has no effect")
    if isinstance(value, list) and sorted(map(str, value)) == ["loss", "model"]:
        return dropped("both")
    names = [{"model": "layers"}.get(str(item), str(item)) for item in value] if isinstance(value, list) else []
    if names and set(names) <= {"layers", "loss"}:
        return changed("train.compile_components", names, "'model' is 'layers'")
    return needed("dslpar compiles 'layers' and 'loss': choose of these", "train.compile_components")


def of_compile(value: object, view: View, row: Row) -> Outcome:
    """Keep the backend of a run that compiles."""
    return row.as_is(value) if _compiles(view) else dropped("nothing is compiled, so it has no effect")


def _compiles(view: View) -> bool:
    return view.value("compile.enable") is True and not _is_fully_sharded(view)


# The run ----------------------------------------------------------------------------------------------------------


def checkpoint_interval(value: object, view: View, row: Row) -> Outcome:
    """Keep the steps between checkpoints if there are any."""
    is_on = view.value("checkpoint.enable") is True or view.value("checkpoint.enable_checkpoint") is True
    # The Python configs of 2026 have no switch: a section is a checkpointer.
    is_on = is_on or (view.get("model_spec.flavor") is not None and view.get("checkpoint.enable") is None)
    return row.as_is(value) if is_on else dropped("without checkpoint.enable it has no effect")


def async_mode(value: object, view: View, row: Row) -> Outcome:
    """Convert the mode of asynchronous checkpoints to a switch."""
    if value not in ("disabled", "async", "async_with_pinned_mem"):
        return needed("choose True or False", row.to)
    return changed(row.to, value != "disabled", f"{value!r}")


def switch(value: object, view: View, row: Row) -> Outcome:
    """Keep a switch that is on."""
    return Outcome("renamed", row.to, True) if value is True else dropped("off")


def of_validation(value: object, view: View, row: Row) -> Outcome:
    """Drop a setting of validation if there is none."""
    is_on = view.value("validation.enable") is True
    if row.pattern.startswith("validator"):  # in the Python configs, a validator is one that runs
        is_on = any(key.startswith("validator.") for key in view.values)
    if not is_on:
        return dropped("without validation.enable there is none")
    if row.pattern.endswith(".steps") and value == -1:
        return needed("-1 is all of the held-out data: choose the steps of an evaluation", row.to)
    return Outcome("needed", row.to, why=row.why) if row.fate == "needed" else row.as_is(value)


def unless_false(value: object, view: View, row: Row) -> Outcome:
    """Drop a switch that is off; one that is on needs the author."""
    return dropped("off") if value is False else needed(row.why, row.to)


def unless_empty(value: object, view: View, row: Row) -> Outcome:
    """Drop an empty text; any other needs the author."""
    return dropped("empty") if value == "" else needed(row.why, row.to)


# Python configs -----------------------------------------------------------------------------------------------------


def helpers(tree: ast.Module, path: str) -> Mapping[str, Helper]:
    """Return what torchtitan's functions return that its Python configs call.

    A registry of models does not say its own name: the folder has it that it is imported from, or the file's own.
    """
    folder = path.replace("\\", "/").split("/")
    name = folder[-2] if len(folder) > 1 and folder[-1] == "config_registry.py" else ""
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and any(alias.name == "model_registry" for alias in node.names):
            name = node.module.rpartition(".")[2] if node.module and not node.level else name
    if not name:
        functions = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
        name = next((known for known in models() for function in functions if function.startswith(known)), "")

    def registry(args: Sequence[Any], words: Mapping[str, Any]) -> Any:
        flavor = args[0] if args else words.get("flavor")
        rest = {key: value for key, value in words.items() if key != "flavor"}
        return None if flavor is None else {"name": name or None, "flavor": flavor, **rest}

    return {"model_registry": registry, "default_adamw": _default_adamw}


def _default_adamw(args: Sequence[Any], words: Mapping[str, Any]) -> Any:
    """Return the one group of parameters of default_adamw (components/optimizer/optimizer.py:378), by key."""
    first, second = words.get("betas", (0.9, 0.95))
    given = {"lr": args[0]} if args else {}
    made = {"name": "AdamW", "lr": 8e-4, "beta1": first, "beta2": second, "eps": 1e-8, "weight_decay": 0.1}
    return made | given | {key: value for key, value in words.items() if key != "betas"}
