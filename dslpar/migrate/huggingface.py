"""Conversions for configs of Hugging Face's Accelerate and Trainer, and of programs built on them.

Rows: data/accelerate.txt, data/training_arguments.txt, data/axolotl.txt and data/llama_factory.txt. `fill` follows
`HfTrainerDeepSpeedConfig.trainer_config_process` of transformers 5.23.0 (integrations/deepspeed.py:121).
"""

from __future__ import annotations

import ast
import json
import math
import os.path
import re
from collections.abc import Mapping
from typing import Any

from dslpar.migrate.conversions import clip, number
from dslpar.migrate.table import Outcome, Row, View, changed, dropped, needed

_MICRO = ("per_device_train_batch_size", "micro_batch_size")
_CLIP = ("max_grad_norm",)
_FILLED: Mapping[str, tuple[str, ...]] = {
    "train_micro_batch_size_per_gpu": _MICRO,
    "gradient_accumulation_steps": ("gradient_accumulation_steps", "deepspeed_config.gradient_accumulation_steps"),
    "gradient_clipping": (*_CLIP, "deepspeed_config.gradient_clipping"),
    "optimizer.params.lr": ("learning_rate",),
    "optimizer.params.eps": ("adam_epsilon",),
    "optimizer.params.weight_decay": ("weight_decay",),
    "scheduler.params.warmup_max_lr": ("learning_rate",),
    "scheduler.params.total_num_steps": ("max_steps",),
    "scheduler.params.warmup_num_steps": ("warmup_steps",),
    "zero_optimization.stage": ("deepspeed_config.zero_stage",),
}
"""DeepSpeed's keys whose "auto" is the value of another key."""
_NOTHING: tuple[object, ...] = (None, False, 0, "", "no", "No", "NO", "none", "None", "false", [], {})
"""Values that turn a feature off."""
_FOLDERS = "a folder that transformers' save_pretrained wrote"


def fill(key: str, view: View) -> tuple[object, str]:
    """Return the value of DeepSpeed's key that is "auto", and where it comes from; ("", "") if it is unknown."""
    if key == "scheduler.params.warmup_min_lr":
        return 0, "0"
    if key == "train_batch_size" and all(_is_known(name, view) for name in list(_FILLED)[:2]):
        return None, "micro size * accumulation * ranks, as dslpar does"
    if key == "optimizer.params.betas":
        betas = [view.value("adam_beta1"), view.value("adam_beta2")]
        return (betas, "adam_beta1 and adam_beta2") if None not in betas else ("", "")
    dtype = {"fp16.enabled": "fp16", "bf16.enabled": "bf16", "bfloat16.enabled": "bf16"}.get(key)
    if dtype is not None:
        return _half(dtype, view)
    for other in _FILLED.get(key, ()):
        value = view.value(other)
        is_size = isinstance(value, int | float) and not isinstance(value, bool)
        if is_size and not (key.endswith("_num_steps") and (value < 1 or value != int(value))):
            return value, other
    return "", ""


def _is_known(key: str, view: View) -> bool:
    return any(view.value(other) is not None for other in _FILLED[key])


def _half(dtype: str, view: View) -> tuple[object, str]:
    mixed = view.value("mixed_precision")
    if isinstance(mixed, str):
        return mixed == dtype, "mixed_precision"
    switch = view.value(dtype)
    if isinstance(switch, bool):
        return switch, dtype
    return "", ""


# Model --------------------------------------------------------------------------------------------------------------


def pretrained(value: object, view: View, row: Row) -> Outcome:
    """Convert a model's folder to its class and `pretrained`. A name of the Hub needs the author."""
    folder = os.path.join(view.folder, os.path.expanduser(value)) if isinstance(value, str) else ""
    config = os.path.join(folder, "config.json")
    if not folder or not os.path.isfile(config):
        what = f"download {value!r} and write the folder" if _is_hub_id(value) else f"{value!r} is not {_FOLDERS}"
        return needed(f"{what}: model = dict(type='transformers.X', pretrained='folder')", "model")
    architecture = _architecture(config)
    if not architecture:
        return needed(f"{value!r} names no class in its config.json: write the model", "model")
    return changed("model.pretrained", value, "the folder's weights", {"model.type": f"transformers.{architecture}"})


def _is_hub_id(value: object) -> bool:
    return isinstance(value, str) and re.fullmatch(r"[\w.-]+(/[\w.-]+)?", value) is not None and value[0] not in "./~"


