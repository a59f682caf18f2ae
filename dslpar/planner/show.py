"""Report of `dslpar show` as text, JSON and a picture of the schedule.

The report has a job's sizes, rank groups, stages, batch, conditions of divisibility, traffic, schedule, memory, and
DeepSpeed config. The functions take the job and its forecast `made`, which is None if the machine or the costs of the
model's layers are unknown.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from dslpar.core.mesh import TensorMesh
from dslpar.core.visible import json_text, visible
from dslpar.forecast import comparison
from dslpar.forecast.device import GIB
from dslpar.forecast.plan import Forecast
from dslpar.forecast.stage_memory import StageMemory, binding_at_uneven_load, stage_memory, uneven_load
from dslpar.forecast.workload import workload_of
from dslpar.layout import bubble
from dslpar.layout.deepspeed_config import ds_config
from dslpar.layout.divisors import Condition
from dslpar.layout.family_interface import conditions, layout_of
from dslpar.layout.resolve import Job
from dslpar.layout.schedule import Schedule
from dslpar.layout.simulation import Timeline
from dslpar.reporting import plot_schedule
from dslpar.reporting.layout_record import AXES as AXES
from dslpar.reporting.layout_record import axes_of, layout_record, schedule_record, schedule_type
from dslpar.reporting.picture import Picture
from dslpar.schema.sections import Model

_SHOWN_GROUPS = 8
_SHOWN_RANKS = 16
_DRAWN_ACTIONS = 5000


def as_record(job: Job, made: Forecast | None = None) -> dict[str, object]:
    """Return the values of `dslpar show --format json`; programs rely on their names."""
    return {
        **layout_record(job),
        "divisors": [{"key": one.key, "value": one.value, "by": one.by, "why": one.why} for one in _divisors(job)],
        "traffic": traffic._asdict() if (traffic := comparison.summary(job)) else None,
        "schedule": schedule_record(job) if job.mesh.pipe > 1 else None,
        "memory": _memory(job, made),
    }


def as_json(job: Job, made: Forecast | None = None) -> str:
    """Return the record as JSON."""
    return json_text(as_record(job, made))


def as_text(job: Job, made: Forecast | None = None) -> str:
    """Return the report as text; if an axis has many groups, it lists only the first ones and the last."""
    mesh, cuboid = job.mesh, job.mesh.tensor
    x, y, z = cuboid.shape
    mode = f" ({cuboid.mode}: x {x}, y {y}, z {z})" if cuboid.mode else ""
    lines = [
        f"{job.path}: {mesh.world_size} ranks",
        f"  pipeline {mesh.pipe} * data {mesh.data}{_context(cuboid)} * tensor {cuboid.beside_context}{mode}",
        *_expert_lines(job),
        f"  order    {', '.join(mesh.order)} (slow to fast)",
        f"  batch    global {job.batch.global_size} = micro {job.batch.micro_size}"
        f" * accumulation {job.batch.accumulation} * data {mesh.data}",
        *_stage_lines(job),
        *_schedule_lines(job),
        *_memory_lines(job, made),
        "groups",
        *(f"  {axis + ' ':<7}{_some(mesh.groups(axis))}" for axis in axes_of(job) if mesh.size(axis) > 1),
        *_divisor_lines(job),
        *_traffic_lines(job),
        "deepspeed",
        *("  " + line for line in json_text(ds_config(job)).splitlines()),
    ]
    return "".join(visible(line) + "\n" for line in lines)


def _expert_lines(job: Job) -> list[str]:
    mesh, cuboid = job.mesh, job.mesh.tensor
    if not cuboid.exchanges_tokens:
        return []
    parts = f", tokens in {cuboid.expert_chunks} parts" if cuboid.expert_chunks > 1 else ""
    return [f"  expert   {mesh.size('expert')} * expert_data {mesh.size('expert_data')} in each stage{parts}"]


def _context(cuboid: TensorMesh) -> str:
    """Return context parallelism as a factor of the number of ranks: " * context 4 (ring)".

    The text is empty without context parallelism, and for mode 'sequence', whose tensor size already includes it.
    """
    if cuboid.context == 1 or cuboid.mode == "sequence":
        return ""
    parts = f": ulysses {cuboid.ulysses}, ring {cuboid.ring}" if cuboid.impl == "hybrid" else ""
    return f" * context {cuboid.context} ({cuboid.impl}{parts})"


def as_svg(job: Job, made: Forecast | None = None) -> str:
    """Draw the schedule as an SVG file; a step with too many micro-batches is drawn with fewer."""
    timeline, title = _drawn_step(job)
    return plot_schedule.draw(timeline, job.chunks, title)


def schedule_picture(job: Job) -> Picture | None:
    """Draw the schedule for a page; None if the pipeline has too many ranks to simulate one round of micro-batches."""
    if bubble.num_actions(_round(job)) > bubble.MOST_ACTIONS:
        return None
    timeline, title = _drawn_step(job)
    return plot_schedule.picture(timeline, job.chunks, title)


def _round(job: Job) -> Schedule:
    return job.schedule._replace(num_micro_batches=job.mesh.pipe)


def _drawn_step(job: Job) -> tuple[Timeline, str]:
    schedule, count = job.schedule, job.batch.accumulation
    rounds = max(1, _DRAWN_ACTIONS // bubble.num_actions(_round(job)))
    drawn = min(count, rounds * job.mesh.pipe)
    timeline = bubble.simulate_job(job, drawn)
    assert timeline is not None, "fewer actions are drawn than simulated"
    shown = f"{drawn} micro-batches" + (f" (the step has {count})" if drawn < count else "")
    chunks = f", {schedule.chunks.num} chunks each" if schedule.chunks.num > 1 else ""
    over = f"{schedule_type(job)} over {job.mesh.pipe} ranks{chunks}"
    return timeline, f"{job.path}: {over}, {shown}: bubble {_percent(_bubble(job))}"


def _bubble(job: Job) -> float:
    return bubble.bubble_of(job.schedule, recomputes=job.spec.activation_checkpoint is not None)


FORMATS = {"text": as_text, "json": as_json, "svg": as_svg}


def _stage_lines(job: Job) -> list[str]:
    if job.stages.actual_ids is None or job.stages.counts is None:
        return []
    counts = ", ".join(f"{stage}: {count}" for stage, count in enumerate(job.stages.counts))
    return [f"  layers   per stage: {counts}"]


def _schedule_lines(job: Job) -> Iterator[str]:
    if job.mesh.pipe == 1:
        return
    schedule = job.schedule
    chunks = f" of {schedule.chunks.num} chunks" if schedule.chunks.num > 1 else ""
    line = f"  schedule {schedule_type(job)}{chunks}, {schedule.num_micro_batches} micro-batches"
    yield f"{line}: bubble {_percent(_bubble(job))} (a rank is idle for this share of the step)"
    held = [f"{rank}: {round(schedule.held(rank).total, 2):g}" for rank in range(min(job.mesh.pipe, _SHOWN_RANKS))]
    more = ", ..." if job.mesh.pipe > _SHOWN_RANKS else ""
    yield f"  holds    micro-batches of activations, at most, by rank: {', '.join(held)}{more}"


def memory_of(job: Job, made: Forecast | None) -> tuple[StageMemory, ...] | None:
    """Return the memory of each pipeline rank; None if the model's costs are unknown."""
    if made is not None:
        return made.memory
    workload = workload_of(job)
    return None if workload is None else tuple(stage_memory(workload, rank) for rank in range(job.mesh.pipe))


