"""Conversions for LiBai's configs (rows: data/libai.txt), with the formulas of its last release."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

from dslpar.migrate import conversions
from dslpar.migrate.conversions import number, one_dropout
from dslpar.migrate.table import Conversion, Outcome, Row, View, changed, dropped, needed

_GPTS = ("GPTForPreTraining", "GPTModel")
_LLAMAS = ("LlamaForCausalLM", "LlamaModel")
_LLAMA = {"norm": "rmsnorm", "activation": "swiglu", "positions": "rotary", "bias": False}


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
    """Merge the dropout probabilities that the source sets."""
    given = [view.get(f"model.cfg.{name}_prob") for name in _DROPOUTS]
    return one_dropout(value, [item for item in given if item is not None], row)


_DROPOUTS = "embedding_dropout", "attention_dropout", "output_dropout", "hidden_dropout", "attention_probs_dropout"


@_of_gpt
def scaled_init(value: object, view: View, row: Row) -> Outcome:
    """Report that dslpar does not scale the initial weights of output layers."""
    if not value:
        return dropped("off: all weights by init_std")
    return changed("", None, "dslpar draws every weight with init_std, output layers too")


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
    return view.get("train.train_iter", view.get("train.steps", 0))


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
    return row.as_is(value) if view.get(switch) else dropped(f"{switch} is off")


@number
def eval_steps(value: float, view: View, row: Row) -> object:
    """Convert eval_iter to an int; LiBai's configs write it as 1e5."""
    if not view.get("train.evaluation.enabled", True):
        return dropped("evaluation is off")
    return Outcome("renamed", row.to, value) if type(value) is int else int(value)


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


_COSINE = "cosine", "cosine down to min_lr, the warm-up from lr / warmup_steps"
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
    if "Cosine" not in str(view.get("train.scheduler._target_", "")):
        return dropped("that scheduler has no such key")
    lr = view.get("optim.lr")
    if not isinstance(lr, (int, float)):
        return needed("the last learning rate is alpha times optim.lr, which is not set", row.to)
    return value * lr


def optimizer(value: object, view: View, row: Row) -> Outcome:
    """Convert the name of an optimizer."""
    name = str(value).rpartition(".")[2]
    if name not in ("AdamW", "Adam", "SGD", "Adagrad", "RMSprop"):
        return needed(f"dslpar does not know {name}: it takes the names of torch's and DeepSpeed's optimizers", row.to)
    return changed(row.to, name, f"OneFlow's {name} becomes torch's")
