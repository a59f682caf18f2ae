"""`dslpar show`: a Job for the eye and for programs: sizes, rank groups, stages, batch, DeepSpeed's dict."""

from __future__ import annotations

from collections.abc import Iterable

from dslpar.ds_config import ds_config
from dslpar.job import Job

AXES = ("pipe", "data", "tensor", "x", "y", "z")
_SHOWN_GROUPS = 8


def as_record(job: Job) -> dict[str, object]:
    """The JSON of `dslpar show` (DESIGN, section 8)."""
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
    }


def as_json(job: Job) -> str:
    """The record as JSON text."""
    import json

    return json.dumps(as_record(job), indent=2) + "\n"


def as_text(job: Job) -> str:
    """The same for a person; of many groups, the first and the last."""
    import json

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
        "deepspeed",
        *("  " + line for line in json.dumps(ds_config(job), indent=2).splitlines()),
    ]
    return "\n".join(lines) + "\n"


FORMATS = {"text": as_text, "json": as_json}


def _stage_lines(job: Job) -> list[str]:
    if job.stages.actual_ids is None or job.stages.counts is None:
        return []
    counts = ", ".join(f"{stage}: {count}" for stage, count in enumerate(job.stages.counts))
    return [f"  layers   of each stage: {counts}"]


def _some(groups: Iterable[tuple[int, ...]]) -> str:
    shown = [str(list(ranks)) for ranks in groups]
    if len(shown) > _SHOWN_GROUPS:
        left = len(shown) - _SHOWN_GROUPS
        shown = [*shown[: _SHOWN_GROUPS - 1], f"... {left} more ...", shown[-1]]
    return "  ".join(shown)


def _listed(items: tuple[int, ...] | None) -> list[int] | None:
    return None if items is None else list(items)
