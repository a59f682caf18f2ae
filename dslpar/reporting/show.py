"""The report of `dslpar show`, as text and as JSON: a Job's sizes, rank groups, stages, batch, divisors, traffic, and
the DeepSpeed config.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from dslpar.core.visible import json_text, visible
from dslpar.forecast import comparison
from dslpar.layout.deepspeed_config import ds_config
from dslpar.layout.divisors import Condition
from dslpar.layout.family import conditions, layout_of
from dslpar.layout.resolve import Job
from dslpar.schema.sections import Model

AXES = ("pipe", "data", "tensor", "x", "y", "z")
_SHOWN_GROUPS = 8


def as_record(job: Job) -> dict[str, object]:
    """Return the values of `dslpar show --format json`; programs rely on their names."""
    mesh, cuboid, stages = job.mesh, job.mesh.tensor, job.stages
    return {
        "world_size": mesh.world_size,
        "parallel": {
            "data": mesh.data,
            "pipeline": mesh.pipe,
            "tensor": {"size": cuboid.size, "mode": cuboid.mode, "shape": list(cuboid.shape)},
            "order": list(mesh.order),
        },
        "groups": {axis: [list(ranks) for ranks in mesh.groups(axis)] for axis in AXES},
        "stages": {
            "auto_pipeline_stage_id": _listed(stages.auto_ids),
            "actual_pipeline_stage_id": _listed(stages.actual_ids),
            "counts": _listed(stages.counts),
        },
        "batch": job.batch._asdict(),
        "deepspeed": ds_config(job),
        "divisors": [{"key": one.key, "value": one.value, "by": one.by, "why": one.why} for one in _divisors(job)],
        "traffic": traffic._asdict() if (traffic := comparison.summary(job)) else None,
    }


def as_json(job: Job) -> str:
    """Return the record as JSON."""
    return json_text(as_record(job))


def as_text(job: Job) -> str:
    """Return the record as text; of many groups, only the first ones and the last."""
    mesh, cuboid = job.mesh, job.mesh.tensor
    x, y, z = cuboid.shape
    mode = f" ({cuboid.mode}: x {x}, y {y}, z {z})" if cuboid.mode else ""
    lines = [
        f"{job.path}: {mesh.world_size} ranks",
        f"  pipeline {mesh.pipe} * data {mesh.data} * tensor {cuboid.size}{mode}",
        f"  order    {', '.join(mesh.order)} (slow to fast)",
        f"  batch    global {job.batch.global_size} = micro {job.batch.micro_size}"
        f" * accumulation {job.batch.accumulation} * data {mesh.data}",
        *_stage_lines(job),
        "groups",
        *(f"  {axis:7}{_some(mesh.groups(axis))}" for axis in AXES if mesh.size(axis) > 1),
        *_divisor_lines(job),
        *_traffic_lines(job),
        "deepspeed",
        *("  " + line for line in json_text(ds_config(job)).splitlines()),
    ]
    return "".join(visible(line) + "\n" for line in lines)


FORMATS = {"text": as_text, "json": as_json}


def _stage_lines(job: Job) -> list[str]:
    if job.stages.actual_ids is None or job.stages.counts is None:
        return []
    counts = ", ".join(f"{stage}: {count}" for stage, count in enumerate(job.stages.counts))
    return [f"  layers   of each stage: {counts}"]


def _divisors(job: Job) -> list[Condition]:
    """Return the conditions of divisibility, with full keys, and what the vocabulary is padded to."""
    model, cuboid = job.spec.model, job.mesh.tensor
    found = conditions(model, cuboid, job.seq_len, job.batch.micro_size)
    if isinstance(model, Model):
        found += [each for each in layout_of(model).padding(model, cuboid) if each.by > 1]
    return [each._replace(key=each.key if "." in each.key else f"model.{each.key}") for each in found]


def _divisor_lines(job: Job) -> Iterator[str]:
    found = _divisors(job)
    if found:
        yield "divides"
    shown = set[str]()
    for key, value in dict.fromkeys((each.key, each.value) for each in found):
        reasons = ", ".join(dict.fromkeys(each.why for each in found if (each.key, each.value) == (key, value)))
        unit = " features" if key in shown else ""  # of heads: those that a weight has for them
        shown.add(key)
        yield f"  {key} {value:,}{unit} by {reasons}"


def _traffic_lines(job: Job) -> Iterator[str]:
    sent = comparison.summary(job)
    if sent is None:
        return
    yield f"sends, elements a rank for a micro-batch of {sent.tokens:,} tokens, forward and backward"
    stages = f"all {job.mesh.pipe} stages" if job.mesh.pipe > 1 else "all"
    for name, by_axis in (("a layer", sent.layer), (stages, sent.model)):
        axes = ", ".join(f"{axis}: {elements:,}" for axis, elements in by_axis.items())
        yield f"  {name:<7} {sum(by_axis.values()):,}" + (f" ({axes})" if by_axis else "")
    if job.mesh.tensor.mode != "1d":
        needed = "never" if sent.break_even_tokens is None else f"from {sent.break_even_tokens:,} tokens on"
        yield f"  less than 1d on {job.mesh.tensor.size} ranks: {needed}"


def _some(groups: Iterable[tuple[int, ...]]) -> str:
    shown = [str(list(ranks)) for ranks in groups]
    if len(shown) > _SHOWN_GROUPS:
        left = len(shown) - _SHOWN_GROUPS
        shown = [*shown[: _SHOWN_GROUPS - 1], f"... {left} more ...", shown[-1]]
    return "  ".join(shown)


def _listed(items: tuple[int, ...] | None) -> list[int] | None:
    return None if items is None else list(items)
