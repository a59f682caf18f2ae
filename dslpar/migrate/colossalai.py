"""ColossalAI's legacy configs (before 0.3's plugins), key by key; sizes of its GPTs from titans 0.0.7."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dslpar.language.tree import Reference
from dslpar.migrate.rows import (
    Make,
    Outcome,
    Row,
    Table,
    View,
    ask,
    change,
    changed,
    drop,
    dropped,
    expected,
    needed,
    numeric,
    on,
    only,
    power_of_two,
    rename,
    same,
)
from dslpar.schema import deepspeed_policy
from dslpar.schema.classes import IDLE_HANDLERS

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
}
"""Layers, hidden size and heads, by name."""
_FOREIGN = ("colossalai.", "titans.", "model_zoo.")
_OURS = ("GPT", "dslpar.models.GPT")


def gpt(target: str) -> Mapping[str, Any] | None:
    """The fields of dslpar's GPT for one of titans' functions, or for titans' class itself."""
    package, _, name = target.rpartition(".")
    if package and not package.startswith(("titans", "model_zoo")):
        return None
    if name == "GPT" and package:
        return _BASE | {"num_layers": 12, "hidden_size": 768, "num_heads": 12}
    sizes = _SIZES.get(name)
    return None if sizes is None else dict(zip(("num_layers", "hidden_size", "num_heads"), sizes, strict=True)) | _BASE


def _is_gpt(model: str) -> bool:
    return model in _OURS or gpt(model) is not None


# The model --------------------------------------------------------------------------------------------------------


def _model_type(value: Any, view: View) -> Outcome:
    name = str(value)
    if name in _OURS:
        return Outcome("kept", "model.type", "GPT")
    fields = gpt(name)
    if fields is not None:
        also = {f"model.{field}": value for field, value in fields.items()}
        return changed("model.type", "GPT", f"{name.rpartition('.')[2]} is titans' GPT, with these sizes", also)
    if "." in name and not name.startswith(_FOREIGN):
        why = "dslpar builds it if it is a class, a torch.nn.Module over dslpar.layers; a function becomes a class"
        return changed("model.type", name, why)
    return needed(f"{name!r} is no model that dslpar has", "model")


def _model_name(value: Any, view: View) -> Any:
    """A model that is a name alone."""
    made = _model_type(value, view)
    if made.fate == "kept":
        return changed("model.type", made.value, "a name alone is no section")
    return made


def _model_rest(value: Any, view: View) -> Outcome:
    return dropped("its model is one that dslpar does not have")


def _has_own(model: str) -> bool:
    """Whether dslpar takes the arguments of the model's class as they are."""
    return model in _OURS or ("." in model and not model.startswith(_FOREIGN))


def _argument(name: str) -> Any:
    """An argument of a class: titans' GPT has a counterpart or not; other classes take it as it is."""

    def make(value: Any, view: View) -> Outcome:
        if gpt(view.model) is not None:
            made: Outcome = _GPT_ARGUMENTS[name](value, view)
            return made
        if _has_own(view.model):
            return Outcome("kept", f"model.{name}", value)
        return _model_rest(value, view)

    return make


def _other_argument(value: Any, view: View) -> Outcome:
    """An argument that is none of titans' GPT's."""
    if gpt(view.model) is not None:
        return needed("titans' GPT has no such argument")
    if _has_own(view.model):
        return Outcome("kept", "model.**", value)
    return _model_rest(value, view)


def _to_field(name: str) -> Any:
    """A size of titans' GPT under dslpar's name for it."""
    to = _FIELDS.get(name, name)

    def make(value: Any, view: View) -> Outcome:
        return Outcome("kept" if to == name else "renamed", f"model.{to}", value)

    return make


def _ratio(value: Any, view: View) -> Outcome:
    hidden = view.get("model.hidden_size", (gpt(view.model) or {}).get("hidden_size", 0))
    if type(hidden) is not int:
        return needed(f"mlp_ratio times hidden_size, which is {hidden!r}", "model.ffn_hidden_size")
    return changed("model.ffn_hidden_size", int(value * hidden), "mlp_ratio times hidden_size")