def _architecture(config: str) -> str:
    try:
        with open(config, encoding="utf-8") as file:
            facts: Any = json.load(file)
    except (OSError, ValueError):  # the caller reports that the folder names no class
        return ""
    names = facts.get("architectures") if isinstance(facts, dict) else None
    return str(names[0]) if isinstance(names, list) and names else ""


def lora_key(value: object, view: View, row: Row) -> Outcome:
    """Keep a key of LoRA if the model is trained with it; the row's argument is "KEY VALUE..."."""
    key, *on = row.argument.split()
    state = view.value(key)
    return row.as_is(value) if str(state) in on else dropped(f"{key} is {state!r}, so there is no LoRA")


# Batch, steps, learning rate ------------------------------------------------------------------------------------------


def max_steps(value: object, view: View, row: Row) -> Outcome:
    """Keep a number of steps; none, or -1, means that the epochs set it."""
    if isinstance(value, int | float) and value <= 0:
        return dropped(f"{value}: the epochs set it")
    return row.as_is(value)


@number
def epochs(value: float, view: View, row: Row) -> Outcome:
    """Convert epochs to steps, as Trainer does, unless max_steps sets them."""
    steps = view.value("max_steps")
    if isinstance(steps, int | float) and steps > 0:
        return dropped("max_steps sets the steps")
    if view.epoch is None:
        per_epoch = "one epoch is (samples of the data) / batch.global_size of them; give --num-samples N"
        return needed(f"dslpar counts optimizer steps: {per_epoch}", row.to)
    samples, global_size = view.epoch
    made = math.ceil(value * math.ceil(samples / global_size))
    if made < 1:
        return needed(f"{value!r} epochs make no number of steps", row.to)
    return changed(row.to, made, f"{value:g} epochs of {samples} samples, {global_size} per step, rounded up")


def steps_of(view: View) -> int | None:
    """Return the steps of a run, from max_steps or from the epochs and --num-samples; None if they are unknown."""
    steps, count = view.value("max_steps"), view.value("num_train_epochs") or view.value("num_epochs")
    if isinstance(steps, int | float) and steps > 0:
        return int(steps)
    if view.epoch is None or not isinstance(count, int | float):
        return None
    samples, global_size = view.epoch
    return math.ceil(count * math.ceil(samples / global_size)) or None


def without_warmup(view: View) -> Outcome | None:
    """Drop warm-up that the schedule lacks: transformers' get_scheduler (optimization.py:1014) makes it without one."""
    schedule = view.value("lr_scheduler_type") or view.value("lr_scheduler")
    if schedule != "constant":
        return None
    return dropped("the schedule 'constant' has no warm-up; 'constant_with_warmup' has one")


@number
def warmup(value: float, view: View, row: Row) -> Outcome:
    """Convert warm-up: steps, or a share of the run if it is below 1."""
    if value == 0:
        return dropped("no warm-up, as if left out")
    if without := without_warmup(view):
        return without
    if row.pattern == "warmup_ratio" and view.get("warmup_steps"):
        return dropped("warmup_steps sets it")
    if value >= 1 and row.pattern != "warmup_ratio":
        return row.as_is(int(value)) if type(value) is int else changed(row.to, int(value), "a whole number")
    steps = steps_of(view)
    if steps is None:
        return needed(f"dslpar counts steps of warm-up: {value:g} of train.steps", row.to)
    return changed(row.to, math.ceil(value * steps), f"{value:g} * {steps} steps, rounded up")


def betas(value: object, view: View, row: Row) -> Outcome:
    """Merge adam_beta1 and adam_beta2 into one pair."""
    both = (view.value("adam_beta1"), view.value("adam_beta2"))
    if not all(isinstance(item, int | float) and not isinstance(item, bool) for item in both):
        return needed("Adam needs both numbers, adam_beta1 and adam_beta2", row.to)
    return changed(row.to, both, "adam_beta1 and adam_beta2")


_OPTIMIZERS = {"adamw_torch": "AdamW", "adamw_torch_fused": "AdamW", "adamw_hf": "AdamW", "adamw_apex_fused": "AdamW",
               "adamw": "AdamW", "sgd": "SGD"}  # fmt: skip


def trainer_optimizer(value: object, view: View, row: Row) -> Outcome:
    """Convert Trainer's name of the optimizer."""
    made = _OPTIMIZERS.get(str(value))
    if made is None:
        return needed(f"{value!r}: choose one of dslpar's optimizers, such as 'AdamW' or 'SGD'", row.to)
    return changed(row.to, made, f"Trainer's {value!r}")


