"""Conversions for ColossalAI's legacy configs (rows: data/colossalai.txt), with the GPT sizes of titans 0.0.7."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import Any

from dslpar.language.tree import Reference
from dslpar.migrate.conversions import chunks, number, one_dropout, only
from dslpar.migrate.table import Conversion, Outcome, Row, View, changed, dead, dropped, needed
from dslpar.migrate.unread import UNREAD
from dslpar.schema.class_sections import IDLE_HANDLERS

_BASE = {"vocab_size": 50304, "max_seq_len": 1024, "dropout": 0.1}
_SIZES = {
    "gpt2_small": (12, 768, 12),
    "gpt2_medium": (24, 1024, 8),
    "gpt2_large": (36, 1536, 12),
    "gpt2_xl": (48, 1600, 16),
    "gpt2_2B": (40, 2048, 16),
    "gpt2_3B": (48, 2304, 16),
    "gpt2_4B": (64, 2304, 16),
    "gpt2_6B": (30, 4096, 16),
    "gpt2_8B": (72, 3072, 24),
    "gpt2_12B": (60, 4096, 16),
    "gpt2_15B": (78, 4096, 16),
    "gpt2_18B": (90, 4096, 16),
    "gpt2_20B": (25, 8192, 16),
    "gpt2_24B": (30, 8192, 16),
    "gpt2_28B": (35, 8192, 16),
    "gpt2_32B": (40, 8192, 16),
    "gpt2_36B": (45, 8192, 16),
    "gpt2_40B": (50, 8192, 16),
    "gpt3": (96, 12288, 96),
    "GPT": (12, 768, 12),
}
"""Layers, hidden size and heads, by the name of titans' function, or of its class `GPT` with its defaults."""
_THEIRS = ("colossalai.", "titans.", "model_zoo.")
_OURS = ("GPT", "dslpar.models.GPT")


def gpt_fields(target: str) -> Mapping[str, object] | None:
    """Return the fields of dslpar's GPT for a function or the GPT class of titans; None for any other target."""
    package, _, name = target.rpartition(".")
    if name not in _SIZES or (package and not package.startswith(("titans", "model_zoo"))) or target == "GPT":
        return None
    return _BASE | dict(zip(("num_layers", "hidden_size", "num_heads"), _SIZES[name], strict=True))


def _is_gpt(model: str) -> bool:
    return model in _OURS or gpt_fields(model) is not None


# The model --------------------------------------------------------------------------------------------------------


def model_type(value: object, view: View, row: Row) -> Outcome:
    """Convert the class of the model."""
    name, fields = str(value), gpt_fields(str(value))
    if name in _OURS:
        return Outcome("kept", row.to, "GPT")
    if fields is not None:
        also = {f"model.{field}": size for field, size in fields.items()}
        return changed(row.to, "GPT", f"{name.rpartition('.')[2]} is titans' GPT, with these sizes", also)
    if "." in name and not name.startswith(_THEIRS):
        why = "dslpar builds it if it is a class, a torch.nn.Module over dslpar.layers; a function becomes a class"
        return changed(row.to, name, why)
    return needed(f"dslpar has no model {name!r}", "model")


def model_name(value: object, view: View, row: Row) -> Outcome:
    """Convert a model given only as a name."""
    made = model_type(value, view, row)
    return changed(row.to, made.value, "a bare name is not a section") if made.fate == "kept" else made


def _or_own(convert: Conversion) -> Conversion:
    """Decorate a conversion of an argument of titans' GPT; dslpar's GPT and the author's classes take it unchanged."""

    @functools.wraps(convert)
    def checked(value: object, view: View, row: Row) -> object:
        if gpt_fields(view.model) is not None:
            return convert(value, view, row)
        if view.model in _OURS or ("." in view.model and not view.model.startswith(_THEIRS)):
            return Outcome("kept", row.pattern, value)
        return dropped("its model is one that dslpar does not have")

    return checked


@_or_own
def titans(value: object, view: View, row: Row) -> Outcome:
    """Keep or drop an argument, as the row's fate says."""
    return row.as_is(value, row.why if row.fate == "dropped" else "")