def _one_dropout(value: Any, view: View) -> Outcome:
    """titans has three probabilities, 0.1 each unless said; dslpar has one."""
    names = ("dropout", "embedding_dropout", "attention_dropout")
    all_three = [view.get(f"model.{name}", 0.1) for name in names]
    if any(item != value for item in all_three):
        message = f"dslpar has one dropout, and the source three that differ: {all_three} for {', '.join(names)}"
        return needed(message, "model.dropout")
    return Outcome("changed", "model.dropout", value, "one probability for embedding, attention and outputs")


_FIELDS = {
    "depth": "num_layers",
    "max_position_embeddings": "max_seq_len",
    "layernorm_epsilon": "layernorm_eps",
    "mlp_ratio": "ffn_hidden_size",
    "embedding_dropout": "dropout",
    "attention_dropout": "dropout",
}
"""Fields of dslpar's GPT by titans' arguments, where the names differ."""
_SAME = (
    "num_layers",
    "depth",
    "hidden_size",
    "num_heads",
    "vocab_size",
    "max_position_embeddings",
    "layernorm_epsilon",
    "bias",
)
_GPT_ARGUMENTS: Mapping[str, Any] = {
    **{name: _to_field(name) for name in _SAME},
    "mlp_ratio": numeric("model.ffn_hidden_size", _ratio),
    "dropout": _one_dropout,
    "embedding_dropout": _one_dropout,
    "attention_dropout": _one_dropout,
    "padding_idx": lambda value, view: dropped("dslpar's token table has no row that stays zero"),
    "fuse_scale_mask_softmax": lambda value, view: dropped("kernels are chosen by dslpar's layers"),
    "activation": lambda value, view: needed("dslpar's GPT has 'gelu' and 'swiglu'", "model.activation"),
    "apply_post_layernorm": lambda value, view: (
        dropped("dslpar's GPT is pre-norm") if not value else needed("dslpar's GPT is pre-norm, this one post-norm")
    ),
    "activation_offload": lambda value, view: (
        dropped("off") if not value else needed("dslpar does not offload activations", "activation_checkpoint")
    ),
}


def _size(field: str) -> Any:
    """HIDDEN_SIZE and its kin: only a script knows which model they are of."""

    def make(value: Any, view: View) -> Outcome:
        if not view.model:
            return needed("a size of the model that the script builds: write it into model", f"model.{field}")
        return dropped("the sizes of the model count" if _is_gpt(view.model) else "the model's class has it")

    return make


# The batch and the run --------------------------------------------------------------------------------------------


def _stages(view: View) -> Any:
    return view.any_of("parallel.pipeline.size", "parallel.pipeline") or 1


def _pieces_of(view: View) -> Any:
    """How many micro-batches a pipeline's schedule makes of a batch; 1 without a pipeline."""
    return 1 if _stages(view) == 1 else view.any_of("NUM_MICRO_BATCHES", "schedule.num_microbatches") or 1


def _micro(value: Any, view: View) -> Any:
    """BATCH_SIZE is of one data rank; the pipeline's schedule cuts it into NUM_MICRO_BATCHES."""
    pieces = _pieces_of(view)
    if pieces == 1:
        return Outcome("renamed", "batch.micro_size", value, "samples of one data rank, in both")
    if not isinstance(value, int) or not isinstance(pieces, int) or pieces < 1 or value % pieces:
        return needed(f"it must be NUM_MICRO_BATCHES = {pieces!r} times a whole number", "batch.micro_size")
    return value // pieces


def _accumulation(value: Any, view: View) -> Any:
    pieces, steps = _pieces_of(view), view.get("gradient_accumulation", 1)
    if type(pieces) is not int or type(steps) is not int:
        return needed("it is no whole number", "batch.accumulation")
    if value == 1 and pieces * steps > 1:
        return dropped("1: batch.accumulation is gradient_accumulation times NUM_MICRO_BATCHES")
    if pieces == 1 or steps == 1:
        return Outcome("renamed", "batch.accumulation", value, "micro-batches of one step")
    why = f"{pieces} micro-batches in flight times gradient_accumulation {steps}: micro-batches of one step"
    return changed("batch.accumulation", pieces * steps, why)


def _pieces(value: Any, view: View) -> Any:
    if _stages(view) == 1:
        return dropped("it cuts a pipeline's batch, and there is no pipeline")
    return _accumulation(value, view)


def _clip(value: Any, view: View) -> Any:
    if value == 0:
        return dropped("0 is off, as is leaving it out")
    return Outcome("renamed", "train.clip_grad_norm", value)


