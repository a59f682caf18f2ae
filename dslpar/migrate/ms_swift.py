"""Conversions for ms-swift's `megatron` commands (rows: data/ms_swift.txt), beside Megatron-LM's."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from dslpar.migrate import megatron
from dslpar.migrate.conversions import number, on
from dslpar.migrate.defaults import read_defaults
from dslpar.migrate.table import Outcome, Row, View, changed, dropped, needed


@cache
def _defaults() -> Mapping[str, str]:
    return {default.key: repr(default.value) for default in read_defaults("ms_swift")}


def unless_default(value: object, view: View, row: Row) -> Outcome:
    """Drop a value that is ms-swift's own default, or says nothing; any other value needs the author."""
    if value is False or value in ([], "") or repr(value) == _defaults().get(row.pattern):
        return dropped("off, as if left out")
    return megatron.unless_default(value, view, row)


# The model --------------------------------------------------------------------------------------------------------


def model(value: object, view: View, row: Row) -> Outcome:
    """Say what to write for a model of a hub."""
    kind = f"choose model=dict(type='transformers.CLASS', pretrained='FOLDER') with {value!r} in a folder"
    return needed(kind, row.to)


def torch_dtype(value: object, view: View, row: Row) -> Outcome:
    """Convert the type of weights, unless a switch of half precision has it."""
    if view.get("bf16") is True or view.get("fp16") is True:
        return dropped("bf16 or fp16 has it")
    made = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}.get(str(value).rpartition(".")[2])
    return changed("precision.dtype", made, f"{value!r}") if made else needed("choose a type", "precision.dtype")


def _has_lora(view: View) -> bool:
    return str(view.get("tuner_type", view.get("train_type", view.defaults.get("tuner_type", "lora")))).startswith(
        "lora"
    )


def tuner(value: object, view: View, row: Row) -> Outcome:
    """Convert the kind of training: all weights, or adapters."""
    if value == "full":
        return dropped("all weights are trained")
    if value == "lora":
        return dropped("model.lora")
    return needed(f"{value!r}: dslpar trains all weights, or LoRA's adapters: choose one", "model.lora")


def of_lora(value: object, view: View, row: Row) -> Outcome:
    """Keep a setting of adapters, if there are any."""
    if not _has_lora(view):
        return dropped("without adapters it has no effect")
    if value in (None, []):
        return dropped("empty")
    return needed(row.why, row.to) if row.fate == "needed" else row.as_is(value)


def lora_modules(value: object, view: View, row: Row) -> Outcome:
    """Convert the layers that have adapters."""
    if not _has_lora(view):
        return dropped("without adapters it has no effect")
    names = value if isinstance(value, list) else [value]
    if names in (["all-linear"], ["all-router"], []):
        return changed(row.to, "all-linear", "every linear layer but the head")
    return Outcome("renamed", row.to, value)


def unless_frozen(value: object, view: View, row: Row) -> Outcome:
    """Drop a setting of models that read images, too; freezing the language model needs the author."""
    if row.pattern == "freeze_llm" and value is True:
        return needed("dslpar trains all weights, or adapters alone: leave it out")
    return dropped(row.why)


# The run ----------------------------------------------------------------------------------------------------------


@number
def epochs(value: float, view: View, row: Row) -> Outcome:
    """Convert epochs to steps, as ms-swift does: whole steps of all epochs."""
    if view.get("train_iters") is not None:
        return dropped("train_iters sets the steps")
    if view.epoch is None:
        return needed("epochs of the data: give --num-samples N, or choose train.steps", row.to)
    steps = int(view.epoch.samples * value) // view.epoch.global_size
    return changed(row.to, max(steps, 1), f"{value:g} epochs of {view.epoch.samples} samples")


def _steps(view: View) -> int | None:
    """Return the steps of a run; None if they are unknown."""
    if type(steps := view.get("train_iters")) is int:
        return int(steps)
    count = view.any_of("num_train_epochs", "max_epochs")
    if view.epoch is None or not isinstance(count, int | float):
        return None
    return int(view.epoch.samples * count) // view.epoch.global_size


@number
def warmup(value: float, view: View, row: Row) -> Outcome:
    """Convert a fraction of the run to steps."""
    steps = _steps(view)
    if view.get("lr_warmup_iters"):
        return dropped("lr_warmup_iters sets the warm-up")
    if not value:
        return dropped("no warm-up, as if left out")
    if steps is None:
        return needed("epochs of the data: give --num-samples N, or choose this fraction of train.steps", row.to)
    return changed(row.to, int(value * steps), f"{value} * {steps} steps")


