"""LiBai's configs (`configs/`, `projects/*/configs`), key by key; defaults and formulas as of its last release."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from dslpar.migrate.rows import (
    Outcome,
    Row,
    Table,
    View,
    change,
    changed,
    drop,
    dropped,
    needed,
    numeric,
    on,
    only,
    rename,
    same,
)

_GPTS = ("GPTForPreTraining", "GPTModel")
_LLAMAS = ("LlamaForCausalLM", "LlamaModel")
_LLAMA = {"norm": "rmsnorm", "activation": "swiglu", "positions": "rotary", "bias": False}


def gpt(target: str) -> Mapping[str, Any] | None:
    """The fields of dslpar's GPT that a class of LiBai's stands for, besides its cfg."""
    package, _, name = target.rpartition(".")
    if package == "dslpar.models" and name == "GPT":
        return {}
    if name in _GPTS and package.startswith("libai."):
        return {}
    return _LLAMA if name in _LLAMAS and package.startswith(("projects.", "libai.")) else None


def _target(value: Any, view: View) -> Any:
    name = str(value)
    if name == "dslpar.models.GPT":
        return Outcome("kept", "model.type", "GPT")
    if gpt(name) is None:
        return needed(f"dslpar has no {name.rpartition('.')[2]}, a model of OneFlow's", "model")
    message = "the language-model loss is the GPT's own"
    if gpt(name):
        message = "Llama's blocks are fields of dslpar's GPT: " + ", ".join(f"{k}={v!r}" for k, v in _LLAMA.items())
    return changed("model.type", "GPT", message, {f"model.{key}": value for key, value in (gpt(name) or {}).items()})


def _field(to: str) -> Any:
    """A size of a GPT; other models are not there."""

    def make(value: Any, view: View) -> Any:
        if gpt(view.model) is None:
            return _no_model(value, view)
        return Outcome("renamed", f"model.{to}", value)

    return make


def _no_model(value: Any, view: View) -> Outcome:
    """A key of a model that is no GPT, or whose class was not read."""
    if not view.model:
        return needed("the class of the model was not read: only a GPT's sizes have a place")
    return dropped("its model is one that dslpar does not have")


def _of_model(make: Any) -> Any:
    return lambda value, view: _no_model(value, view) if gpt(view.model) is None else make(value, view)


def _one_dropout(value: Any, view: View) -> Outcome:
    cfg = [view.get(f"model.cfg.{name}") for name in _DROPOUTS]
    message = [value for value in cfg if value is not None]
    if any(item != value for item in message):
        return needed(f"dslpar has one dropout, and the source says {message}", "model.dropout")
    return Outcome("changed", "model.dropout", value, "one probability for embedding, attention and outputs")


_DROPOUTS = (
    "embedding_dropout_prob",
    "attention_dropout_prob",
    "output_dropout_prob",
    "hidden_dropout_prob",
    "attention_probs_dropout_prob",
)
_FIELDS = {
    "num_layers": "num_layers",
    "hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "hidden_size": "hidden_size",
    "ffn_hidden_size": "ffn_hidden_size",
    "intermediate_size": "ffn_hidden_size",
    "vocab_size": "vocab_size",
    "max_seq_length": "max_seq_len",
    "max_position_embeddings": "max_seq_len",
    "layernorm_epsilon": "layernorm_eps",
    "layernorm_eps": "layernorm_eps",
    "rms_norm_eps": "layernorm_eps",
    "initializer_range": "init_std",
    "tie_word_embeddings": "tie_embeddings",
    "rope_theta": "rope_theta",
}
_FUSIONS = (
    "bias_gelu_fusion",
    "bias_dropout_fusion",
    "scale_mask_softmax_fusion",
    "apply_query_key_layer_scaling",
    "amp_enabled",
    "multihead_attn_fusion",
    "dtype",
)
_GENERATION = (
    "is_encoder_decoder",
    "max_length",
    "min_length",
    "do_sample",
    "early_stopping",
    "num_beams",
    "num_beam_groups",
    "diversity_penalty",
    "temperature",
    "top_k",
    "top_p",
    "typical_p",
    "repetition_penalty",
    "length_penalty",
    "no_repeat_ngram_size",
    "encoder_no_repeat_ngram_size",
    "num_return_sequences",
    "chunk_size_feed_forward",
    "output_scores",
    "output_hidden_states",
    "output_attentions",
    "use_cache",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "sep_token_id",
    "decoder_start_token_id",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "use_past",
)


def _only(name: str, right: Any, why: str, otherwise: str) -> Row:
    row = only(f"model.cfg.{name}", right, why, otherwise)
    return row._replace(make=_of_model(row.make))


_MODEL: tuple[Row, ...] = (
    change("model._target_", "model.type", "LiBai's GPT and Llama become dslpar's GPT; other models need you", _target),
    *(
        rename(f"model.cfg.{name}", f"model.{to}", "of LiBai's GPT or Llama", _field(to))
        for name, to in _FIELDS.items()
    ),
    *(
        change(
            f"model.cfg.{name}", "model.dropout", "one probability; three that differ need you", _of_model(_one_dropout)
        )
        for name in _DROPOUTS
    ),
    *(drop(f"model.cfg.{name}", "kernels and types are chosen by dslpar's layers") for name in _FUSIONS),
    *(drop(f"model.cfg.{name}", "for generating text: dslpar trains") for name in _GENERATION),
    change(
        "model.cfg.use_scaled_init_for_output_weights",
        "",
        "dslpar draws every weight with init_std: no scaling of output layers by 1 / sqrt(2 * num_layers)",
        _of_model(
            lambda value, view: (
                dropped("off: all weights by init_std")
                if not value
                else Outcome("changed", "", None, "dslpar draws every weight with init_std, output layers too")
            )
        ),
    ),
    _only(
        "apply_residual_post_layernorm",
        False,
        "dslpar's GPT is pre-norm",
        "dslpar's GPT keeps the residual before the norm",
    ),
    _only("hidden_act", "silu", "swiglu is made of it", "dslpar's GPT has 'gelu' and 'swiglu'"),
    _only("pretraining_tp", 1, "as is leaving it out", "dslpar has no such slices"),
    *(same(f"model.{name}") for name in ("num_layers", "num_heads", "max_seq_len", "hidden_size", "vocab_size")),
    change(
        "model.**",
        "",
        "a key of a model that dslpar does not have; of the GPT's it needs you",
        _of_model(lambda value, view: needed("dslpar's GPT has no such key")),
    ),
)


# The run ----------------------------------------------------------------------------------------------------------


def _of_epochs(view: View) -> int | None:
    """The steps of train_epoch; 0 without it, None where nobody told what an epoch is."""
    epochs = view.get("train.train_epoch", 0)
    if not epochs:
        return 0
    if view.epoch is None or type(epochs) is not int:
        return None
    return math.ceil(view.epoch.samples * epochs / view.epoch.global_size)


def _iters(view: View) -> Any:
    return view.get("train.train_iter", view.get("train.steps", 0))


def _steps(value: Any, view: View) -> Any:
    """LiBai takes the larger of train_iter and train_epoch's steps."""
    by_epochs = _of_epochs(view)
    if by_epochs is None:
        message = "LiBai takes the larger of train_iter and train_epoch's steps, which depend on the data"
        return needed(f"{message}; --num-samples N tells", "train.steps")
    if value == 0:
        return dropped("0: epochs count")
    if by_epochs and type(value) is int and by_epochs >= value:
        return dropped(f"the {by_epochs} steps of train_epoch are as many or more, and LiBai takes the larger")
    return Outcome("renamed", "train.steps", value)