def of_adam(value: object, view: View, row: Row) -> Outcome:
    """Keep a value that Adam reads; the row's argument names the key of the optimizer."""
    name = view.value(row.argument)
    if name is not None and _OPTIMIZERS.get(str(name)) != "AdamW":
        return dropped(f"{row.argument} is {name!r}, which does not read it")
    return betas(value, view, row) if row.to.endswith("betas") else row.as_is(value)


def trainer_scheduler(value: object, view: View, row: Row) -> Outcome:
    """Convert Trainer's name of the learning rate's schedule."""
    known = {"linear": "linear", "cosine": "cosine", "constant": "constant", "constant_with_warmup": "constant"}
    made = known.get(str(value))
    if made is None:
        return needed(f"{value!r} is none of {', '.join(map(repr, known))}: choose one of these", row.to)
    return changed(row.to, made, f"Trainer's {value!r}")


def by_steps(value: object, view: View, row: Row) -> Outcome:
    """Keep an interval if events come by steps; the row's argument is the key of the strategy."""
    strategy = view.value(row.argument)
    if strategy not in ("steps", None):
        what = f"{row.argument} is {strategy!r}"
        return dropped(what) if strategy == "no" else needed(f"{what}: choose a number of steps", row.to)
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1:
        return needed(f"{value:g} of the run: choose a number of steps", row.to)
    return row.as_is(value)


# Precision, ZeRO, parallelism -----------------------------------------------------------------------------------------


def dtype_switch(value: object, view: View, row: Row) -> Outcome:
    """Convert the switch of fp16 or bf16; the row's argument is the type."""
    if value is True or (value == "auto" and row.argument == "bf16"):
        why = "a type in place of a switch" if value is True else '"auto": Axolotl takes bf16 where the GPU has it'
        return changed(row.to, row.argument, why)
    if value in (False, "no", "false"):
        return dropped("off")
    return needed(f"{value!r}: choose precision = 'bf16' or 'fp16'", row.to)


def mixed_precision(value: object, view: View, row: Row) -> Outcome:
    """Convert Accelerate's mixed_precision."""
    if value in ("no", False):
        return dropped("no mixed precision")
    if value in ("fp16", "bf16"):
        return changed(row.to, value, "DeepSpeed holds the whole model in this type")
    return needed(f"dslpar has no {value!r}: choose 'bf16' or 'fp16'", row.to)


def of_plugin(value: object, view: View, row: Row) -> Outcome:
    """Keep a value if Accelerate uses its plugin; the row's argument is the `distributed_type` that uses it."""
    kind, _, conversion = row.argument.partition(" ")
    used = view.value("distributed_type")
    if used is not None and used != kind:
        return dropped(f"distributed_type is {used!r}, so Accelerate does not read it")
    return _PLUGIN[conversion](value, view, row) if conversion else row.as_is(value)


def zero_stage(value: object, view: View, row: Row) -> Outcome:
    """Convert the stage of ZeRO; half precision needs at least 1."""
    if value == 0 and view.value("mixed_precision") in ("fp16", "bf16"):
        return changed(row.to, 1, "at stage 0 DeepSpeed's half-precision step is wrong, so it becomes 1")
    return row.as_is(value)


_WHOLE = 3
"""Stage of ZeRO that shards parameters, which only then can be offloaded."""
_STAGES = {"full_shard": 3, "1": 3, "shard_grad_op": 2, "2": 2, "no_shard": 0, "3": 0}


def sharding(value: object, view: View, row: Row) -> Outcome:
    """Convert FSDP's strategy to a stage of ZeRO."""
    words = str(value if not isinstance(value, list) else " ".join(map(str, value))).lower().split()
    if not words or words == ["false"]:
        return dropped("off")
    if words == ["true"]:
        if any(
            view.get(f"fsdp_config.{key}") is not None
            for key in ("reshard_after_forward", "fsdp_reshard_after_forward")
        ):
            return dropped("fsdp_config.reshard_after_forward sets the stage")
        return changed(row.to, 3, "FSDP shards parameters, gradients and optimizer states, as ZeRO 3")
    stage = next((_STAGES[word] for word in words if word in _STAGES), None)
    if stage is None:
        return needed(f"{value!r} has no counterpart: ZeRO shards over all replicas; choose zero.stage", row.to)
    parts = ("offload_param", "offload_optimizer") if stage == _WHOLE else ("offload_optimizer",)
    also = {f"zero.{part}.device": "cpu" for part in parts if "offload" in words and stage > 0}
    return changed(row.to, stage, f"FSDP's {words[0]!r} shards as ZeRO {stage}", also)


