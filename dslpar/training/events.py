"""Events of the training loop, and hooks: plain callables that receive them.

    def log_weights(event):
        if event.name == "step" and event.step % 100 == 0:
            print(event.step, event.metrics["loss"])

    dslpar.fit(run, engine, train_data, hooks=[log_weights])

As in torch (`register_forward_hook`), a hook is any callable: no base class, no order of methods.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from dslpar.engine.engine import Engine


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that has just happened in a run."""

    name: Literal["step", "eval", "save", "end"]
    """"step": a step was taken. "eval": the model was evaluated, after a step or before the first one. "save": a
    checkpoint is on disk; with train.async_save this may be some steps after the saved step. "end": the run's last step
    is done; not sent if a signal stops the run before that.
    """
    step: int
    """The last completed step, or 0 before the first one; at "save", the saved step."""
    metrics: Mapping[str, int | float]
    """The step's line of metrics.jsonl, with `eval_loss` if the model was evaluated. `loss`, `grad_norm` and
    `eval_loss` are the same on all ranks; times are measured on each rank.
    """
    engine: Engine
    """This rank's engine, at `engine.steps_done`."""
    checkpoint: Path | None = None
    """The folder of the checkpoint, at "save"."""


Hook: TypeAlias = Callable[[Event], object]
"""Called on every rank, so it may call collectives. Its return value is ignored.

An exception that it raises ends the run.
"""


def hook_name(hook: Hook) -> str:
    """Return a hook's name for reports: its own, or its class's."""
    return str(getattr(hook, "__name__", type(hook).__name__))