def _epochs(value: Any, view: View) -> Any:
    if not value:
        return dropped("0: train_iter counts")
    steps, iters = _of_epochs(view), _iters(view)
    if steps is None or view.epoch is None:
        message = "dslpar counts steps: one epoch is (samples of the data) / batch.global_size of them"
        return needed(f"{message}; --num-samples N tells", "train.steps")
    if type(iters) is int and iters > steps:
        return dropped(f"its {steps} steps are fewer than train_iter, and LiBai takes the larger")
    samples, size = view.epoch
    return changed("train.steps", steps, f"the ceiling of {value} epochs * {samples} samples / {size} a step")


def _warmup(value: Any, view: View) -> Any:
    """As LiBai's trainer has it: the ceiling of ratio * train_iter."""
    if not value:
        return dropped("no warm-up, as is leaving it out")
    by_epochs, steps = _of_epochs(view), _iters(view)
    if by_epochs is None or type(steps) is not int or not (by_epochs or steps):
        return needed(
            "dslpar counts steps of warm-up, and how many steps there are depends on the data",
            "lr_scheduler.warmup_steps",
        )
    return math.ceil(value * max(steps, by_epochs))


_SCHEDULES = {
    "WarmupCosineLR": ("cosine", "cosine down to min_lr, the warm-up from lr / warmup_steps"),
    "WarmupCosineAnnealingLR": ("cosine", "cosine down to min_lr, the warm-up from lr / warmup_steps"),
    "WarmupPolynomialLR": ("linear", "linear down to min_lr, which is power=1"),
    "WarmupExponentialLR": ("constant", "constant, which is gamma=1"),
    "WarmupStopLR": ("constant", "constant after the warm-up"),
}


