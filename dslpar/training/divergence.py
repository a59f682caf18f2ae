"""Suspects of a run whose loss or gradient is no longer finite: the keys to change, by what the config sets. No torch.

    suspects(job.spec, num_updates=0, lr=1e-4)        # precision; or the data and the initial weights
    suspects(job.spec, num_updates=7, lr=1e9)         # optimizer.lr, clipping, precision

A key whose value already is what would be advised is no suspect.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from dslpar.schema import sections

_LOW_CLIP = 1.0
"""The usual limit of the gradient's norm. A run that clips there, or below, clips enough."""
_WIDER = {"fp16": "'bf16' or 'fp32'", "bf16": "'fp32'"}
"""Data types with a wider range, or a higher precision, by the data type in use."""


class Suspect(NamedTuple):
    """A key that may have made a run diverge, and what to set instead."""

    key: str
    advice: str


def suspects(spec: sections.Spec, *, num_updates: int, lr: float) -> list[Suspect]:
    """Return the suspects, the likeliest first.

    num_updates: steps that changed the weights before the first one that was not finite.
    lr: the learning rate of the last step.
    """
    if num_updates:
        return [*_of_updates(spec, lr), *_of_precision(spec)]
    return [*_of_precision(spec), Suspect("model", _NO_UPDATE)]


_NO_UPDATE = (
    "the batch of step 1, or the initial weights of what is named above: no update was made yet, so that neither lr nor"
    " clipping is the cause"
)


def _of_updates(spec: sections.Spec, lr: float) -> Iterator[Suspect]:
    decay = spec.optimizer.weight_decay
    if decay > 1 and lr * decay > 1:  # with a usual decay of 0.1 or less, the lr is what is too large
        advice = f"a smaller optimizer.weight_decay than {decay:g}: with this lr it changes the sign of weights"
        yield Suspect("optimizer.weight_decay", advice)
    yield Suspect("optimizer.lr", f"a smaller optimizer.lr than {lr:g}")
    scheduler = spec.lr_scheduler
    if isinstance(scheduler, sections.LRScheduler) and not scheduler.warmup_steps:
        yield Suspect("lr_scheduler", "a warm-up, lr_scheduler.warmup_steps")
    clip = spec.train.clip_grad_norm
    if clip is None or clip > _LOW_CLIP:
        yield Suspect("train.clip_grad_norm", f"train.clip_grad_norm={_LOW_CLIP}")


def _of_precision(spec: sections.Spec) -> Iterator[Suspect]:
    if wider := _WIDER.get(spec.precision.dtype):
        yield Suspect("precision.dtype", f"precision={wider}")