def reshard(value: object, view: View, row: Row) -> Outcome:
    """Convert FSDP 2's switch that frees parameters after the forward."""
    if isinstance(value, bool):
        stage = 3 if value else 2
        return changed(row.to, stage, f"reshard_after_forward={value} shards as ZeRO {stage}")
    return sharding(value, view, row)


def _stage_of_fsdp(view: View) -> int:
    """Return the stage of ZeRO that FSDP's keys stand for; FSDP shards everything without them."""
    keys = [
        f"fsdp_config.{prefix}{name}"
        for name in ("reshard_after_forward", "sharding_strategy")
        for prefix in ("", "fsdp_")
    ]
    for value in (view.get(key) for key in (*keys, "fsdp")):
        if value is False:
            return 2
        words = str(value if not isinstance(value, list) else " ".join(map(str, value))).lower().split()
        stage = next((_STAGES[word] for word in words if word in _STAGES), None)
        if stage is not None:
            return stage
    return _WHOLE


def offloaded(value: object, view: View, row: Row) -> Outcome:
    """Convert the switch of FSDP's offloading; below stage 3 ZeRO has only the optimizer to offload."""
    if value is not True:
        return dropped("off")
    stage = _stage_of_fsdp(view)
    if stage == 0:
        return needed("without shards ZeRO offloads nothing: choose zero.stage, or leave it out", "zero")
    if stage < _WHOLE:
        why = f"ZeRO {stage} offloads the optimizer; each rank keeps its parameters"
        return changed("zero.offload_optimizer.device", "cpu", why)
    why = "FSDP offloads parameters, gradients and optimizer"
    return changed(row.to, "cpu", why, {"zero.offload_optimizer.device": "cpu"})


def device(value: object, view: View, row: Row) -> Outcome:
    """Convert the device of ZeRO's offloading."""
    return dropped("no offloading") if value == "none" else row.as_is(value)


def checkpointing(value: object, view: View, row: Row) -> Outcome:
    """Convert the switch of activation checkpointing."""
    if value in (True, "true"):
        return _recomputed(view, row)
    return dropped("off") if value in (False, "false") else needed(f"{value!r}: choose activation_checkpoint", row.to)


def _recomputed(view: View, row: Row) -> Outcome:
    """Convert the switch that is on, with transformers' keyword arguments: interval and offloading."""
    given: dict[str, Any] = {}
    for section in ("gradient_checkpointing_kwargs", "activation_checkpointing_kwargs"):
        given |= {key: view.get(f"{section}.{key}", given.get(key)) for key in ("every_n_layers", "offload")}
    interval = given["every_n_layers"] or 1
    if given["offload"]:
        also = {"activation_checkpoint.offload": True}
        return changed("activation_checkpoint.interval", interval, "its inputs are kept in host memory", also)
    why = "each block is recomputed" if interval == 1 else "every_n_layers: one segment of so many layers is recomputed"
    return changed(row.to, interval, why)


def of_fsdp(value: object, view: View, row: Row) -> Outcome:
    """Convert a key of fsdp_config, which Trainer reads only if `fsdp` is on; the row's argument is a conversion."""
    if view.value("fsdp") in _NOTHING:
        return dropped("fsdp is off, so Trainer does not read it")
    return _PLUGIN[row.argument](value, view, row._replace(argument=""))


def compiled(value: object, view: View, row: Row) -> Outcome:
    """Keep a setting of torch.compile, which changes no result; dslpar's layers do not compile at ZeRO 3 (ZER110)."""
    stage = view.value("deepspeed.zero_optimization.stage")
    is_fsdp = (
        view.value("fsdp") not in _NOTHING or view.value("fsdp_version") is not None
    )  # Axolotl's FSDP 2 has no fsdp
    if value and (_stage_of_fsdp(view) if stage is None and is_fsdp else stage) == _WHOLE:
        return dropped("dslpar compiles no layers at ZeRO 3, which gathers weights between their operations")
    return row.as_is(value)


def named_file(value: object, view: View, row: Row) -> Outcome:
    """Ask for the keys of a JSON file that a section names in place of its keys."""
    return needed(f"the keys of {value!r} are not read: write them here", "zero")


def shards(value: object, view: View, row: Row) -> Outcome:
    """Convert the number of FSDP's shards: above 1 it is ZeRO, unless FSDP's own keys set another stage."""
    if value in (0, 1, -1):
        return dropped(f"{value} means none")
    return dropped(row.why, {"zero.stage": 3})