def _memory(job: Job, made: Forecast | None) -> dict[str, object] | None:
    found = memory_of(job, made)
    if found is None:
        return None
    binding = max(found, key=lambda each: each.total)
    return {"stage": binding.pipe_rank, "bytes": round(binding.total), "verdict": made and made.verdict}


def _memory_lines(job: Job, made: Forecast | None) -> Iterator[str]:
    found = memory_of(job, made)
    if found is None:
        return
    binding = max(found, key=lambda each: each.total)
    line = f"  memory   stage {binding.pipe_rank} needs {binding.total / GIB:.1f} GiB, the most of all"
    if made is not None:
        device = made.machine.device
        line += f" ({device.name} has {device.memory_bytes / GIB:.1f}: {made.verdict})"
    yield line
    workload = workload_of(job) if made is None else made.workload
    if workload is not None and (uneven := binding_at_uneven_load(workload)) is not None:
        load = f"{uneven_load(workload):g} times the even load"
        yield f"  experts  {uneven.total / GIB:.1f} GiB if a rank's experts get {load}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _divisors(job: Job) -> list[Condition]:
    """Return the sizes that must divide, and the padded vocabulary, each with its full config key."""
    model, cuboid = job.spec.model, job.mesh.tensor
    found = conditions(model, cuboid, job.seq_len, job.batch.micro_size)
    if isinstance(model, Model):
        found += [each for each in layout_of(model).padding(model, cuboid) if each.by > 1]
    return [each._replace(key=each.key if "." in each.key else f"model.{each.key}") for each in found]


def _divisor_lines(job: Job) -> Iterator[str]:
    found = _divisors(job)
    if found:
        yield "divides"
    shown = dict[str, int]()
    for key, value in dict.fromkeys((each.key, each.value) for each in found):
        reasons = ", ".join(dict.fromkeys(each.why for each in found if (each.key, each.value) == (key, value)))
        # A key may have several values. For a number of heads, a later value that is a multiple of the first is a
        # number of features. A list of heads has several numbers of heads. A key `*_ratio` has only features.
        unit = " features" if key.endswith("_ratio") or (key in shown and value % shown[key] == 0) else ""
        shown.setdefault(key, value)
        yield f"  {key} {value:,}{unit} by {reasons}"


def _traffic_lines(job: Job) -> Iterator[str]:
    sent = comparison.summary(job)
    if sent is None:
        return
    yield f"sends, elements per rank for a micro-batch of {sent.tokens:,} tokens, forward and backward"
    stages = f"all {job.chunks.stages} stages" if job.mesh.pipe > 1 else "all"
    for name, by_axis in (("a layer", sent.layer), (stages, sent.model)):
        axes = ", ".join(f"{axis}: {elements:,}" for axis, elements in by_axis.items())
        yield f"  {name:<7} {sum(by_axis.values()):,}" + (f" ({axes})" if by_axis else "")
    if len(sent.context) > 1:
        yield (
            "  context "
            + ", ".join(f"by {impl} {elements:,}" for impl, elements in sent.context.items())
            + " for attention"
        )
    if job.mesh.tensor.mode != "1d":
        needed = "never" if sent.break_even_tokens is None else f"from {sent.break_even_tokens:,} tokens on"
        yield f"  less than 1d on {job.mesh.tensor.size} ranks: {needed}"


def _some(groups: Iterable[tuple[int, ...]]) -> str:
    shown = [str(list(ranks)) for ranks in groups]
    if len(shown) > _SHOWN_GROUPS:
        left = len(shown) - _SHOWN_GROUPS
        shown = [*shown[: _SHOWN_GROUPS - 1], f"... {left} more ...", shown[-1]]
    return "  ".join(shown)
