"""Conversions for LiBai's configs (rows: data/libai.txt), with the formulas of its last release."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

from dslpar.migrate import conversions
from dslpar.migrate.conversions import number, one_dropout
from dslpar.migrate.table import Conversion, Outcome, Row, View, changed, dead, dropped, needed

_GPTS = ("GPTForPreTraining", "GPTModel")
_LLAMAS = ("LlamaForCausalLM", "LlamaModel")
_LLAMA = {"norm": "rmsnorm", "activation": "swiglu", "positions": "rotary", "bias": False, "tie_embeddings": False}


def gpt_fields(target: str) -> Mapping[str, object] | None:
    """Return the fields of dslpar's GPT that a LiBai class implies besides its cfg; None if it is not a GPT."""
    package, _, name = target.rpartition(".")
    if target == "dslpar.models.GPT" or (name in _GPTS and package.startswith("libai.")):
        return {}
    return _LLAMA if name in _LLAMAS and package.startswith(("projects.", "libai.")) else None


def model_class(value: object, view: View, row: Row) -> Outcome:
    """Convert the class of the model."""
    name, fields = str(value), gpt_fields(str(value))
    if name == "dslpar.models.GPT":
        return Outcome("kept", row.to, "GPT")
    if fields is None:
        return needed(f"dslpar has no {name.rpartition('.')[2]}, a OneFlow model", "model")
    message = "the language-model loss is the GPT's own"
    if fields:
        message = "Llama's blocks are fields of dslpar's GPT: " + ", ".join(f"{k}={v!r}" for k, v in fields.items())
    return changed(row.to, "GPT", message, {f"model.{key}": value for key, value in fields.items()})


def _of_gpt(convert: Conversion) -> Conversion:
    """Decorate a conversion of a GPT's key; dslpar does not have LiBai's other models."""

    @functools.wraps(convert)
    def checked(value: object, view: View, row: Row) -> object:
        if gpt_fields(view.model) is not None:
            return convert(value, view, row)
        if not view.model:
            return needed("the class of the model was not read: only a GPT's sizes have a place")
        return dropped("its model is one that dslpar does not have")

    return checked


@_of_gpt
def model_size(value: object, view: View, row: Row) -> Outcome:
    """Keep a size of the GPT."""
    return row.as_is(value)


@_of_gpt
def only_of_gpt(value: object, view: View, row: Row) -> Outcome:
    """Apply `only` to a key of the GPT."""
    return conversions.only(value, view, row)


@_of_gpt
def dropout(value: object, view: View, row: Row) -> Outcome:
    """Merge the dropout probabilities of the model."""
    given = [view.value(f"model.cfg.{name}_prob") for name in _DROPOUTS]
    return one_dropout(value, [item for item in given if item is not None], row)


_DROPOUTS = "embedding_dropout", "attention_dropout", "output_dropout", "hidden_dropout", "attention_probs_dropout"


@_of_gpt
def scaled_init(value: object, view: View, row: Row) -> Outcome:
    """Convert the switch that divides the initial weights of output layers by sqrt(2 * num_layers)."""
    if value is True:
        return dropped(row.why)
    std = view.value("model.cfg.initializer_range")
    if value is not False or not isinstance(std, (int, float)):
        return needed("the standard deviation of output layers, which is initializer_range without it", row.to)
    return changed(row.to, std, "off: output layers draw with initializer_range, too")


@_of_gpt
def vocabulary(value: object, view: View, row: Row) -> Outcome:
    """Keep the vocabulary's size, unless LiBai overwrites it by its tokenizer's."""
    if view.get("tokenization.tokenizer._target_") is None:
        return row.as_is(value)
    padded = "padded to a multiple of make_vocab_size_divisible_by * tensor_parallel_size"
    return needed(f"LiBai overwrites it by its tokenizer's number of tokens, {padded}: write that number", row.to)


@_of_gpt
def tied(value: object, view: View, row: Row) -> Outcome:
    """Keep the switch of tied embeddings, which LiBai's Llama does not read."""
    if view.model.rpartition(".")[2] in _LLAMAS:
        return dead("LiBai's Llama has a head of its own")
    return row.as_is(value)