def _unless_said(to: str, key: str) -> Any:
    """A variable that stands for `key` where the source has no such key of its own."""

    def make(value: Any, view: View) -> Outcome:
        if view.get(key) is not None:
            return dropped(f"{key} says it")
        return Outcome("renamed", to, value)

    return make


_EPOCHS = "dslpar counts optimizer steps: one epoch is (samples of the data) / batch.global_size of them"
_OF_EPOCHS = ("NUM_EPOCHS", "num_epochs", "WARMUP_EPOCHS")


def _by_epoch(to: str, said_by: str = "") -> Make:
    """A number of epochs: so many times the whole global batches of the data."""

    def make(value: Any, view: View) -> Outcome:
        if said_by and view.get(said_by) is not None and not _in_epochs(said_by, view):
            return dropped(f"{said_by} says it")
        if view.epoch is None:
            return needed(f"{_EPOCHS}; --num-samples N tells", to)
        samples, size = view.epoch
        steps = value * (samples // size) if type(value) is int else 0
        if steps < 1:
            return needed(f"{value!r} epochs of {samples} samples, {size} a step, are no number of steps", to)
        return changed(to, steps, f"{value} epochs of {samples} samples // {size} a step")

    return make


def _in_epochs(key: str, view: View) -> bool:
    """Whether a key of the schedule is given by a name that counts epochs, and so counts them too."""
    return any(name in view.used and view.get(name) == view.get(key) for name in _OF_EPOCHS)


def _of_schedule(key: str, to: str) -> Make:
    """Steps of a schedule, unless they are epochs, of which NUM_EPOCHS and WARMUP_EPOCHS tell."""

    def make(value: Any, view: View) -> Outcome:
        if _in_epochs(key, view):
            return dropped("it is counted in epochs here: NUM_EPOCHS and WARMUP_EPOCHS say what becomes of them")
        if to == key and _in_epochs("lr_scheduler.total_steps", view):  # so the warm-up is in epochs too
            made: Outcome = _by_epoch(to)(value, view)
            return made
        return Outcome("kept" if to == key else "renamed", to, value)

    return make


def _fraction(value: Any, view: View) -> Outcome:
    to = "lr_scheduler.warmup_steps"
    if view.get(to) is not None:
        return dropped(f"{to} says it")
    total = view.any_of("TRAIN_ITERS", "lr_scheduler.total_steps")
    if type(total) is not int or _in_epochs("lr_scheduler.total_steps", view):
        return needed("dslpar counts steps of warm-up: this fraction of train.steps", to)
    return changed(to, int(value * total), f"{value} * {total} steps")


# Precision and ZeRO -----------------------------------------------------------------------------------------------

_MODES = {
    "NAIVE": "the whole model in fp16 with a dynamic loss scale: DeepSpeed's fp16",
    "TORCH": "torch's autocast kept norms and losses in fp32; DeepSpeed's fp16 holds the whole model in fp16",
    "APEX": "apex chose types by opt_level; DeepSpeed's fp16 holds the whole model in fp16",
}


def _mode(value: Any, view: View) -> Any:
    name = str(value).rpartition(".")[2].upper()
    if name not in _MODES:
        return needed(f"no AMP_TYPE is {str(value)!r}", "precision.dtype")
    return changed("precision.dtype", "fp16", _MODES[name])


def _scale(value: Any, view: View) -> Any:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return Outcome("renamed", "precision.loss_scale", value)
    return dropped("a dynamic loss scale is DeepSpeed's default")


def _placement(value: Any, view: View) -> Any:
    if value == "cuda":
        return dropped("on the device, as is leaving it out")._replace(also=_SHARDED)
    if value == "cpu":
        also = {"zero.offload_optimizer.device": "cpu", **_SHARDED}
        return changed("zero.offload_param.device", "cpu", "parameters, and the optimizer with them", also)
    why = "no tensor moves by itself: zero.offload_optimizer and zero.offload_param say what lies on the CPU"
    return Outcome("changed", "", None, why, _SHARDED)


_SHARDED = {"zero.stage": 3, "precision.dtype": "fp16"}
"""What `zero.model_config` implies, whatever stands in it."""


def _sharded(value: Any, view: View) -> Outcome:
    """A model whose parameters are cut, in fp16."""
    why = "a sharded model is ZeRO 3, in fp16; how a tensor is cut is DeepSpeed's"
    return changed("zero.stage", 3, why, {"precision.dtype": "fp16"})


def _offload_pipeline(value: Any, view: View) -> Any:
    also = {"zero.offload_optimizer.pipeline_write": value}
    return changed("zero.offload_optimizer.pipeline_read", value, "reading and writing are two keys", also)


def _bucket(value: Any, view: View) -> Any:
    return int(value * 2**20) // 2


def _scaling(prefix: str) -> tuple[Row, ...]:
    """The keys of a loss scale: fp16's in ColossalAI, or of zero.optimizer_config."""
    fixed = "DeepSpeed doubles and halves the scale"
    return (
        *(
            change(f"{prefix}.{name}", "precision.initial_scale_power", "its logarithm to base 2", power_of_two)
            for name in ("initial_scale", "init_scale")
        ),
        same(f"{prefix}.growth_interval", "precision.loss_scale_window"),
        same(f"{prefix}.hysteresis", "precision.hysteresis"),
        same(f"{prefix}.min_scale", "precision.min_loss_scale"),
        only(f"{prefix}.growth_factor", 2, fixed, "DeepSpeed doubles the scale: no other factor"),
        only(f"{prefix}.backoff_factor", 0.5, fixed, "DeepSpeed halves the scale: no other factor"),
        drop(f"{prefix}.max_scale", "DeepSpeed's scale has no upper bound"),
    )


# Optimizer, schedule, handlers ------------------------------------------------------------------------------------

_OPTIMIZERS = {
    "HybridAdam": ("AdamW", "HybridAdam decays as AdamW does; where it runs follows from zero.offload_optimizer"),
    "CPUAdam": ("AdamW", "CPUAdam decays as AdamW does; where it runs follows from zero.offload_optimizer"),
    "FusedAdam": ("AdamW", "FusedAdam decays as AdamW does"),
    "FusedSGD": ("SGD", "the same steps, unfused"),
    "FusedLAMB": ("Lamb", "DeepSpeed's LAMB"),
    "Lamb": ("Lamb", "DeepSpeed's LAMB"),
}


_ADAMS = ("HybridAdam", "CPUAdam", "FusedAdam")
"""Adams of ColossalAI's own, whose arguments DeepSpeed's have not."""


def _of_their_adam(name: str, right: Any, why: str, otherwise: str) -> Row:
    """An argument of one of them; other optimizers take theirs as they are."""
    key, told = f"optimizer.{name}", expected(right, why, otherwise)

    def make(value: Any, view: View) -> Outcome:
        theirs = str(view.get("optimizer.type", "")).rpartition(".")[2] in _ADAMS
        made: Outcome = told(value, view) if theirs else Outcome("kept", key, value)
        return made

    return drop(key, f"{why} ({right!r}); of other optimizers it stays")._replace(make=make, unread=False)


def _no_name(to: str, value: Any) -> Outcome:
    return needed(f"{value!r} is the name of no class", to)


def _optimizer(value: Any, view: View) -> Any:
    if not isinstance(value, (str, Reference)) or not str(value):
        return _no_name("optimizer.type", value)
    package, _, name = str(value).rpartition(".")
    if name in _OPTIMIZERS and not package.startswith("torch"):
        if name in _ADAMS and view.get("optimizer.adamw_mode", True) is False:
            return changed("optimizer.type", "Adam", f"{name} with adamw_mode=False is Adam, its decay in the gradient")
        return changed("optimizer.type", *_OPTIMIZERS[name])
    if package.startswith("colossalai"):
        return needed(f"dslpar has no {name}", "optimizer.type")
    return Outcome("kept", "optimizer.type", name if package.startswith("torch.optim") else str(value))


_SCHEDULES = {
    "CosineAnnealingWarmupLR": "cosine",
    "CosineAnnealingLR": "cosine",
    "LinearWarmupLR": "linear",
}


def _schedule(value: Any, view: View) -> Any:
    if not isinstance(value, (str, Reference)) or not str(value):
        return _no_name("lr_scheduler.type", value)
    package, _, name = str(value).rpartition(".")
    if name in _SCHEDULES and not package.startswith("torch"):
        return changed("lr_scheduler.type", _SCHEDULES[name], f"{name}, by dslpar's name; steps are optimizer steps")
    if package.startswith("colossalai"):
        return needed(f"dslpar has no {name}", "lr_scheduler.type")
    return Outcome("kept", "lr_scheduler.type", name if package.startswith("torch.optim") else str(value))


def _handlers(value: Any, view: View) -> Any:
    """Those whose work DeepSpeed does are left out."""
    items = list(value) if isinstance(value, (list, tuple)) else [value]
    names = [str(item.get("type")).rpartition(".")[2] if isinstance(item, dict) else "" for item in items]
    left = [item for item, name in zip(items, names, strict=True) if name not in IDLE_HANDLERS]
    idle = "; ".join(f"{name}: {IDLE_HANDLERS[name]}" for name in names if name in IDLE_HANDLERS)
    if not left:
        return dropped(idle or "an empty list is as none")
    return changed("gradient_handler", left, idle) if idle else Outcome("kept", "gradient_handler", value)


def _of_titans(name: str) -> Row:
    """The row of an argument of titans' GPT, which another class's may be too."""
    why = "an argument of titans' GPT; of a class of the author's own it stays"
    if name in ("padding_idx", "fuse_scale_mask_softmax", "apply_post_layernorm", "activation_offload"):
        return drop(f"model.{name}", why)._replace(make=_argument(name))
    if name in ("mlp_ratio", "dropout", "embedding_dropout", "attention_dropout", "activation"):
        return change(f"model.{name}", f"model.{_FIELDS.get(name, name)}", why, _argument(name))
    return rename(f"model.{name}", f"model.{_FIELDS.get(name, name)}", why, _argument(name))


ROWS: tuple[Row, ...] = (
    same("parallel.data.size"),
    same("parallel.data"),
    same("parallel.pipeline.size"),
    same("parallel.pipeline"),
    same("parallel.tensor"),
    same("parallel.tensor.**", among=("size", "mode", "depth", "kwargs", "shape", "sequence", "impl", "keep")),
    change("model.type", "model.type", "titans' GPTs become dslpar's, with their sizes; a class stays", _model_type),
    change("model", "model.type", "a name alone becomes model.type", _model_name),
    change(
        "model.checkpoint",
        "activation_checkpoint",
        "True: each layer",
        on("activation_checkpoint", 1, "each layer's input is stored, the rest computed again", "off"),
    ),
    drop("model.dtype", "precision says it"),
    only("model.num_chunks", 1, "one run of layers on each stage", "the interleaved schedule is not there yet"),
    *(_of_titans(name) for name in _GPT_ARGUMENTS),
    rename(
        "model.**",
        "model.**",
        "an argument of a class of the author's own stays; of others it is dropped",
        _other_argument,
    ),
    same("data.**"),
    rename("optimizer.type", "optimizer.type", "torch's and DeepSpeed's names stay", _optimizer),
    drop("optimizer.adamw_mode", "optimizer.type says it: AdamW, or Adam where it is False"),
    _of_their_adam(
        "bias_correction", True, "torch's Adam always corrects", "torch's Adam always corrects, and this one does not"
    ),
    _of_their_adam("nvme_offload_fraction", 0.0, "nothing on NVMe", "offload to NVMe is not there yet"),
    _of_their_adam("nvme_offload_dir", "", "nothing on NVMe", "offload to NVMe is not there yet"),
    same("optimizer.**"),
    rename(
        "LEARNING_RATE", "optimizer.lr", "unless optimizer.lr says it", _unless_said("optimizer.lr", "optimizer.lr")
    ),
    rename("LR", "optimizer.lr", "unless optimizer.lr says it", _unless_said("optimizer.lr", "optimizer.lr")),
    rename(
        "WEIGHT_DECAY",
        "optimizer.weight_decay",
        "unless optimizer.weight_decay says it",
        _unless_said("optimizer.weight_decay", "optimizer.weight_decay"),
    ),
    rename("lr_scheduler.type", "lr_scheduler.type", "ColossalAI's become dslpar's; torch's names stay", _schedule),
    rename(
        "lr_scheduler.warmup_steps",
        "lr_scheduler.warmup_steps",
        "steps are optimizer steps",
        _of_schedule("lr_scheduler.warmup_steps", "lr_scheduler.warmup_steps"),
    ),
    rename(
        "lr_scheduler.total_steps",
        "train.steps",
        "steps are optimizer steps, unless it is NUM_EPOCHS",
        _of_schedule("lr_scheduler.total_steps", "train.steps"),
    ),
    same("lr_scheduler.eta_min", "lr_scheduler.min_lr"),
    same("lr_scheduler.**"),
    same("MIN_LR", "lr_scheduler.min_lr"),
    ask("WARMUP_EPOCHS", "lr_scheduler.warmup_steps", _EPOCHS)._replace(
        make=_by_epoch("lr_scheduler.warmup_steps", "lr_scheduler.warmup_steps")
    ),
    change(
        "WARMUP_FRACTION",
        "lr_scheduler.warmup_steps",
        "times TRAIN_ITERS or lr_scheduler.total_steps; without them it needs you",
        numeric("lr_scheduler.warmup_steps", _fraction),
    ),
    rename("zero.level", "zero.stage", "ZeRO's stage", lambda value, view: Outcome("renamed", "zero.stage", value)),
    change(
        "zero.cpu_offload",
        "zero.offload_optimizer.device",
        "True: 'cpu'",
        on("zero.offload_optimizer.device", "cpu", "the optimizer's state and step", "off"),
    ),
    change(
        "zero.offload_optimizer_config.pipeline",
        "zero.offload_optimizer.pipeline_read",
        "reading and writing are two keys",
        _offload_pipeline,
    ),
    same(
        "zero.offload_optimizer_config.**", "zero.offload_optimizer.**", among=tuple(deepspeed_policy.OFFLOAD_OPTIMIZER)
    ),
    same("zero.offload_param_config.**", "zero.offload_param.**", among=tuple(deepspeed_policy.OFFLOAD_PARAM)),
    same("zero.aio_config.**", "deepspeed.aio.**"),
    rename("zero.clip_grad", "train.clip_grad_norm", "0 is off", _clip),
    only("zero.dynamic_loss_scale", True, "DeepSpeed's default", "write precision.loss_scale, a number"),
    same("zero.static_loss_scale", "precision.loss_scale"),
    drop("zero.verbose", "DeepSpeed logs by deepspeed.log_level"),
    same("zero.stage"),
    same("zero.**", among=tuple(deepspeed_policy.ZERO)),
    change(
        "zero.model_config.shard_strategy",
        "zero.stage",
        "a sharded model is ZeRO 3; how a tensor is cut is DeepSpeed's",
        _sharded,
        unread=True,
    ),
    change(
        "zero.model_config.tensor_placement_policy",
        "zero.offload_param.device",
        "'cuda' is dropped, 'auto' has no counterpart",
        _placement,
    ),
    change(
        "zero.model_config.offload_config.device",
        "zero.offload_param.device",
        "'cpu'; 'auto' has no counterpart",
        _placement,
    ),
    change(
        "zero.model_config.reduce_scatter_bucket_size_mb",
        "zero.reduce_bucket_size",
        "MiB of fp16 to elements",
        numeric("zero.reduce_bucket_size", _bucket),
    ),
    only(
        "zero.model_config.fp32_reduce_scatter",
        False,
        "gradients are summed in their own type",
        "deepspeed = dict(communication_data_type='fp32')",
    ),
    only(
        "zero.model_config.gradient_predivide_factor",
        1.0,
        "nothing is divided before the sum",
        "deepspeed = dict(prescale_gradients=True, gradient_predivide_factor=...)",
    ),
    drop("zero.model_config.reuse_fp16_shard", "DeepSpeed keeps gradients in a partition of their own"),
    drop(
        "zero.optimizer_config.gpu_margin_mem_ratio",
        "it steers tensor_placement_policy='auto', which DeepSpeed has not",
    ),
    change(
        "zero.optimizer_config.cpu_offload",
        "zero.offload_optimizer.device",
        "True: 'cpu'",
        on("zero.offload_optimizer.device", "cpu", "the optimizer's state and step", "off"),
    ),
    *_scaling("zero.optimizer_config"),
    change("fp16.mode", "precision.dtype", "every AMP_TYPE becomes DeepSpeed's fp16", _mode),
    *_scaling("fp16"),
    rename("fp16.loss_scale", "precision.loss_scale", "'dynamic' is the default", _scale),
    drop("fp16.opt_level", "apex's choice of types; DeepSpeed's fp16 holds the whole model in fp16"),
    drop("fp16.log_num_zeros_in_grad", "a log line without counterpart"),
    drop("fp16.verbose", "DeepSpeed logs by deepspeed.log_level"),
    only("fp16.enabled", True, "fp16.mode says it", "leave fp16 out"),
    change("BATCH_SIZE", "batch.micro_size", "of one data rank; a pipeline's is divided by NUM_MICRO_BATCHES", _micro),
    same("GLOBAL_BATCH_SIZE", "batch.global_size"),
    rename("gradient_accumulation", "batch.accumulation", "with a pipeline, times NUM_MICRO_BATCHES", _accumulation),
    rename(
        "NUM_MICRO_BATCHES",
        "batch.accumulation",
        "micro-batches in flight; without a pipeline it had no effect",
        _pieces,
    ),
    rename("clip_grad_norm", "train.clip_grad_norm", "0 is off", _clip),
    same("seed", "train.seed"),
    same("SEED", "train.seed"),
    same("TRAIN_ITERS", "train.steps"),
    drop("DECAY_ITERS", "dslpar's schedules reach their end at the last step"),
    same("EVAL_INTERVAL", "train.eval_interval"),
    same("EVAL_ITERS", "train.eval_steps"),
    *(
        ask(name, "train.steps", _EPOCHS)._replace(make=_by_epoch("train.steps"))
        for name in ("NUM_EPOCHS", "num_epochs")
    ),
    rename("SEQ_LEN", "data.seq_len", "tokens of a sample", lambda value, view: _sequence(value, view)),
    rename("SEQ_LENGTH", "data.seq_len", "tokens of a sample", lambda value, view: _sequence(value, view)),
    change("LOG_PATH", "train.output_dir", "the log, and all else that a run writes", lambda value, view: value),
    rename("gradient_handler", "gradient_handler", "those whose work DeepSpeed does are dropped", _handlers),
    rename("schedule.num_microbatches", "batch.accumulation", "as NUM_MICRO_BATCHES", _pieces),
    drop("schedule.tensor_shape", "stages tell each other the shapes of what they send"),
    *(
        change(name, f"model.{field}", "without a model it needs you; else the sizes of the model count", _size(field))
        for name, field in (
            ("HIDDEN_SIZE", "hidden_size"),
            ("DEPTH", "num_layers"),
            ("NUM_LAYERS", "num_layers"),
            ("NUM_HEADS", "num_heads"),
            ("NUM_ATTENTION_HEADS", "num_heads"),
            ("VOCAB_SIZE", "vocab_size"),
            ("MLP_RATIO", "ffn_hidden_size"),
        )
    ),
    drop("TENSOR_SHAPE", "stages tell each other the shapes of what they send"),
    drop("loss.**", "dslpar's GPT has its loss; a program gives criterion= to dslpar.initialize"),
    drop("loss_fn.**", "dslpar's GPT has its loss; a program gives criterion= to dslpar.initialize"),
    drop("train_data.**", "data is the section `data`, or a program's: dslpar.initialize(train_data=...)"),
    drop("test_data.**", "data is the section `data`, or a program's"),
    drop("dali.**", "data is the section `data`, or a program's"),
    drop("cudnn_benchmark", "a switch of torch.backends.cudnn: a program sets it"),
    drop("cudnn_deterministic", "a switch of torch.backends.cudnn: a program sets it"),
    drop("logging.**", "dslpar writes log.txt and metrics.jsonl to train.output_dir"),
    drop("tensorboard.**", "monitor = dict(tensorboard=True) writes what a step has to say"),
    drop("hooks", "dslpar has no hooks; monitor, train.save_interval and train.eval_interval do their work"),
    drop("find_unused_parameters", "DeepSpeed finds them by itself: zero.ignore_unused_parameters"),
)


def _sequence(value: Any, view: View) -> Any:
    """Of a model of texts; a picture's patches are no tokens of the section data."""
    if not _is_gpt(view.model):
        return needed("tokens of a sample, if the model reads text: data.seq_len", "data.seq_len")
    return Outcome("renamed", "data.seq_len", value)


TABLE = Table("colossalai", "ColossalAI", ROWS, own_names=True)
