"""What a training loop tells a program: events, and hooks, the plain callables that are told.

    def log_weights(event):
        if event.name == "step" and event.step % 100 == 0:
            print(event.step, event.metrics["loss"])

    dslpar.fit(run, engine, train_data, hooks=[log_weights])

That a hook is any callable of one argument is torch's (`register_forward_hook`): no base class, no order of methods.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from dslpar.engine.engine import Engine


@dataclass(frozen=True, kw_only=True)
class Event:
    """What has just happened in a run."""

    name: Literal["step", "eval", "save", "end"]
    """"step": a step was taken. "eval": it was evaluated after that, or before the first one. "save": a checkpoint is
    on disk, which with train.async_save may be some steps after the one that it is of. "end": the last step of the run
    is done; not where the run was told to stop.
    """
    step: int
    """The last step done, 0 before the first one; at "save", the step that is saved."""
    metrics: Mapping[str, int | float]
    """The step's line of metrics.jsonl, with `eval_loss` where it was evaluated. `loss`, `grad_norm` and `eval_loss`
    are the same on all ranks, times are each rank's own.
    """
    engine: Engine
    """This rank's engine, at `engine.steps_done`."""
    checkpoint: Path | None = None
    """The folder of the checkpoint, at "save"."""


Hook: TypeAlias = Callable[[Event], object]
"""Called on every rank, so that it may call what all ranks must call together; what it returns is not used.

What it raises ends the run.
"""


def hook_name(hook: Hook) -> str:
    """Return the name by which a hook is reported: its own, or its class's."""
    return str(getattr(hook, "__name__", type(hook).__name__))