@_of_gpt
def other_argument(value: object, view: View, row: Row) -> Outcome:
    """Ask the author about a key that dslpar's GPT does not have."""
    return needed("dslpar's GPT has no such key")


# The run ----------------------------------------------------------------------------------------------------------


def _steps_of_epochs(view: View) -> int | None:
    """Return the steps of train_epoch; 0 without train_epoch, None if the size of an epoch is unknown."""
    epochs = view.get("train.train_epoch", 0)
    if not epochs:
        return 0
    if view.epoch is None or type(epochs) is not int:
        return None
    return math.ceil(view.epoch.samples * epochs / view.epoch.global_size)


def _iterations(view: View) -> Any:
    return view.get("train.train_iter", view.get("train.steps", view.value("train.train_iter")))


def steps(value: object, view: View, row: Row) -> Outcome:
    """Convert train_iter; LiBai runs the larger of train_iter and train_epoch's steps."""
    by_epochs = _steps_of_epochs(view)
    if by_epochs is None:
        message = "LiBai takes the larger of train_iter and train_epoch's steps, which depend on the data"
        return needed(f"{message}; give --num-samples N", row.to)
    if value == 0:
        return dropped("0: epochs count")
    if by_epochs and type(value) is int and by_epochs >= value:
        return dropped(f"the {by_epochs} steps of train_epoch are as many or more, and LiBai takes the larger")
    return row.as_is(value)


def epochs(value: object, view: View, row: Row) -> Outcome:
    """Convert train_epoch."""
    if not value:
        return dropped("0: train_iter counts")
    by_epochs, iterations = _steps_of_epochs(view), _iterations(view)
    if by_epochs is None or view.epoch is None:
        message = "dslpar counts steps: one epoch is (samples of the data) / batch.global_size of them"
        return needed(f"{message}; give --num-samples N", row.to)
    if type(iterations) is int and iterations > by_epochs:
        return dropped(f"its {by_epochs} steps are fewer than train_iter, and LiBai takes the larger")
    samples, size = view.epoch
    return changed(row.to, by_epochs, f"the ceiling of {value} epochs * {samples} samples / {size} per step")


@number
def warmup(value: float, view: View, row: Row) -> object:
    """Convert a warm-up ratio to steps: the ceiling of ratio times steps, as in LiBai's trainer."""
    if not value:
        return dropped("no warm-up, as if left out")
    by_epochs, iterations = _steps_of_epochs(view), _iterations(view)
    if by_epochs is None or type(iterations) is not int or not (by_epochs or iterations):
        return needed("dslpar counts steps of warm-up, and how many steps there are depends on the data", row.to)
    return math.ceil(value * max(iterations, by_epochs))


def where_enabled(value: object, view: View, row: Row) -> Outcome:
    """Keep a key if the switch `enabled` of its section is on."""
    switch = f"{row.pattern.rpartition('.')[0]}.enabled"
    return row.as_is(value) if view.value(switch) else dropped(f"{switch} is off")


@number
def eval_steps(value: float, view: View, row: Row) -> object:
    """Convert eval_iter, a bound: LiBai evaluates no more than its test data, whose size the config does not have.

    A bound that is longer than the training between two evaluations, such as the usual 1e5, only means all of the data.
    """
    if not view.value("train.evaluation.enabled"):
        return dropped("evaluation is off")
    period = view.value("train.evaluation.eval_period")
    if value < 1 or not isinstance(period, (int, float)) or value > period:
        short = f"LiBai stops at the end of its test data, or after {value:g} of its batches"
        return needed(f"{short}: write the number of batch.global_size that is evaluated", row.to)
    return changed(row.to, int(value), "global batches; LiBai also stops at the end of its test data")


def eval_interval(value: object, view: View, row: Row) -> Outcome:
    """Keep eval_period, unless LiBai overwrites it by eval_after_n_epoch."""
    made = where_enabled(value, view, row)
    return _unless_in_epochs(made, "train.evaluation.eval_after_n_epoch", view)


def save_interval(value: object, view: View, row: Row) -> Outcome:
    """Keep the checkpointer's period, unless LiBai overwrites it by save_model_after_n_epoch."""
    return _unless_in_epochs(row.as_is(value), "train.checkpointer.save_model_after_n_epoch", view)