@_or_own
def titans_only(value: object, view: View, row: Row) -> Outcome:
    """Apply `only` to an argument of titans' GPT."""
    return only(value, view, row)


@_or_own
def titans_needed(value: object, view: View, row: Row) -> Outcome:
    """Ask the author; the row's argument is the reason."""
    return needed(row.argument, row.to)


@_or_own
@number
def titans_ratio(value: float, view: View, row: Row) -> Outcome:
    """Convert mlp_ratio, a multiple of hidden_size."""
    hidden = view.get("model.hidden_size", (gpt_fields(view.model) or {}).get("hidden_size", 0))
    if type(hidden) is not int:
        return needed(f"mlp_ratio times hidden_size, which is {hidden!r}", row.to)
    return changed(row.to, int(value * hidden), "mlp_ratio times hidden_size")


@_or_own
def titans_dropout(value: object, view: View, row: Row) -> Outcome:
    """Merge titans' three dropout probabilities, each 0.1 by default."""
    names = ("dropout", "embedding_dropout", "attention_dropout")
    return one_dropout(value, [view.get(f"model.{name}", 0.1) for name in names], row)


@_or_own
def other_argument(value: object, view: View, row: Row) -> Outcome:
    """Ask the author about an argument that titans' GPT does not have."""
    return needed("titans' GPT has no such argument")


def size(value: object, view: View, row: Row) -> Outcome:
    """Convert HIDDEN_SIZE and similar variables: only the script knows which model they belong to."""
    if not view.model:
        return needed("a size of the model that the script builds: write it into model", row.to)
    return dropped("the sizes of the model count" if _is_gpt(view.model) else "the model's class has it")


def sequence(value: object, view: View, row: Row) -> Outcome:
    """Convert the sequence length of a text model; an image's patches are not tokens of the section data."""
    if not _is_gpt(view.model):
        return needed("tokens of a sample, if the model reads text: data.seq_len", row.to)
    return row.as_is(value)


# The batch and the run --------------------------------------------------------------------------------------------


def _num_stages(view: View) -> Any:
    return view.any_of("parallel.pipeline.size", "parallel.pipeline") or 1


def _has_pipeline(view: View) -> bool:
    """Return whether there are several stages, or an unknown number."""
    sizes = (view.values.get("parallel.pipeline.size"), view.values.get("parallel.pipeline"))
    return UNREAD in sizes or _num_stages(view) != 1


def _num_pieces(view: View) -> Any:
    """Return the number of micro-batches that the pipeline's schedule makes of a batch; 1 without a pipeline."""
    return 1 if _num_stages(view) == 1 else view.any_of("NUM_MICRO_BATCHES", "schedule.num_microbatches") or 1


def micro_size(value: object, view: View, row: Row) -> object:
    """Convert BATCH_SIZE, the batch per data rank, which the pipeline's schedule splits into NUM_MICRO_BATCHES."""
    pieces = _num_pieces(view)
    if pieces == 1:
        return Outcome("renamed", row.to, value, "samples of one data rank, in both")
    if not isinstance(value, int) or not isinstance(pieces, int) or pieces < 1 or value % pieces:
        return needed(f"it must be NUM_MICRO_BATCHES = {pieces!r} times a whole number", row.to)
    return value // pieces


def accumulation(value: object, view: View, row: Row) -> Outcome:
    """Convert gradient_accumulation."""
    pieces, steps = _num_pieces(view), view.get("gradient_accumulation", 1)
    if type(pieces) is not int or type(steps) is not int:
        return needed("it is not a whole number", row.to)
    if value == 1 and pieces * steps > 1:
        return dropped("1: batch.accumulation is gradient_accumulation times NUM_MICRO_BATCHES")
    if pieces == 1 or steps == 1:
        return row.as_is(value, "micro-batches of one step")
    why = f"{pieces} micro-batches in flight times gradient_accumulation {steps}: micro-batches of one step"
    return changed(row.to, pieces * steps, why)


