"""Learning rates as a function of the step, counted from 0: a warm-up, then one curve down.

With W warm-up steps, step t uses lr * (t + 1) / W, so step W - 1 uses lr. From there, 'linear' and 'cosine' fall to
min_lr, and 'constant' stays at lr. The last step uses min_lr, or with D decay steps, step D - 1 and all later ones do
(nanoGPT's and Megatron-LM's lr_decay_iters). 'cosine' is SGDR's without restarts (arXiv 1608.03983).

    >>> rates = [learning_rate(LRScheduler(type="linear", warmup_steps=2), 1.0, 6, t) for t in range(6)]
    >>> rates
    [0.5, 1.0, 0.75, 0.5, 0.25, 0.0]
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from dslpar.schema.sections import LRScheduler

CURVES: Mapping[str, Callable[[float], float]] = {
    "constant": lambda progress: 1.0,
    "linear": lambda progress: 1.0 - progress,
    "cosine": lambda progress: (1.0 + math.cos(math.pi * progress)) / 2,
}
"""Functions from the progress after the warm-up, 0 to 1, to the remaining fraction of lr - min_lr."""


def learning_rate(scheduler: LRScheduler, lr: float, num_steps: int, step: int) -> float:
    """Return the learning rate of step `step` (from 0) of `num_steps`; `lr` is the peak."""
    warmup = scheduler.warmup_steps
    if step < warmup:
        return lr * (step + 1) / warmup
    if scheduler.type == "constant":
        return lr  # not min_lr + (lr - min_lr), which rounds
    peak, last = max(warmup - 1, 0), (scheduler.decay_steps or num_steps) - 1
    progress = min((step - peak) / (last - peak), 1.0) if last > peak else 0.0
    return scheduler.min_lr + (lr - scheduler.min_lr) * CURVES[scheduler.type](progress)
