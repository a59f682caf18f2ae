"""DSC: check that the keys of the section `deepspeed` are known, and that DeepSpeed accepts their values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dslpar.layout.resolve import offloads
from dslpar.linter.context import Context
from dslpar.linter.problem import Problem, UnknownValueError
from dslpar.linter.rule import rule
from dslpar.schema import sections


@rule("DSC101", "unknown-deepspeed-key")
def unknown_deepspeed_key(cx: Context) -> Iterator[Problem]:
    """An unknown key of `deepspeed`."""
    yield from cx.misreads("DSC101")


@rule("DSC102", "decided-elsewhere")
def decided_elsewhere(cx: Context) -> Iterator[Problem]:
    """A key of `deepspeed` belongs to another section of the config."""
    if cx.spec.deepspeed:
        from dslpar.schema.deepspeed_policy import OURS, written_elsewhere  # few configs have this section

        for name in (name for name in cx.spec.deepspeed if name in OURS):
            message = f"{name} is set by {OURS[name]}"
            yield cx.problem_of_key(f"deepspeed.{name}", message, written_elsewhere(name))


@rule("DSC103", "removed-deepspeed-key")
def removed_deepspeed_key(cx: Context) -> Iterator[Problem]:
    """A key that DeepSpeed has removed."""
    if cx.spec.deepspeed:
        from dslpar.schema.deepspeed_policy import REMOVED

        for name in (name for name in cx.spec.deepspeed if name in REMOVED):
            message = f"DeepSpeed has removed {name!r}, and raises an error for it"
            yield cx.problem_of_key(f"deepspeed.{name}", message, "leave it out")
    yield from cx.misreads("DSC103")


@rule("DSC104", "unsupported-deepspeed-key")
def unsupported_deepspeed_key(cx: Context) -> Iterator[Problem]:
    """A key of DeepSpeed that dslpar does not support."""
    if cx.spec.deepspeed:
        from dslpar.schema.deepspeed_policy import UNSUPPORTED

        for name in (name for name in cx.spec.deepspeed if name in UNSUPPORTED):
            message = f"dslpar does not support DeepSpeed's {name!r}"
            yield cx.problem_of_key(f"deepspeed.{name}", message, "leave it out")
    yield from cx.misreads("DSC104")


@rule("DSC105", "wrong-deepspeed-value")
def wrong_deepspeed_value(cx: Context) -> Iterator[Problem]:
    """An invalid value of `deepspeed`."""
    yield from cx.misreads("DSC105")


@rule("DSC106", "deprecated-deepspeed-key")
def deprecated_deepspeed_key(cx: Context) -> Iterator[Problem]:
    """A key that DeepSpeed has renamed."""
    yield from cx.misreads("DSC106")


@rule("DSC107", "scaled-before-the-sum")
def scaled_before_the_sum(cx: Context) -> Iterator[Problem]:
    """Gradients are divided before they are summed, which this form of ZeRO does not support."""
    zero = cx.spec.zero
    scatters = zero.stage >= 2 and zero.extra.get("reduce_scatter", True)
    for name, default in (("prescale_gradients", False), ("gradient_predivide_factor", 1)):
        if (value := _value(cx, name, default)) == default:
            continue
        if scatters:
            message = f"{name}={value} is not supported with the reduce-scatter of ZeRO stage {zero.stage}"
            yield cx.problem(f"deepspeed.{name}", message, f"leave {name} out, or zero = 1")
        elif name == "gradient_predivide_factor" and zero.stage and cx.layout.zero_over_d:
            where = f"if ZeRO also sums gradients over {cx.tensor.cuboid.d} ranks that hold equal weights"
            message = f"{name}={value} is not supported {where}"
            yield cx.problem(f"deepspeed.{name}", message, f"leave {name} out")


@rule("DSC108", "needed-and-turned-off")
def needed_and_turned_off(cx: Context) -> Iterator[Problem]:
    """A key of `deepspeed` turns off a setting that the optimizer needs."""
    name = _optimizer_name(cx)
    if not cx.spec.zero.stage or not _is_elementwise(name):
        return  # ZER103 reports optimizers that are not elementwise
    if not _value(cx, "zero_allow_untested_optimizer", True) and name not in _TESTED:
        key, message = "zero_allow_untested_optimizer", f"is off, but ZeRO runs {name!r} only if it is True"
        yield cx.problem(f"deepspeed.{key}", f"{key} {message}", f"leave {key} out")
    forced = _value(cx, "zero_force_ds_cpu_optimizer", False) and offloads(cx.spec, "optimizer")
    if forced and not _runs_on_cpu(name):
        key, message = "zero_force_ds_cpu_optimizer", f"is on, but {name!r} is offloaded only if it is False"
        yield cx.problem(f"deepspeed.{key}", f"{key} {message}", f"leave {key} out")


@rule("DSC109", "direct-storage-without-nvme")
def direct_storage_without_nvme(cx: Context) -> Iterator[Problem]:
    """aio.use_gds is on, which needs offload to NVMe."""
    if "aio" in cx.spec.deepspeed and _value(cx, "aio", {}).get("use_gds"):
        message = "use_gds needs offload to NVMe, which is not part of this version of dslpar"
        yield cx.problem("deepspeed.aio.use_gds", message, "leave use_gds out")


_TESTED = ("AdamW", "Adam", "FusedAdam", "DeepSpeedCPUAdam", "Lion")
"""Optimizers that DeepSpeed lists as tested with ZeRO. It lists torch's Adagrad too, but not as dslpar builds it."""


def _optimizer_name(cx: Context) -> str:
    """Return the optimizer's name; empty for a dotted name, whose class lint does not import."""
    optimizer = cx.spec.optimizer
    if isinstance(optimizer, sections.OtherOptimizer):
        return "" if "." in optimizer.target else optimizer.target
    return type(optimizer).__name__


def _is_elementwise(name: str) -> bool:
    if name in sections.OPTIMIZERS:
        return True
    from dslpar.schema.torch_optimizers import elementwise  # most configs do not need it

    return elementwise(name)


def _runs_on_cpu(name: str) -> bool:
    """Return whether DeepSpeed can run the optimizer on the CPU, as it can AdamW, Adam and SGD."""
    from dslpar.schema.torch_optimizers import named

    row = named(name)
    return name in sections.OPTIMIZERS or (row is not None and bool(row.offload or row.on_cpu))


def _value(cx: Context, name: str, default: Any) -> Any:
    """Return the value of a top-level key of `deepspeed`. Raises UnknownValueError if the value is invalid."""
    if f"deepspeed.{name}" in cx.reading.invalid:
        raise UnknownValueError(name)
    return cx.spec.deepspeed.get(name, default)


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