def num_microbatches(value: object, view: View, row: Row) -> Outcome:
    """Convert the micro-batches of a pipeline."""
    if _num_stages(view) == 1:
        return dead("it splits the batch of a pipeline, and there is no pipeline")
    return accumulation(value, view, row)


def num_chunks(value: object, view: View, row: Row) -> Outcome:
    """Convert the number of model chunks per rank."""
    return chunks(value, _has_pipeline(view), row)


def schedule_type(value: object, view: View, row: Row) -> Outcome:
    """Convert the class of a schedule."""
    name = str(value).rpartition(".")[2]
    if not _has_pipeline(view):
        return dropped("without a pipeline it has no effect")
    if name != "InterleavedPipelineSchedule":
        known = name == "PipelineSchedule"
        return changed(row.to, "1f1b", "its order") if known else needed(f"dslpar has no schedule {name}", row.to)
    num = view.any_of("schedule.num_model_chunks", "schedule.num_chunks", "model.num_chunks")
    if num is None:
        return needed("it has num_model_chunks stages per rank, but the source does not set that number", row.to)
    return changed(row.to, "1f1b" if num == 1 else "interleaved", f"{num} stages on each rank")


def unless_given(value: object, view: View, row: Row) -> Outcome:
    """Keep a variable that is another name of a key, unless the source sets the key itself."""
    return dropped(f"{row.to} sets it") if view.get(row.to) is not None else row.as_is(value)