def replicas(value: object, view: View, row: Row) -> Outcome:
    """Drop the number of replicas of HSDP; with shards beside them, in the row's argument, the author is needed."""
    if value in (0, 1, -1) or view.value(row.argument) in (None, 1, -1):
        return dropped(row.why)
    return needed("HSDP shards within replicas: dslpar's ZeRO shards over all of them; leave it out", "zero.stage")


def size(value: object, view: View, row: Row) -> Outcome:
    """Convert the size of a group; 1, or -1, means none."""
    return dropped(f"{value} means none") if value in (0, 1, -1) else row.as_is(value)


def implied_size(value: object, view: View, row: Row) -> Outcome:
    """Convert a group's size. The row's argument is a dict of further keys that it implies."""
    if value in (0, 1, -1):
        return dropped(f"{value} means none")
    section = row.to.rpartition(".")[0]
    also = {f"{section}.{key}": item for key, item in ast.literal_eval(row.argument).items()}
    return changed(row.to, value, "only dslpar's layers are partitioned", also)


def off(value: object, view: View, row: Row) -> Outcome:
    """Drop a feature that is off; a feature that dslpar lacks needs the author."""
    return dropped("off") if value in _NOTHING else needed(row.argument or row.why, row.to)


def unless_default(value: object, view: View, row: Row) -> Outcome:
    """Drop a value that is the framework's default, or off where the default is off; any other needs the author.

    The row's argument is the text for the author (without one, the row's reason), or "of KEY: TEXT": the framework
    reads the value only if KEY is on.
    """
    text = row.argument or row.why
    if text.startswith("of "):
        switch, _, rest = text.removeprefix("of ").partition(": ")
        if rest and " " not in switch:
            if view.value(switch) in _NOTHING:
                return dropped(f"{switch} is off, so it is not read")
            text = rest
    default = view.defaults.get(row.pattern)
    if value == default:
        return dropped("the default")
    return dropped("off") if value in _NOTHING and default in _NOTHING else needed(text, row.to)


def loss_type(value: object, view: View, row: Row) -> Outcome:
    """Drop the names of the cross entropy in TRL's SFTConfig; any other loss needs the author."""
    return dropped("the cross entropy of tokens") if value in ("nll", "chunked_nll") else needed(row.why)


def same_seed(value: object, view: View, row: Row) -> Outcome:
    """Drop the seed of the data's order if it is that of the run."""
    return dropped("train.seed has it") if value == view.value("seed") else needed(row.why, row.to)


def resumed(value: object, view: View, row: Row) -> Outcome:
    """Drop the switch of resuming; a checkpoint's folder needs the author, since dslpar reads its own only."""
    if isinstance(value, str) and value.lower() not in ("true", "false", "auto", "latest"):
        return needed(f"dslpar does not read this checkpoint: choose model.pretrained with the weights of {value!r}")
    return dropped(row.why)


def half_backend(value: object, view: View, row: Row) -> Outcome:
    """Drop the names of PyTorch's own half precision, and Apex's O1, which is its default."""
    return dropped("PyTorch's own") if value in ("auto", "amp", "cuda_amp", "O1") else needed(row.why, row.to)


_WEIGHTS = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32", "float": "fp32"}


def weights_dtype(value: object, view: View, row: Row) -> Outcome:
    """Convert the type that weights are loaded in, unless a switch of half precision is on."""
    if view.value("bf16") is True or view.value("fp16") is True:
        return dropped("bf16 or fp16 sets precision.dtype")
    made = _WEIGHTS.get(str(value).rpartition(".")[2])
    if made == "fp32":
        return dropped("fp32 is the default")
    if made is None:
        return needed(f"{value!r}: choose precision.dtype", row.to)
    return changed(row.to, made, f"the weights' {value!r}")


@number
def eval_fraction(value: float, view: View, row: Row) -> Outcome:
    """Keep a share of the data for evaluation; a number of samples needs the author."""
    if value == 0:
        return dropped("no data are held out")
    return row.as_is(value) if value < 1 else needed(f"{value:g} samples: choose a share of the data", row.to)


def report_to(value: object, view: View, row: Row) -> Outcome:
    """Convert Trainer's list of trackers to switches of monitors."""
    names = value if isinstance(value, list) else [value]
    also = {f"monitor.{name}.enabled": True for name in names if name in ("wandb", "tensorboard")}
    return dropped("its trackers are sections of `monitor`", also)


_PLUGIN = {
    function.__name__: function
    for function in (
        zero_stage,
        device,
        clip,
        sharding,
        reshard,
        offloaded,
        checkpointing,
        size,
        named_file,
        unless_default,
    )
}
