"""ZER104, ZER105, ZER107: stages and optimizers for ZeRO's offload to the CPU; DEAD107: keys of offload to NVMe."""

from __future__ import annotations

from collections.abc import Iterator

from dslpar.layout.resolve import offloads
from dslpar.linter.context import Context
from dslpar.linter.problem import Problem, require
from dslpar.linter.rule import rule
from dslpar.schema.sections import OtherOptimizer


@rule("ZER104", "offload-without-shards")
def offload_without_shards(cx: Context) -> Iterator[Problem]:
    """The config offloads state that ZeRO does not shard at this stage."""
    for what, least in (("optimizer", 1), ("param", 3)):
        if offloads(cx.spec, what) and cx.spec.zero.stage < least:
            message = f"offload_{what} has no effect at ZeRO stage {cx.spec.zero.stage}"
            hint = f"zero.stage={least}{' or more' if least < 3 else ''}, or leave zero.offload_{what} out"
            yield cx.problem((f"zero.offload_{what}.device", f"zero.offload_{what}"), message, hint)


@rule("ZER105", "optimizer-in-the-wrong-place")
def optimizer_in_the_wrong_place(cx: Context) -> Iterator[Problem]:
    """The optimizer runs on the CPU and offload is off, or it runs on the accelerator and offload is on."""
    name, offloaded = require(cx.spec.optimizer, OtherOptimizer).target, offloads(cx.spec, "optimizer")
    from dslpar.schema.torch_optimizers import named

    row = named(name)
    if row is None or row.offload in (None, offloaded):
        return
    if offloaded:
        message = f"{name} runs on the accelerator, but zero.offload_optimizer is on"
        hint = "optimizer.type='AdamW' or 'DeepSpeedCPUAdam'"
    else:
        message = f"{name} runs on the CPU, but zero.offload_optimizer is off"
        stage = "" if cx.spec.zero.stage else "zero.stage=1 with "
        hint = f"{stage}zero.offload_optimizer='cpu', or optimizer.type='AdamW'"
    yield cx.problem("optimizer", message, hint)


@rule("ZER107", "partial-offload")
def partial_offload(cx: Context) -> Iterator[Problem]:
    """Partial offload is set at a stage, or for an optimizer, that does not support it."""
    if cx.spec.zero.stage == 3 and is_cpu_adam(cx):
        return
    offload = cx.spec.zero.extra.get("offload_optimizer", {})
    for key, partial in (("ratio", offload.get("ratio", 1) < 1), ("super_offload", offload.get("super_offload"))):
        if partial:
            message = f"offload_optimizer.{key} needs ZeRO stage 3 and the optimizer 'DeepSpeedCPUAdam'"
            yield cx.problem(f"zero.offload_optimizer.{key}", message, f"leave {key} out")


@rule("DEAD107", "keys-of-nvme", "warning")
def keys_of_nvme(cx: Context) -> Iterator[Problem]:
    """Keys of offload to NVMe are set, but offload is to the CPU."""
    for what in ("optimizer", "param"):
        for key in cx.spec.zero.extra[f"offload_{what}"] if offloads(cx.spec, what) else ():
            if key in _OF_NVME:
                message = f"{key} has no effect: it is a key of offload to NVMe"
                yield cx.problem(f"zero.offload_{what}.{key}", message, f"leave {key} out")


_OF_NVME = frozenset(
    ("nvme_path", "buffer_count", "buffer_size", "max_in_cpu", "pipeline_read", "pipeline_write", "fast_init")
)


def is_cpu_adam(cx: Context) -> bool:
    """Return whether the optimizer is DeepSpeed's Adam for the CPU."""
    return getattr(cx.reading.spec.optimizer, "target", "") == "DeepSpeedCPUAdam"


RULES = (offload_without_shards, optimizer_in_the_wrong_place, partial_offload, keys_of_nvme)
