"""DSC: the raw `deepspeed` section against DeepSpeed's own list of keys, and what DeepSpeed refuses of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dslpar.layout.resolve import offloads
from dslpar.linter.context import Context
from dslpar.linter.problem import Problem, UnknownValueError
from dslpar.linter.rule import rule


@rule("DSC101", "unknown-deepspeed-key")
def unknown_deepspeed_key(cx: Context) -> Iterator[Problem]:
    """A key of `deepspeed` that DeepSpeed does not read.

    What it does:
        Compares the keys of the section, at every depth, with DeepSpeed's.

    Why:
        DeepSpeed accepts any unknown top-level key in silence (its issues 653, 774 and 1809), and any in most of its
        sections.

    Example:
        deepspeed = dict(flops_profiler=dict(profil_step=10))

    Use instead:
        deepspeed = dict(flops_profiler=dict(profile_step=10))
    """
    yield from cx.misreads("DSC101")


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
        if name in _keys().OURS:
            section = _keys().OURS[name]
            yield _problem(cx, name, f"{name} is decided by {section}", f"say it under {section}")


@rule("DSC103", "removed-deepspeed-key")
def removed_deepspeed_key(cx: Context) -> Iterator[Problem]:
    """A key that DeepSpeed has removed.

    What it does:
        Finds keys on which DeepSpeed 0.19 raises, in `deepspeed` and in `zero`.

    Why:
        The job would start on every host, and stop.

    Example:
        deepspeed = dict(curriculum_learning=dict(enabled=True))

    Use instead:
        deepspeed = dict(steps_per_print=10)
    """
    for name in cx.spec.deepspeed:
        if name in _keys().REMOVED:
            yield _problem(cx, name, f"DeepSpeed has removed {name!r}, and raises on it", "leave it out")
    yield from cx.misreads("DSC103")


@rule("DSC104", "unsupported-deepspeed-key")
def unsupported_deepspeed_key(cx: Context) -> Iterator[Problem]:
    """A key of DeepSpeed that does not go with how dslpar runs it.

    What it does:
        Finds keys that would change the mesh, the loop, the maths or the checkpoints behind dslpar's back.

    Why:
        dslpar could not keep its promises about them.

    Example:
        deepspeed = dict(expert_parallel=dict(enabled=True))

    Use instead:
        deepspeed = dict(steps_per_print=10)
    """
    for name in cx.spec.deepspeed:
        if name in _keys().UNSUPPORTED:
            yield _problem(cx, name, f"dslpar does not support DeepSpeed's {name!r}", "leave it out")
    yield from cx.misreads("DSC104")


@rule("DSC105", "wrong-deepspeed-value")
def wrong_deepspeed_value(cx: Context) -> Iterator[Problem]:
    """A value of `deepspeed` that its key does not take.

    What it does:
        Checks the type, the range and the choices of every value, at every depth.

    Why:
        Of most keys DeepSpeed checks nothing when it starts: a step of 0 divides by zero at the first step, and a text
        such as 'false' is true.

    Example:
        deepspeed = dict(wall_clock_breakdown='false')

    Use instead:
        deepspeed = dict(wall_clock_breakdown=False)
    """
    yield from cx.misreads("DSC105")


@rule("DSC106", "deprecated-deepspeed-key")
def deprecated_deepspeed_key(cx: Context) -> Iterator[Problem]:
    """A key that DeepSpeed has renamed.

    What it does:
        Finds names that DeepSpeed still takes with a warning, and says which key took their place.

    Why:
        DeepSpeed turns the old key into the new one, and refuses the two together. Rules that look at the new key would
        not see the old one.

    Example:
        zero = dict(stage=2, cpu_offload=True)

    Use instead:
        zero = dict(stage=2, offload_optimizer='cpu')
    """
    yield from cx.misreads("DSC106")


@rule("DSC107", "scaled-before-the-sum")
def scaled_before_the_sum(cx: Context) -> Iterator[Problem]:
    """Gradients divided before they are summed, with ZeRO 2 or 3.

    What it does:
        Finds prescale_gradients, and a gradient_predivide_factor other than 1, at ZeRO stages 2 and 3, unless
        zero.reduce_scatter is off.

    Why:
        DeepSpeed stops at an assertion, after the model is built: its reduce-scatter divides after the sum alone.

    Example:
        zero = 2
        deepspeed = dict(prescale_gradients=True)

    Use instead:
        zero = 1
        deepspeed = dict(prescale_gradients=True)
    """
    zero = cx.spec.zero
    if zero.stage < 2 or not zero.extra.get("reduce_scatter", True):
        return
    for name, default in (("prescale_gradients", False), ("gradient_predivide_factor", 1)):
        if (value := _value(cx, name, default)) != default:
            message = f"{name} {value} does not go with the reduce-scatter of ZeRO stage {zero.stage}"
            yield cx.problem(f"deepspeed.{name}", message, f"leave {name} out, or zero = 1")


@rule("DSC108", "needed-and-turned-off")
def needed_and_turned_off(cx: Context) -> Iterator[Problem]:
    """A key of `deepspeed` that takes back what the optimizer needs.

    What it does:
        Finds zero_allow_untested_optimizer=False with ZeRO and an optimizer that DeepSpeed has not tested with it, and
        zero_force_ds_cpu_optimizer=True with zero.offload_optimizer and an optimizer of torch's.

    Why:
        dslpar sets the two as the optimizer needs them, and `deepspeed` is merged last. DeepSpeed then refuses the
        optimizer, after the model is built.

    Example:
        optimizer = dict(type='SGD', lr=0.1)
        zero = 1
        deepspeed = dict(zero_allow_untested_optimizer=False)

    Use instead:
        optimizer = dict(type='SGD', lr=0.1)
        zero = 1
    """
    name = _optimizer(cx)
    if not cx.spec.zero.stage or not _elementwise(name):
        return  # of those that do not act elementwise ZER103 speaks
    if not _value(cx, "zero_allow_untested_optimizer", True) and name not in _TESTED:
        yield _taken_back(cx, "zero_allow_untested_optimizer", f"ZeRO runs {name!r} only where it is True")
    forced = _value(cx, "zero_force_ds_cpu_optimizer", False) and offloads(cx.spec, "optimizer")
    if forced and name not in (*_FROM_THE_DICT, *_OF_CPU):
        yield _taken_back(cx, "zero_force_ds_cpu_optimizer", f"{name!r} is offloaded only where it is False")


@rule("DSC109", "direct-storage-without-nvme")
def direct_storage_without_nvme(cx: Context) -> Iterator[Problem]:
    """aio.use_gds, and nothing that is offloaded to NVMe.

    What it does:
        Refuses deepspeed.aio.use_gds=True.

    Why:
        It is of offload to NVMe, which is not part of this version; and where there is no CUDA, DeepSpeed stops at an
        assertion.

    Example:
        deepspeed = dict(aio=dict(use_gds=True))

    Use instead:
        deepspeed = dict(steps_per_print=10)
    """
    if "aio" in cx.spec.deepspeed and _value(cx, "aio", {}).get("use_gds"):
        message = "use_gds needs offload to NVMe, which is not part of this version of dslpar"
        yield cx.problem("deepspeed.aio.use_gds", message, "leave use_gds out")


_FROM_THE_DICT = ("AdamW", "Adam", "SGD")
"""Optimizers that DeepSpeed makes itself, by its dict."""
_OF_CPU = ("DeepSpeedCPUAdam", "Lion")
_TESTED = ("AdamW", "Adam", "FusedAdam", *_OF_CPU)
"""Optimizers that DeepSpeed has on its list for ZeRO; torch's Adagrad is, too, but not as dslpar makes it."""


