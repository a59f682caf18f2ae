"""A job's layout as a record: sizes, rank groups, stages, batch, DeepSpeed config; part of `dslpar show`'s JSON."""

from __future__ import annotations

from dslpar.layout.bubble import bubble_of
from dslpar.layout.deepspeed_config import ds_config
from dslpar.layout.resolve import Job

AXES = ("pipe", "data", "tensor", "x", "y", "z")


def axes_of(job: Job) -> tuple[str, ...]:
    """Return the axes whose rank groups are shown."""
    return (*AXES, "expert", "expert_data") if job.mesh.tensor.exchanges_tokens else AXES


def layout_record(job: Job) -> dict[str, object]:
    """Return a job's layout as a record for JSON; programs rely on the names in it."""
    mesh, cuboid, stages = job.mesh, job.mesh.tensor, job.stages
    return {
        "world_size": mesh.world_size,
        "parallel": {
            "data": mesh.data,
            "pipeline": mesh.pipe,
            "context": {"size": cuboid.context, "impl": cuboid.impl, "ring": cuboid.ring, "ulysses": cuboid.ulysses},
            "expert": _expert(job),
            "tensor": {"size": cuboid.beside_context, "mode": cuboid.mode, "shape": list(cuboid.shape)},
            "order": list(mesh.order),
        },
        "groups": {axis: [list(ranks) for ranks in mesh.groups(axis)] for axis in axes_of(job)},
        "stages": {
            "auto_pipeline_stage_id": _listed(stages.auto_ids),
            "actual_pipeline_stage_id": _listed(stages.actual_ids),
            "counts": _listed(stages.counts),
        },
        "batch": job.batch._asdict(),
        "deepspeed": ds_config(job),
    }


def _expert(job: Job) -> dict[str, object] | None:
    """Return expert parallelism: the ranks that hold all experts, and the ranks that hold the same ones."""
    mesh, cuboid = job.mesh, job.mesh.tensor
    if not cuboid.exchanges_tokens:
        return None
    return {"size": mesh.size("expert"), "data": mesh.size("expert_data"), "chunks": cuboid.expert_chunks}


def schedule_record(job: Job) -> dict[str, object]:
    """Return a pipeline's schedule as a record for JSON.

    `bubble` is the share of a step in which a rank is idle. `held` has the most micro-batches whose activations a rank
    holds at once, and `deferred` the most that wait for the gradients of weights.
    """
    schedule, recomputes = job.schedule, job.spec.activation_checkpoint is not None
    held = [schedule.held(rank) for rank in range(job.mesh.pipe)]
    return {
        "type": schedule_type(job),
        "num_model_chunks": schedule.chunks.num,
        "num_micro_batches": schedule.num_micro_batches,
        "bubble": bubble_of(schedule, recomputes=recomputes),
        "held": [each.total for each in held],
        "deferred": [each.deferred for each in held],
    }


def schedule_type(job: Job) -> str:
    """Return the schedule's name; by default it is DeepSpeed's schedule, 1f1b."""
    return job.spec.schedule.type if job.spec.schedule is not None else "1f1b"


def _listed(items: tuple[int, ...] | None) -> list[int] | None:
    return None if items is None else list(items)
