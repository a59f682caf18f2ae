"""Lint rules about MoCo's keys: layouts that do not fit its comparison of all samples of a batch."""

from __future__ import annotations

from collections.abc import Iterator

from dslpar.layout.nearest import multiples
from dslpar.linter.context import Context
from dslpar.linter.problem import Problem
from dslpar.linter.rule import rule
from dslpar.models.moco.layout import samples
from dslpar.models.moco.section import MoCo


@rule("PIP211", "moco-over-stages")
def moco_over_stages(cx: Context) -> Iterator[Problem]:
    """A MoCo model has several pipeline stages, but it is not a chain of layers that a pipeline can cut."""
    cx.model.of(MoCo)
    stages = cx.pipeline.stages
    if stages > 1:
        message = f"{stages} stages: an encoder of two views and its momentum copy are not a chain of layers"
        key = "parallel.pipeline.size" if cx.spec.parallel.pipeline is not None else "train.dist"
        yield cx.problem(key, message, "leave it out: use tensor and data parallelism for a MoCo")


@rule("BAT220", "moco-accumulates")
def moco_accumulates(cx: Context) -> Iterator[Problem]:
    """A MoCo model is trained with gradient accumulation, but its loss compares all samples of a step."""
    cx.model.of(MoCo)
    accumulation = cx.layout.batch.accumulation
    if accumulation > 1:
        message = f"accumulation {accumulation}: a MoCo compares all samples of a step, not of a micro-batch"
        yield cx.problem(
            ("batch.accumulation", "batch.micro_size", "batch.global_size"),
            message,
            f"batch.accumulation=1 with batch.micro_size={cx.layout.batch.micro_size * accumulation}",
        )


@rule("BAT221", "moco-samples-do-not-divide")
def moco_samples_do_not_divide(cx: Context) -> Iterator[Problem]:
    """The micro-batch of a MoCo does not divide over the ranks that split tokens."""
    cx.model.of(MoCo)
    size, needed = cx.layout.batch.micro_size, samples(cx.tensor.cuboid)
    if size % needed.by:
        message = f"micro_size {size} is not divisible by {needed.why}, over which its heads split the samples"
        hint = f"batch.micro_size={' or '.join(map(str, multiples(size, needed.by)))}"
        yield cx.problem("batch.micro_size", message, hint)


@rule("PRE202", "moco-in-half-precision")
def moco_in_half_precision(cx: Context) -> Iterator[Problem]:
    """A MoCo model is trained in bf16 or fp16, in which the momentum encoder would not change."""
    cx.model.of(MoCo)
    dtype = cx.spec.precision.dtype
    if dtype != "fp32":
        message = f"precision {dtype!r}: steps of the momentum encoder are smaller than its weights' rounding"
        yield cx.problem("precision.dtype", message, "'fp32'")


RULES = (moco_over_stages, moco_accumulates, moco_samples_do_not_divide, moco_in_half_precision)