def _schedule(value: Any, view: View) -> Any:
    name = str(value).rpartition(".")[2]
    if name not in _SCHEDULES:
        return needed(
            f"dslpar has no {name}: 'constant', 'linear', 'cosine', or torch's and DeepSpeed's names",
            "lr_scheduler.type",
        )
    return changed("lr_scheduler.type", *_SCHEDULES[name])


def _alpha(value: Any, view: View) -> Any:
    """WarmupCosineLR ends at alpha * lr."""
    if "Cosine" not in str(view.get("train.scheduler._target_", "")):
        return dropped("no key of that schedule")
    lr = view.get("optim.lr")
    if not isinstance(lr, (int, float)):
        return needed("the last learning rate is alpha times optim.lr, which is not there", "lr_scheduler.min_lr")
    return value * lr


def _with(switch: str, to: str) -> Any:
    """A key that counts where its switch is on."""

    def make(value: Any, view: View) -> Any:
        return Outcome("renamed", to, value) if view.get(switch) else dropped(f"{switch} is off")

    return make


def _stage(value: Any, view: View) -> Any:
    return (
        Outcome("renamed", "zero.stage", value)
        if view.get("train.zero_optimization.enabled")
        else dropped("not enabled")
    )


def _eval_steps(value: Any, view: View) -> Any:
    if not view.get("train.evaluation.enabled", True):
        return dropped("evaluation is off")
    return Outcome("renamed", "train.eval_steps", value) if type(value) is int else int(value)


_TRAIN: tuple[Row, ...] = (
    same("train.output_dir"),
    same("train.train_micro_batch_size", "batch.micro_size"),
    same("train.global_batch_size", "batch.global_size"),
    same("train.num_accumulation_steps", "batch.accumulation"),
    rename("train.train_iter", "train.steps", "where train_epoch is 0", _steps),
    change("train.train_epoch", "train.steps", "needs you: the number of steps depends on the data", _epochs),
    only("train.train_samples", 0, "train_iter counts", "dslpar counts steps: samples / batch.global_size"),
    drop("train.consumed_train_samples", "a resume finds its position in the checkpoint"),
    drop("train.consumed_valid_samples", "a resume finds its position in the checkpoint"),
    drop("train.start_iter", "--resume finds it in the checkpoint"),
    drop("train.resume", "--resume says it"),
    change(
        "train.warmup_ratio",
        "lr_scheduler.warmup_steps",
        "the ceiling of warmup_ratio * train_iter",
        numeric("lr_scheduler.warmup_steps", _warmup),
    ),
    same("train.warmup_iter", "lr_scheduler.warmup_steps"),
    change(
        "train.amp.enabled",
        "precision.dtype",
        "True: 'fp16'",
        on(
            "precision.dtype",
            "fp16",
            "OneFlow's autocast kept some operations in fp32; DeepSpeed's fp16 keeps none",
            "off",
        ),
    ),
    *(
        change(
            f"train.{name}.enabled",
            "activation_checkpoint",
            "True: each layer",
            on("activation_checkpoint", 1, "each layer's input is stored, the rest computed again", "off"),
        )
        for name in ("activation_checkpoint", "recompute_grad")
    ),
    drop("train.zero_optimization.enabled", "zero.stage says it: the stage beside it counts where this is True"),
    rename("train.zero_optimization.stage", "zero.stage", "where it is enabled", _stage),
    same("train.checkpointer.period", "train.save_interval"),
    same("train.checkpointer.max_to_keep", "checkpoint.keep"),
    drop("train.checkpointer.**", "dslpar saves by train.save_interval"),
    drop("train.test_micro_batch_size", "an evaluation takes batches of batch.global_size"),
    drop("train.evaluation.enabled", "train.eval_interval says it: eval_period counts where this is True"),
    rename(
        "train.evaluation.eval_period",
        "train.eval_interval",
        "where evaluation is enabled",
        _with("train.evaluation.enabled", "train.eval_interval"),
    ),
    change(
        "train.evaluation.eval_iter",
        "train.eval_steps",
        "global batches of held-out data; a whole number",
        numeric("train.eval_steps", _eval_steps),
    ),
    drop("train.evaluation.evaluator.**", "dslpar evaluates the loss"),
    drop("train.evaluation.**", "dslpar evaluates the loss, and keeps the newest checkpoints, not the best"),
    drop("train.eval_period", "train.evaluation.eval_period counts"),
    only(
        "train.load_weight", "", "none is loaded", "dslpar.checkpoint.load_full_state loads whole weights, in a program"
    ),
    same("train.log_period", "train.log_interval"),
    change("train.scheduler._target_", "lr_scheduler.type", "by dslpar's name", _schedule),
    change(
        "train.scheduler.alpha", "lr_scheduler.min_lr", "alpha times optim.lr", numeric("lr_scheduler.min_lr", _alpha)
    ),
    same("train.scheduler.eta_min", "lr_scheduler.min_lr"),
    same("train.scheduler.end_learning_rate", "lr_scheduler.min_lr"),
    drop("train.scheduler.warmup_factor", "dslpar's warm-up starts at lr / warmup_steps"),
    only("train.scheduler.warmup_method", "linear", "dslpar's is linear", "dslpar's warm-up is linear"),
    drop("train.scheduler.warmup_iter", "train.warmup_ratio says it: LiBai's trainer overwrites this"),
    drop("train.scheduler.max_iter", "train.steps says it: LiBai's trainer overwrites this"),
    only("train.scheduler.gamma", 1.0, "constant", "dslpar has ExponentialLR by torch's name, without warm-up"),
    only("train.scheduler.power", 1.0, "linear", "dslpar has PolynomialLR by torch's name, without warm-up"),
    *(
        same(f"train.dist.{name}")
        for name in (
            "data_parallel_size",
            "tensor_parallel_size",
            "pipeline_parallel_size",
            "pipeline_num_layers",
            "custom_pipeline_stage_id",
            "auto_pipeline_stage_id",
            "actual_pipeline_stage_id",
        )
    ),
    drop("train.dist.num_gpus_per_node", "the hostfile says it"),
    drop("train.dist.num_nodes", "the hostfile says it"),
    drop("train.nccl_fusion_threshold_mb", "OneFlow's own"),
    drop("train.nccl_fusion_max_ops", "OneFlow's own"),
    drop("train.rdma_enabled", "NCCL finds its network by itself"),
    drop("train.input_placement_device", "batches lie where the model does"),
    same("train.seed"),
    *(
        same(f"train.{name}")
        for name in ("steps", "clip_grad_norm", "log_interval", "eval_interval", "eval_steps", "save_interval")
    ),
)