def _optimizer(cx: Context) -> str:
    """The optimizer's name; empty where lint cannot know what is made of it."""
    if "optimizer" in cx.reading.invalid:
        raise UnknownValueError("optimizer")
    optimizer = cx.reading.spec.optimizer
    name = str(getattr(optimizer, "target", type(optimizer).__name__))
    return "" if "." in name else name


def _elementwise(name: str) -> bool:
    if name in _FROM_THE_DICT:
        return True
    from dslpar.schema.torch_optimizers import elementwise  # here: most configs need none of it

    return elementwise(name)


def _taken_back(cx: Context, key: str, why: str) -> Problem:
    message = f"{key} is turned {'off' if key == 'zero_allow_untested_optimizer' else 'on'}, and {why}"
    return cx.problem(f"deepspeed.{key}", message, f"leave {key} out")


def _value(cx: Context, name: str, default: Any) -> Any:
    """A value of the section at its top level."""
    if f"deepspeed.{name}" in cx.reading.invalid:
        raise UnknownValueError(name)
    return cx.spec.deepspeed.get(name, default)


def _keys() -> Any:
    from dslpar.schema import deepspeed_policy  # here: most configs have no key of DeepSpeed's

    return deepspeed_policy


def _problem(cx: Context, name: str, message: str, hint: str) -> Problem:
    key = f"deepspeed.{name}"
    return Problem(cx.config.key_at(key), message, hint, key)


RULES = (
    unknown_deepspeed_key,
    decided_elsewhere,
    removed_deepspeed_key,
    unsupported_deepspeed_key,
    wrong_deepspeed_value,
    deprecated_deepspeed_key,
    scaled_before_the_sum,
    needed_and_turned_off,
    direct_storage_without_nvme,
)