def by_epoch(value: object, view: View, row: Row) -> Outcome:
    """Convert epochs to steps: epochs times full global batches per epoch, unless the row's argument gives steps."""
    if row.argument and view.get(row.argument) is not None and not _in_epochs(row.argument, view):
        return dropped(f"{row.argument} sets it")
    if view.epoch is None:
        per_epoch = "one epoch is (samples of the data) / batch.global_size of them; give --num-samples N"
        return needed(f"dslpar counts optimizer steps: {per_epoch}", row.to)
    samples, global_size = view.epoch
    steps = value * (samples // global_size) if type(value) is int else 0
    if steps < 1:
        return needed(
            f"{value!r} epochs of {samples} samples, {global_size} per step, do not make a number of steps", row.to
        )
    return changed(row.to, steps, f"{value} epochs of {samples} samples // {global_size} per step")


def _in_epochs(key: str, view: View) -> bool:
    """Return whether a scheduler's key is set from a variable that counts epochs, and so counts epochs too."""
    names = ("NUM_EPOCHS", "num_epochs", "WARMUP_EPOCHS")
    return any(name in view.used and view.get(name) == view.get(key) for name in names)


def of_scheduler(value: object, view: View, row: Row) -> Outcome:
    """Keep a scheduler's number of steps. If it counts epochs, NUM_EPOCHS and WARMUP_EPOCHS convert it instead."""
    if _in_epochs(row.pattern, view):
        return dropped("it counts epochs here: see NUM_EPOCHS and WARMUP_EPOCHS")
    if row.to == row.pattern and _in_epochs("lr_scheduler.total_steps", view):  # so the warm-up is in epochs too
        return by_epoch(value, view, row)
    return row.as_is(value)


@number
def fraction(value: float, view: View, row: Row) -> Outcome:
    """Convert a share of the run into steps."""
    if view.get(row.to) is not None:
        return dropped(f"{row.to} sets it")
    total = view.any_of("TRAIN_ITERS", "lr_scheduler.total_steps")
    if type(total) is not int or _in_epochs("lr_scheduler.total_steps", view):
        return needed("dslpar counts steps of warm-up: this fraction of train.steps", row.to)
    return changed(row.to, int(value * total), f"{value} * {total} steps")


# Precision and ZeRO -----------------------------------------------------------------------------------------------

_MODES = {
    "NAIVE": "the whole model in fp16 with a dynamic loss scale: DeepSpeed's fp16",
    "TORCH": "torch's autocast kept norms and losses in fp32; DeepSpeed's fp16 holds the whole model in fp16",
    "APEX": "apex chose types by opt_level; DeepSpeed's fp16 holds the whole model in fp16",
}


def amp_type(value: object, view: View, row: Row) -> Outcome:
    """Convert an AMP_TYPE."""
    name = str(value).rpartition(".")[2].upper()
    known = name in _MODES
    return changed(row.to, "fp16", _MODES[name]) if known else needed(f"unknown AMP_TYPE {str(value)!r}", row.to)


def loss_scale(value: object, view: View, row: Row) -> Outcome:
    """Keep a number; 'dynamic' is the default."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return row.as_is(value) if is_number else dropped("a dynamic loss scale is DeepSpeed's default")


_SHARDED = {"zero.stage": 3, "precision.dtype": "fp16"}
"""Keys that any `zero.model_config` implies."""


def placement(value: object, view: View, row: Row) -> Outcome:
    """Convert the placement of a sharded model's tensors."""
    if value == "cuda":
        return dropped("on the device, as if left out", _SHARDED)
    if value == "cpu":
        also = {"zero.offload_optimizer.device": "cpu", **_SHARDED}
        return changed(row.to, "cpu", "parameters, and the optimizer with them", also)
    why = "no tensor moves by itself: zero.offload_optimizer and zero.offload_param say what lies on the CPU"
    return changed("", None, why, _SHARDED)


def sharded(value: object, view: View, row: Row) -> Outcome:
    """Convert a model whose parameters are sharded, in fp16."""
    why = "a sharded model is ZeRO 3, in fp16; DeepSpeed decides how a tensor is sharded"
    return changed(row.to, 3, why, {"precision.dtype": "fp16"})


def offload_pipeline(value: object, view: View, row: Row) -> Outcome:
    """Convert a switch that corresponds to two switches in DeepSpeed: pipeline_read and pipeline_write."""
    return changed(row.to, value, row.why, {"zero.offload_optimizer.pipeline_write": value})


@number
def mebibytes_of_fp16(value: float, view: View, row: Row) -> int:
    """Convert a bucket's size from MiB of fp16 to elements."""
    return int(value * 2**20) // 2


# Optimizer, scheduler, handlers -----------------------------------------------------------------------------------

_ADAMS = ("HybridAdam", "CPUAdam", "FusedAdam")
"""ColossalAI's own Adams, some of whose arguments DeepSpeed's Adams do not have."""
_OPTIMIZERS = {
    "HybridAdam": ("AdamW", "HybridAdam decays as AdamW does; where it runs follows from zero.offload_optimizer"),
    "CPUAdam": ("AdamW", "CPUAdam decays as AdamW does; where it runs follows from zero.offload_optimizer"),
    "FusedAdam": ("AdamW", "FusedAdam decays as AdamW does"),
    "FusedSGD": ("SGD", "the same steps, unfused"),
    "FusedLAMB": ("Lamb", "DeepSpeed's LAMB"),
    "Lamb": ("Lamb", "DeepSpeed's LAMB"),
}
_CURVES = {"CosineAnnealingWarmupLR": "cosine", "CosineAnnealingLR": "cosine", "LinearWarmupLR": "linear"}
_SCHEDULERS = {name: (ours, f"{name}, by dslpar's name; steps are optimizer steps") for name, ours in _CURVES.items()}


def only_of_their_adam(value: object, view: View, row: Row) -> Outcome:
    """Apply `only` to ColossalAI's own Adams; other optimizers take their arguments unchanged."""
    theirs = str(view.get("optimizer.type", "")).rpartition(".")[2] in _ADAMS
    return only(value, view, row) if theirs else Outcome("kept", row.pattern, value)


def optimizer(value: object, view: View, row: Row) -> Outcome:
    """Convert the name of an optimizer."""
    package, _, name = str(value).rpartition(".")
    if name in _ADAMS and not package.startswith("torch") and view.get("optimizer.adamw_mode", True) is False:
        return changed(row.to, "Adam", f"{name} with adamw_mode=False is Adam, its decay in the gradient")
    return _class_name(value, row, _OPTIMIZERS)


def lr_scheduler(value: object, view: View, row: Row) -> Outcome:
    """Convert the name of a learning-rate scheduler."""
    return _class_name(value, row, _SCHEDULERS)


def _class_name(value: object, row: Row, known: Mapping[str, tuple[str, str]]) -> Outcome:
    """Convert a class name: ColossalAI's by the table, torch's to its short name, others unchanged."""
    if not isinstance(value, (str, Reference)) or not str(value):
        return needed(f"{value!r} is not the name of a class", row.to)
    package, _, name = str(value).rpartition(".")
    if name in known and not package.startswith("torch"):
        return changed(row.to, *known[name])
    if package.startswith("colossalai"):
        return needed(f"dslpar has no {name}", row.to)
    return Outcome("kept", row.to, name if package.startswith("torch.optim") else str(value))


def handlers(value: object, view: View, row: Row) -> Outcome:
    """Leave out gradient handlers whose work DeepSpeed does."""
    items = list(value) if isinstance(value, (list, tuple)) else [value]
    names = [str(item.get("type")).rpartition(".")[2] if isinstance(item, dict) else "" for item in items]
    left = [item for item, name in zip(items, names, strict=True) if name not in IDLE_HANDLERS]
    idle = "; ".join(f"{name}: {IDLE_HANDLERS[name]}" for name in names if name in IDLE_HANDLERS)
    if not left:
        return dropped(idle or "an empty list has no effect")
    return changed(row.to, left, idle) if idle else row.as_is(value)


# Hooks of the trainer ---------------------------------------------------------------------------------------------

_LOGGED = "log.txt and metrics.jsonl have it, every train.log_interval steps and every step"
_HOOKS = {
    "LogMetricByEpochHook": _LOGGED,
    "LogMetricByStepHook": _LOGGED,
    "LogTimingByEpochHook": _LOGGED,
    "LogMemoryByEpochHook": "the log reports memory after the first step",
    "LossHook": _LOGGED,
    "ThroughputHook": _LOGGED,
    "AccuracyHook": "dslpar eval RUN --metrics accuracy@1 measures it",
    "LRSchedulerHook": "the engine steps lr_scheduler",
    "LoadCheckpointHook": "replaced by --resume at the start of the run",
    "TensorboardHook": "monitor.tensorboard",
    "SaveCheckpointHook": "train.save_interval",
}
"""Replacement of each ColossalAI hook."""
_OF_A_PROGRAM = "a hook of the author's own: a program gives it to dslpar.fit(hooks=[...]), as a callable"


def hooks(value: object, view: View, row: Row) -> Outcome:
    """Convert the list of hooks, each by its name."""
    items = [item if isinstance(item, Mapping) else {} for item in value] if isinstance(value, (list, tuple)) else []
    if not items:
        return dropped("an empty list has no effect")
    names = [str(item.get("type", "?")).rpartition(".")[2] for item in items]
    known = [re.sub("^Accuracy.*Hook$", "AccuracyHook", name) for name in names]  # early releases had one hook per mode
    why = "; ".join(f"{name}: {_HOOKS.get(known, _OF_A_PROGRAM)}" for name, known in zip(names, known, strict=True))
    also: dict[str, object] = {"monitor.tensorboard": True} if "TensorboardHook" in known else {}
    if "SaveCheckpointHook" not in known:
        return dropped(why, also)
    interval = _save_interval(items[known.index("SaveCheckpointHook")], view)
    if interval is None:
        why += ", which counts steps, but the hook counts epochs of the data: give --num-samples N"
        return Outcome("needed", "train.save_interval", why=why, also=also)
    return dropped(why, also | {"train.save_interval": interval})


def _save_interval(hook: Mapping[str, Any], view: View) -> int | None:
    """Return the steps between checkpoints; None if they depend on the data's size."""
    interval = hook.get("interval", 1)
    if type(interval) is not int or interval < 1:
        return None
    if hook.get("save_by_iter") is True:
        return interval
    return None if view.epoch is None else interval * (view.epoch.samples // view.epoch.global_size) or None