# The optimizer ----------------------------------------------------------------------------------------------------

_OPTIMIZERS = ("AdamW", "Adam", "SGD", "Adagrad", "RMSprop")


def _optimizer(value: Any, view: View) -> Any:
    name = str(value).rpartition(".")[2]
    if name not in _OPTIMIZERS:
        return needed(f"dslpar takes torch's and DeepSpeed's names, and {name} is none it knows", "optimizer.type")
    return changed("optimizer.type", name, f"OneFlow's {name} becomes torch's")


_NORM = "dslpar decays only parameters of two or more dims: no norm, no bias"
_OPTIM: tuple[Row, ...] = (
    change("optim._target_", "optimizer.type", "OneFlow's becomes torch's of the same name", _optimizer),
    *(
        same(f"optim.{name}", f"optimizer.{name}")
        for name in ("lr", "weight_decay", "betas", "eps", "amsgrad", "momentum")
    ),
    only("optim.do_bias_correction", True, "torch's Adam always corrects", "torch's Adam always corrects"),
    *(
        row
        for params in ("params", "parameters")
        for row in (
            drop(f"optim.{params}._target_", "dslpar groups the parameters"),
            same(f"optim.{params}.clip_grad_max_norm", "train.clip_grad_norm"),
            only(
                f"optim.{params}.clip_grad_norm_type", 2.0, "dslpar clips by the 2-norm", "dslpar clips by the 2-norm"
            ),
            only(f"optim.{params}.weight_decay_norm", 0.0, _NORM, _NORM),
            only(f"optim.{params}.weight_decay_bias", 0.0, _NORM, _NORM),
        )
    ),
)

ROWS: tuple[Row, ...] = (
    *_MODEL,
    *_TRAIN,
    *_OPTIM,
    drop("graph.**", "OneFlow's static graph"),
    drop("dataloader.**", "data is the section `data`, or a program's: dslpar.initialize(train_data=...)"),
    drop(
        "tokenization.**",
        "dslpar's text is bytes; a program of your own has its tokenizer; vocabularies are padded as needed",
    ),
    drop("lr_scheduler._target_", "train.scheduler counts"),
)

TABLE = Table("libai", "LiBai", ROWS, own_names=True)