def of_adam(value: object, view: View, row: Row) -> Outcome:
    """Convert a setting of Adam."""
    if view.value("optimizer") != "adam":
        return dropped("the optimizer is not Adam")
    return megatron.betas(value, view, row) if row.pattern == "adam_beta1" else row.as_is(value)


def of_sgd(value: object, view: View, row: Row) -> Outcome:
    """Keep a setting of SGD."""
    return row.as_is(value) if view.value("optimizer") == "sgd" else dropped("the optimizer is not SGD")


@number
def length(value: float, view: View, row: Row) -> Outcome:
    """Keep the length of samples; that of a packed row has priority."""
    if row.pattern == "max_length" and view.get("packing_length") is not None:
        return dropped("packing_length has priority")
    return row.as_is(value)


@number
def held_out(value: float, view: View, row: Row) -> Outcome:
    """Convert the share that is held out; 0 is none."""
    return dropped("0 is none") if value == 0 else changed(row.to, value, row.why)


def packing(value: object, view: View, row: Row) -> Outcome:
    """Convert packing, which a row of documents without padding is, too."""
    if row.pattern == "padding_free":
        return dropped("it changes no sample: padding has no effect")
    return changed(row.to, True, row.why, {"data.type": "chat"}) if value is True else dropped("off")


def only_true(value: object, view: View, row: Row) -> Outcome:
    """Drop a switch that is on; one that is off needs the author."""
    return dropped("on") if value is True else needed(row.why)


def same_seed(value: object, view: View, row: Row) -> Outcome:
    """Drop the seed of the order if it is that of the run."""
    return dropped(row.why) if value == view.value("seed") else needed("dslpar has one seed: leave it out")


def loss_scale(value: object, view: View, row: Row) -> Outcome:
    """Drop the usual weights of parts of samples: those of answers."""
    return dropped("answers count") if value in ("default", "last_round") else needed(row.why, row.to)


@number
def eval_iters(value: float, view: View, row: Row) -> Outcome:
    """Keep the steps of an evaluation; a negative number is all of the data."""
    return needed(row.why, row.to) if value < 0 else Outcome("renamed", row.to, value)


def unchanged(value: object, view: View, row: Row) -> Outcome:
    """Keep a value under dslpar's name."""
    return Outcome("renamed", row.to, value)


def recompute(value: object, view: View, row: Row) -> Outcome:
    """Convert the granularity of activation recomputation; 'none' is none."""
    return dropped("none") if value == "none" else megatron.recompute(value, view, row)


def report_to(value: object, view: View, row: Row) -> Outcome:
    """Convert the monitors: tensorboard and wandb."""
    names = value if isinstance(value, list) else [value]
    other = [name for name in names if name not in ("tensorboard", "wandb", "none")]
    if other:
        return needed(f"dslpar has tensorboard and wandb, not {other[0]}: choose of these", "monitor")
    if names == ["none"] or not names:
        return dropped("none")
    first, *rest = (f"monitor.{name}.enabled" for name in names)
    return changed(first, True, f"{value!r}", dict.fromkeys(rest, True))


def only_steps(value: object, view: View, row: Row) -> Outcome:
    """Drop the strategy 'steps'; epochs need the author."""
    return dropped("by steps") if value == "steps" else needed(row.why, "train.save_interval")


def precision(value: object, view: View, row: Row) -> Outcome:
    """Convert a switch of half precision."""
    return on(value, view, row._replace(argument=f"{row.pattern!r}: a type in place of a switch"))


def router_dtype(value: object, view: View, row: Row) -> Outcome:
    """Drop the type of routers, if it is fp32 or that of the model."""
    return needed("dslpar's routers compute in fp32: leave it out") if value == "fp64" else dropped(row.why)


@number
def expert_size(value: float, view: View, row: Row) -> Outcome:
    """Convert the size of expert parallelism: experts are whole unless expert_tensor_parallel_size is set."""
    of_one = view.value("expert_tensor_parallel_size") or 1
    if type(of_one) is not int or value != int(value):
        return needed("choose the number of ranks that together hold all experts", row.to)
    if value * of_one == 1:
        return dropped("1 means none")
    return changed(row.to, int(value) * of_one, "the ranks that together hold all experts")


def finetune(value: object, view: View, row: Row) -> Outcome:
    """Drop the switch that begins with a model's weights and not with a run's state."""
    return dropped(row.why if value is True else "--resume continues a run")
