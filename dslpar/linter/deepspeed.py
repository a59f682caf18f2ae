"""DSC: the raw `deepspeed` section against DeepSpeed's own list of keys."""

from __future__ import annotations

from collections.abc import Iterator

from dslpar import ds_keys
from dslpar.linter.context import Context
from dslpar.linter.rule import Problem, rule
from dslpar.reading import did_you_mean


@rule("DSC101", "unknown-deepspeed-key")
def unknown_deepspeed_key(cx: Context) -> Iterator[Problem]:
    """A key of `deepspeed` that DeepSpeed does not read.

    What it does:
        Compares the keys of the section with DeepSpeed's.

    Why:
        DeepSpeed accepts any unknown top-level key in silence (its issues 653, 774 and 1809).

    Example:
        deepspeed = dict(steps_per_pirnt=10)

    Use instead:
        deepspeed = dict(steps_per_print=10)
    """
    known = {*ds_keys.TOP, *ds_keys.OURS, *ds_keys.REMOVED, *ds_keys.UNSUPPORTED}
    for name in cx.spec.deepspeed:
        if name not in known:
            fix = did_you_mean(name, ds_keys.TOP) or f"the keys are {', '.join(ds_keys.TOP)}"
            yield _problem(cx, name, f"DeepSpeed has no key {name!r}", fix)


@rule("DSC102", "decided-elsewhere")
def decided_elsewhere(cx: Context) -> Iterator[Problem]:
    """A key of `deepspeed` that a section of the config decides.

    What it does:
        Finds batch sizes, clipping, optimizer, schedule, ZeRO and precision under `deepspeed`.

    Why:
        Two places for one value would differ some day, and the linter could not check the layout.

    Example:
        deepspeed = dict(train_batch_size=16)

    Use instead:
        batch = dict(global_size=16)
    """
    for name in cx.spec.deepspeed:
        if name in ds_keys.OURS:
            section = ds_keys.OURS[name]
            yield _problem(cx, name, f"{name} is decided by {section}", f"say it under {section}")


@rule("DSC103", "removed-deepspeed-key")
def removed_deepspeed_key(cx: Context) -> Iterator[Problem]:
    """A key that DeepSpeed has removed.

    What it does:
        Finds keys on which DeepSpeed 0.19 raises.

    Why:
        The job would start on every host, and stop.

    Example:
        deepspeed = dict(curriculum_learning=dict(enabled=True))

    Use instead:
        deepspeed = dict(steps_per_print=10)
    """
    for name in cx.spec.deepspeed:
        if name in ds_keys.REMOVED:
            yield _problem(cx, name, f"DeepSpeed has removed {name!r}, and raises on it", "leave it out")


@rule("DSC104", "unsupported-deepspeed-key")
def unsupported_deepspeed_key(cx: Context) -> Iterator[Problem]:
    """A key of DeepSpeed that does not go with how dslpar runs it.

    What it does:
        Finds keys that would change the mesh, the loop or the checkpoints behind dslpar's back.

    Why:
        dslpar could not keep its promises about them.

    Example:
        deepspeed = dict(expert_parallel=dict(enabled=True))

    Use instead:
        deepspeed = dict(steps_per_print=10)
    """
    for name in cx.spec.deepspeed:
        if name in ds_keys.UNSUPPORTED:
            yield _problem(cx, name, f"dslpar does not support DeepSpeed's {name!r}", "leave it out")


def _problem(cx: Context, name: str, message: str, help_: str) -> Problem:
    key = f"deepspeed.{name}"
    return Problem(cx.config.key_at(key), message, help_, key)


RULES = (unknown_deepspeed_key, decided_elsewhere, removed_deepspeed_key, unsupported_deepspeed_key)