def _unless_in_epochs(made: Outcome, key: str, view: View) -> Outcome:
    return dead(f"LiBai's trainer overwrites it by {key.rpartition('.')[2]}") if view.get(key) else made


def after_epochs(value: object, view: View, row: Row) -> Outcome:
    """Convert a number of epochs between events to steps: whole global batches of an epoch, as in LiBai's trainer."""
    if not value:
        return dropped("0 is off")
    if type(value) is not int:
        return needed("it is not a whole number of epochs", row.to)
    if view.epoch is None:
        return needed("dslpar counts steps: give --num-samples N", row.to)
    samples, size = view.epoch
    return changed(row.to, samples // size * value, f"{value} epochs of {samples} samples // {size} per step")


def evaluator(value: object, view: View, row: Row) -> Outcome:
    """Drop LiBai's evaluator; the reason names the command that measures its metrics."""
    name = str(value).rpartition(".")[2]
    if name == "ClsEvaluator":
        top = view.get("train.evaluation.evaluator.topk", (1, 5))
        metrics = ",".join(f"accuracy@{k}" for k in (top if isinstance(top, (list, tuple)) else (top,)))
    elif name == "PPLEvaluator":
        metrics = "perplexity"
    else:
        return dropped(f"dslpar eval has none of {name}'s metrics; a hook of dslpar.fit can call what measures them")
    return dropped(f"{name}: the loss is evaluated; dslpar eval RUN --metrics {metrics} measures it")


_COSINE = "cosine", "cosine down to min_lr; LiBai's counts from the first step, dslpar's from the end of the warm-up"
_SCHEDULERS = {
    "WarmupCosineLR": _COSINE,
    "WarmupCosineAnnealingLR": _COSINE,
    "WarmupPolynomialLR": ("linear", "linear down to min_lr, which is power=1"),
    "WarmupExponentialLR": ("constant", "constant, which is gamma=1"),
    "WarmupStopLR": ("constant", "constant after the warm-up"),
}


def lr_scheduler(value: object, view: View, row: Row) -> Outcome:
    """Convert the name of a learning-rate scheduler."""
    name = str(value).rpartition(".")[2]
    if name not in _SCHEDULERS:
        return needed(f"dslpar has no {name}: 'constant', 'linear', 'cosine', or torch's and DeepSpeed's names", row.to)
    return changed(row.to, *_SCHEDULERS[name])


@number
def alpha(value: float, view: View, row: Row) -> object:
    """Convert the last learning rate of WarmupCosineLR, which is alpha * lr."""
    if "Cosine" not in str(view.value("train.scheduler._target_")):
        return dropped("that scheduler has no such key")
    lr = view.value("optim.lr")
    if not isinstance(lr, (int, float)):
        return needed("the last learning rate is alpha times optim.lr, which is not set", row.to)
    return float(f"{value * lr:.12g}")  # without the last digits of binary fractions


def optimizer(value: object, view: View, row: Row) -> Outcome:
    """Convert the name of an optimizer."""
    name = str(value).rpartition(".")[2]
    if name not in ("AdamW", "Adam", "SGD", "Adagrad", "RMSprop"):
        return needed(f"dslpar does not know {name}: it takes the names of torch's and DeepSpeed's optimizers", row.to)
    return changed(row.to, name, f"OneFlow's {name} becomes torch's")


def clip(value: object, view: View, row: Row) -> Outcome:
    """Keep the bound of the gradient's norm, if LiBai clips."""
    section = row.pattern.rpartition(".")[0]
    if view.value(f"{section}.clip_grad_norm_type") is None:
        return dead("without clip_grad_norm_type LiBai does not clip")
    return conversions.clip(value, view, row)


def weight_decay(value: object, view: View, row: Row) -> Outcome:
    """Keep the decay; LiBai's also decays norms and biases, unless keys of `params` set theirs."""
    keys = [f"optim.{section}.weight_decay_{kind}" for section in ("params", "parameters") for kind in ("norm", "bias")]
    if value and all(view.value(key) is None for key in keys):
        return changed(row.to, value, "dslpar decays no norm and no bias, which LiBai does without weight_decay_norm")
    return row.as_is(value)
