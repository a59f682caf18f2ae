"""Effects of a resume: values that follow from changed keys, at the next step. No torch.

    list(effects(before, now, step=80))     # ["lr at step 81: 0.0002 -> 0.000522"]

A key may change a value that it does not name: with `train.steps`, a cosine is stretched, so that its lr rises again.
"""

from __future__ import annotations

from collections.abc import Iterator

from dslpar.layout.lr_scheduler import learning_rate
from dslpar.models.moco.section import MoCo
from dslpar.schema.sections import LRScheduler, Spec


def effects(before: Spec, now: Spec, step: int) -> Iterator[str]:
    """Yield a line for each value that changes without being a key itself.

    before: the spec of the checkpoint. now: that of the run that resumes. step: the checkpoint's step.
    """
    yield from _lr(before, now, step)
    yield from _momentum(before, now, step)


def _lr(before: Spec, now: Spec, step: int) -> Iterator[str]:
    """Yield the lr of the next step; if that is unchanged, the lr of the last step that both schedules have."""
    for at in (step, min(before.train.steps, now.train.steps) - 1):
        old, new = _lr_at(before, at), _lr_at(now, at)
        if old is None or new is None or (old, new) == (before.optimizer.lr, now.optimizer.lr) != (old, old):
            return  # unknown; or the keys themselves, which are reported
        if old != new:
            yield f"lr at step {at + 1}: {old:.6g} -> {new:.6g}"
            return


def _lr_at(spec: Spec, step: int) -> float | None:
    """Return the lr of step `step`, from 0; after the last step, that of the last one. None: another scheduler's."""
    if not isinstance(spec.lr_scheduler, LRScheduler):
        return None
    return learning_rate(spec.lr_scheduler, spec.optimizer.lr, spec.train.steps, min(step, spec.train.steps - 1))


def _momentum(before: Spec, now: Spec, step: int) -> Iterator[str]:
    if isinstance(before.model, MoCo) and isinstance(now.model, MoCo):
        old, new = (
            spec.model.momentum_at(min(1.0, (step + 1) / spec.train.steps))
            for spec in (before, now)
            if isinstance(spec.model, MoCo)
        )
        if old != new:
            yield f"momentum of the momentum encoder at step {step + 1}: {old:.6g} -> {new:.6g}"
