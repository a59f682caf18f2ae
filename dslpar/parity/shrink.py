"""Shrink a job: the same layout and model in miniature, on few ranks, with a list of all changes.

    for small in shrink(job, max_ranks=8, steps=3): ...

Everything that determines the maths is kept (`small_mesh`, `small_model`), and so are the schedule, ZeRO's stage,
accumulation, recomputation, clipping, the optimizer and the form of the LR schedule. Settings that cannot be kept (the
precision, an accelerator's features, thousands of steps) are listed as changes or as not proven.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from dslpar.core.mesh import TensorMesh
from dslpar.layout import divisors, resolve
from dslpar.layout.batch import Batch
from dslpar.layout.family_interface import is_chain
from dslpar.layout.modes import cuboid_of
from dslpar.layout.resolve import Job, offloads
from dslpar.parity.small_mesh import (
    SmallWorlds,
    TooFewRanksError,
    axes_of,
    data_size,
    names_of_axes,
    parallel_of,
    small_worlds,
)
from dslpar.parity.small_model import Change, Sized, small_model, without_dropout
from dslpar.schema import sections, torch_optimizers
from dslpar.schema.datasets import ChatData, TextData
from dslpar.schema.parallel_forms import pipeline_of
from dslpar.schema.sections import OtherModel, Spec

SEQUENCE = 12
"""Tokens per sample. The number is rounded up to one that divides over the ranks."""
BUCKET = 3000
"""Elements of a ZeRO bucket: a small model then has several buckets, as a large model has with the default size."""


PERSISTS = 100
"""Elements below which ZeRO 3 keeps a parameter whole.

Only vectors are that small in a miniature, as with DeepSpeed's default in a large model. With DeepSpeed's default, ZeRO
3 would keep all parameters of a miniature whole.
"""


class SmallJob(NamedTuple):
    """A job in miniature."""

    job: Job
    axes: str
    """Axes of more than one rank: 'pipe 2, data 2, y 2'."""
    changes: tuple[Change, ...]
    """Values that differ from the config's."""
    not_proven: tuple[str, ...]
    """Parts of the job that a run in miniature does not cover."""


def shrink(job: Job, *, max_ranks: int, steps: int, full: bool = False) -> list[SmallJob]:
    """Return the job in one or more small worlds, which together contain each pair of its axes that fits.

    `full` keeps the model's sizes, and shrinks only the world and the batch.

    Raises:
        TooFewRanksError: an axis needs more ranks than `max_ranks`.
    """
    chosen = small_worlds(axes_of(job.spec, job.mesh), max_ranks, divide=full or not _can_shrink(job.spec.model))
    return [_small_jobs([(job, sizes, chosen)], steps, full)[0] for sizes in chosen.worlds]


def shrink_both(job: Job, other: Job, *, max_ranks: int, steps: int, full: bool = False) -> tuple[SmallJob, SmallJob]:
    """Return a job and another layout of it in miniature, with the same model and global batch.

    The layout of `other` can then resume from a checkpoint of the first.

    Raises:
        TooFewRanksError: all axes of a layout together need more ranks than `max_ranks`.
        ValueError: `other` differs in more than the layout: in a key that a resume must keep.
    """
    changed = [name for name in _OF_THE_RUN if _part(job.spec, name) != _part(other.spec, name)]
    if changed:
        raise ValueError(f"a resume may only change the layout: a change of {', '.join(changed)} would be another run")
    layouts = []
    for each in (job, other):
        chosen = small_worlds(axes_of(each.spec, each.mesh), max_ranks, divide=full or not _can_shrink(each.spec.model))
        if not chosen.all_together:
            message = f"a resume needs all axes of a layout at once: {chosen.ranks_needed} ranks, and not {max_ranks}"
            raise TooFewRanksError(message)
        layouts.append((each, chosen.worlds[0], chosen))
    first, second = _small_jobs(layouts, steps, full)
    return first, second


_OF_THE_RUN = (
    "model",
    "data",
    "optimizer",
    "lr_scheduler",
    "precision",
    "train.steps",
    "train.seed",
    "train.clip_grad_norm",
)
"""Keys that a resume on another layout must not change."""


def _part(spec: Spec, path: str) -> object:
    value: object = spec
    for name in path.split("."):
        value = getattr(value, name)
    return value


def at_full_size(job: Job) -> SmallJob:
    """Return the job for a proof in its own world, with its own layout, precision, model, data and batch.

    Only dropout is disabled.
    """
    model = without_dropout(job.spec.model)
    made = job if not model.changes else _resolved_again(job, replace(job.spec, model=model.model))
    return SmallJob(made, _axes_of_job(job), model.changes, (_LATER_STEPS, *_not_compared_on_devices(job)))


def with_small_model(job: Job) -> SmallJob:
    """Return the job with its model and batch in miniature, but its own world, layout and precision."""
    sizes = axes_of(job.spec, job.mesh).sizes
    worlds = SmallWorlds((sizes,), (), job.mesh.world_size)
    (made,) = _small_jobs([(job, sizes, worlds)], 1, full=False, on_devices=True)
    return made._replace(not_proven=(*made.not_proven, _LATER_STEPS, *_not_compared_on_devices(job)))


_LATER_STEPS = "weights after the step, and later steps: without --on-devices, three steps are compared"


def _not_compared_on_devices(job: Job) -> Iterator[str]:
    if isinstance(job.spec.model, OtherModel) and job.spec.model.is_of_transformers:
        yield "transformers' own forward: without --on-devices, one process is compared with it"


def _axes_of_job(job: Job) -> str:
    return ", ".join(names_of_axes(axes_of(job.spec, job.mesh).sizes)) or "one rank"


def _resolved_again(job: Job, spec: Spec) -> Job:
    """Resolve a changed spec in the job's world. The same layers get the same partition over stages."""
    return resolve.resolve(spec, job.mesh.world_size, job.path, job.trusted)


def one_process_job(small: Job) -> Job:
    """Return the same run on one process, with the layout's global batch."""
    spec = small.spec
    parallel = replace(spec.parallel, pipeline=None, tensor=None, context=None, expert=None)
    batch = sections.Batch(global_size=small.batch.global_size, accumulation=1)
    spec = replace(spec, parallel=parallel, schedule=None, zero=sections.Zero(), batch=batch)
    return resolve.resolve(spec, 1, small.path, small.trusted)


def with_axes(small: Job, names: Sequence[str]) -> Job:
    """Return a small job in which all axes but the named ones have one rank; model and global batch stay."""
    axes = axes_of(small.spec, small.mesh)
    sizes = {name: size if name in names else 1 for name, size in axes.sizes.items()}
    spec = parallel_of(small.spec, sizes, small.stages.counts if sizes["pipe"] > 1 else None)
    if sizes["pipe"] == 1:
        spec = replace(spec, schedule=None)
    spec = replace(
        spec, batch=sections.Batch(global_size=small.batch.global_size, accumulation=small.batch.accumulation)
    )
    return resolve.resolve(spec, axes.world(sizes), small.path, small.trusted)


def _can_shrink(model: Sized) -> bool:
    return not isinstance(model, OtherModel) or model.transformers is not None


Layout = tuple[Job, dict[str, int], SmallWorlds]
"""A job, the sizes of its axes in a small world, and all small worlds chosen for the job."""


def _small_jobs(layouts: Sequence[Layout], steps: int, full: bool, on_devices: bool = False) -> list[SmallJob]:
    """Return small jobs with the same model, sequence length and global batch.

    `on_devices`: the small jobs keep the job's precision and kernels, for one step on its own devices.
    """
    changes, lost = list[Change](), list[str]()
    model, jobs = layouts[0][0].spec.model, [job for job, _, _ in layouts]
    keeps_sizes = full or not _can_shrink(model)
    specs, counts = list[Spec](), list[tuple[int, ...] | None]()
    for job, sizes, _ in layouts:
        counts.append(_kept_counts(job, sizes["pipe"], lost) if keeps_sizes else _counts(job, sizes["pipe"]))
        spec = parallel_of(job.spec, sizes, counts[-1])
        specs.append(spec if sizes["pipe"] > 1 else replace(spec, schedule=None))
    seq_len = jobs[0].seq_len if full else math.lcm(*(_seq_len(spec) for spec in specs))
    seq_len = min(seq_len, jobs[0].seq_len or seq_len)
    if not keeps_sizes:
        stages = [sizes["pipe"] * (job.chunks.num if sizes["pipe"] > 1 else 1) for job, sizes, _ in layouts]
        num_layers = max(filter(None, (sum(each) for each in counts if each)), default=None)
        num_layers = num_layers or _num_layers(model, max(stages))
        made = small_model(model, [_cuboid(spec) for spec in specs], num_layers, seq_len, at_least=max(stages))
        model, changes, lost = made.model, [*made.changes], [*made.not_proven]
    else:
        made = without_dropout(model)
        model, changes = made.model, [*made.changes]
        if not full:
            lost.append("other sizes of the model: dslpar does not know which of its sizes may change")
    specs = [replace(spec, model=model) for spec in specs]
    batches = [_batch(job, spec, sizes) for spec, (job, sizes, _) in zip(specs, layouts, strict=True)]
    whole = math.lcm(*(batch.global_size for batch in batches))
    small = []
    for spec, batch, (job, sizes, chosen) in zip(specs, batches, layouts, strict=True):
        spec = replace(spec, batch=sections.Batch(global_size=whole, accumulation=batch.accumulation))
        settings = _settings_on_devices if on_devices else partial(_settings, steps=steps)
        spec, more, not_proven = settings(job, spec, seq_len=seq_len)
        made_job = resolve.resolve(spec, data_size(sizes) * sizes["pipe"] * _cuboid(spec).size, job.path, job.trusted)
        apart = [
            f"{one} together with {another}: it needs more ranks than there are (--ranks {chosen.ranks_needed} has all)"
            for one, another in chosen.apart
        ]
        ring = axes_of(job.spec, job.mesh).ring
        if ring and sizes[ring] == 2 < axes_of(job.spec, job.mesh).sizes[ring]:
            apart.append("the direction of the ring: of two ranks, both are the same (more --ranks have three)")
        if not chosen.all_together:
            apart.append(f"all axes at once: they ran in pairs (--ranks {chosen.ranks_needed} has all)")
        small.append(
            SmallJob(
                made_job,
                ", ".join(names_of_axes(sizes)) or "one rank",
                (*_layout_changes(job, made_job, sizes), *changes, *more),
                tuple(dict.fromkeys([*lost, *not_proven, *apart])),
            )
        )
    return small


def _cuboid(spec: Spec) -> TensorMesh:
    """Return the tensor cuboid; the number of heads decides how context parallelism splits into ring and Ulysses."""
    return cuboid_of(spec.parallel.tensor, spec.parallel.context, resolve.heads_of(spec.model))


def _layout_changes(job: Job, small: Job, sizes: Mapping[str, int]) -> list[Change]:
    before = axes_of(job.spec, job.mesh).sizes
    changes = [Change("world size", job.mesh.world_size, small.mesh.world_size)]
    changes += [Change(f"ranks of {name}", before[name], size) for name, size in sizes.items() if before[name] != size]
    changes += [
        Change(f"batch.{name}", getattr(job.batch, name), getattr(small.batch, name))
        for name in Batch._fields
        if getattr(job.batch, name) != getattr(small.batch, name)
    ]
    if job.seq_len and job.seq_len != small.seq_len:
        changes.append(Change("data.seq_len", job.seq_len, small.seq_len))
    if _by_hand(job):
        changes.append(Change("parallel.pipeline.counts", job.stages.counts, small.stages.counts))
    changes.append(Change("ranks that exchange heads", job.mesh.tensor.ulysses, small.mesh.tensor.ulysses))
    return [each for each in changes if each.before != each.after]


def _by_hand(job: Job) -> bool:
    pipeline = pipeline_of(job.spec)
    return pipeline is not None and bool(pipeline.counts or pipeline.stage_ids)


def _counts(job: Job, pipe: int) -> tuple[int, ...] | None:
    """Return layers per stage if the config gives them; None: it does not.

    If the config's numbers differ, one stage has two layers, at the relative place of the config's fullest stage.
    """
    if pipe == 1 or not _by_hand(job):
        return None
    given, stages = job.stages.counts or (), pipe * job.chunks.num
    counts = [1] * stages
    if len(set(given)) > 1:
        fullest = max(range(len(given)), key=given.__getitem__)
        counts[round(fullest * (stages - 1) / (len(given) - 1))] = 2
    return tuple(counts)


def _kept_counts(job: Job, pipe: int, lost: list[str]) -> tuple[int, ...] | None:
    """Return the config's layers per stage, for a model that keeps its layers; None if there are fewer stages."""
    if not _by_hand(job):
        return None
    if pipe == job.mesh.pipe:
        return job.stages.counts
    lost.append("the config's numbers of layers per stage: there are fewer stages here")
    return None


def _num_layers(model: Sized, stages: int) -> int | None:
    """Return one layer more than stages, so that one stage has two; at least two, at most the config's number."""
    num_layers = model.num_layers
    return None if num_layers is None else min(num_layers, max(2, stages + (stages > 1)))


def _seq_len(spec: Spec) -> int:
    """Return a small sequence length that divides over the ranks; in a ring, each rank's part also has two halves."""
    cuboid = _cuboid(spec)
    by = divisors.common(divisors.sequence(0, cuboid)) * (2 * cuboid.ring if cuboid.ring > 1 else 1)
    return -(-SEQUENCE // by) * by


def _batch(job: Job, spec: Spec, sizes: Mapping[str, int]) -> Batch:
    """Return twice the least micro-batch, and enough micro-batches for a pipeline to reach its steady state."""
    least = divisors.least_micro_size(_cuboid(spec))
    micro = 2 * least if job.batch.micro_size > 1 or least > 1 else 1
    if not is_chain(spec.model) and job.batch.micro_size >= 4:
        micro = max(micro, 4 // least * least)  # the model's loss compares samples, and two samples are too few
    accumulation = min(job.batch.accumulation, 2 * sizes["pipe"] if sizes["pipe"] > 1 else 2)
    if sizes["pipe"] > 1 and spec.schedule is not None and spec.schedule.type != "1f1b":
        accumulation = max(1, accumulation // sizes["pipe"]) * sizes["pipe"]
    if not is_chain(spec.model):
        accumulation = 1
    return Batch(micro * accumulation * data_size(sizes), micro, accumulation)


# ---- the other sections ----


def _settings_on_devices(job: Job, spec: Spec, seq_len: int) -> tuple[Spec, list[Change], list[str]]:
    """Return the spec with small ZeRO buckets and random samples, the changes, and what is not proven."""
    changes, lost = list[Change](), list[str]()
    zero = _zero(spec, changes, lost, keeps_disk=True)
    schedule = spec.schedule
    if schedule is not None:
        schedule = replace(schedule, num_microbatches=None)
    spec = replace(spec, zero=zero, schedule=schedule, data=_data(spec, seq_len, lost))
    return spec, changes, lost


def _settings(job: Job, spec: Spec, steps: int, seq_len: int) -> tuple[Spec, list[Change], list[str]]:
    """Return the spec with the settings besides layout and model in miniature, the changes, and what is not proven."""
    changes, lost = list[Change](), list[str]()
    precision = spec.precision
    if precision.dtype != "fp32":
        lost.append(
            f"precision {precision.dtype}: computed in fp32, without its rounding, its loss scale, and the fp32 masters"
            " that DeepSpeed keeps beside its weights"
        )
    zero = _zero(spec, changes, lost)
    train = replace(
        spec.train,
        steps=steps,
        eval_interval=None,
        save_interval=0,
        compile_backend="aot_eager",
        output_dir=None,
    )
    if spec.train.compile:
        changes.append(Change("train.compile_backend", spec.train.compile_backend, "aot_eager"))
        lost.append("kernels that torch.compile generates: here its graphs run with torch's own kernels")
    schedule = spec.lr_scheduler
    if isinstance(schedule, sections.LRScheduler):
        warmup = min(schedule.warmup_steps, 2)
        if warmup != schedule.warmup_steps:
            changes.append(Change("lr_scheduler.warmup_steps", schedule.warmup_steps, warmup))
        schedule = replace(schedule, warmup_steps=warmup)
    if spec.train.steps != steps:
        changes.append(Change("train.steps", spec.train.steps, steps))
    pipeline_schedule = spec.schedule
    if pipeline_schedule is not None:
        pipeline_schedule = replace(pipeline_schedule, num_microbatches=None)
    checkpointing = spec.activation_checkpoint
    if checkpointing is not None and checkpointing.interval > 2:
        changes.append(Change("activation_checkpoint.interval", checkpointing.interval, 2))
        checkpointing = replace(checkpointing, interval=2)
    if job.mesh.tensor.symmetric_memory:
        lost.append("symmetric memory: it needs GPUs, so tokens were sent around rings")
    data = _data(spec, seq_len, lost)
    spec = replace(
        spec,
        precision=sections.Precision(),
        zero=zero,
        train=train,
        lr_scheduler=schedule,
        schedule=pipeline_schedule,
        activation_checkpoint=checkpointing,
        monitor=sections.Monitor(),
        data=data,
        checkpoint=sections.Checkpoint(),
        optimizer=_optimizer(spec, changes, lost),
        cluster=sections.Cluster(),
    )
    return spec, changes, lost


def _data(spec: Spec, seq_len: int, lost: list[str]) -> Any:
    """Return the data section. If random samples replace the data, only the sequence length is kept."""
    if not _draws_data(spec.model):
        return spec.data
    lost.append(f"the data of {type(spec.data).__name__}: random samples in the order that the run's would have")
    if isinstance(spec.data, ChatData):
        lost.append("conversations that are packed or padded: samples fill their sequence")
    return TextData(seq_len=seq_len) if seq_len else TextData()


def _draws_data(model: Sized) -> bool:
    """Return whether random samples replace the data; the inputs of a user's class are known only from its data."""
    return not isinstance(model, OtherModel) or model.is_of_transformers or model.layers is not None


def _zero(spec: Spec, changes: list[Change], lost: list[str], keeps_disk: bool = False) -> sections.Zero:
    """Return ZeRO with small buckets, and with NVMe offload moved to host memory unless `keeps_disk`."""
    extra = dict(spec.zero.extra)

    def put(key: str, value: object) -> None:
        if extra.get(key) != value:
            changes.append(Change(f"zero.{key}", extra.get(key), value))
            extra[key] = value

    for what in ("optimizer", "param"):
        device = extra.get(f"offload_{what}")
        if isinstance(device, Mapping) and device.get("device") == "nvme" and not keeps_disk:
            put(f"offload_{what}", {"device": "cpu"})
    if spec.zero.stage == 3 and extra.get("stage3_param_persistence_threshold", PERSISTS) >= PERSISTS:
        put("stage3_param_persistence_threshold", PERSISTS)
    for key in ("zero_hpz_partition_size", "zero_quantized_weights", "zero_quantized_gradients"):
        if extra.get(key) not in (None, 1, False):
            put(key, 1 if key.endswith("size") else False)
            lost.append(f"zero.{key}: it needs the nodes of a cluster, or kernels of a GPU")
    if spec.zero.stage in (1, 2):
        put("reduce_bucket_size", BUCKET)
        put("allgather_bucket_size", BUCKET)
    return replace(spec.zero, extra=extra)


def _optimizer(spec: Spec, changes: list[Change], lost: list[str]) -> Any:
    """Return the optimizer, or AdamW with the same lr and weight decay if it has no CPU kernel."""
    optimizer = spec.optimizer
    if not isinstance(optimizer, sections.OtherOptimizer):
        return optimizer
    row = torch_optimizers.named(optimizer.target)
    dotted = row.dotted if row else optimizer.target
    if not dotted.startswith("deepspeed.") or (row and row.on_cpu and offloads(spec, "optimizer")):
        return optimizer
    changes.append(Change("optimizer.type", optimizer.target, "AdamW"))
    lost.append(f"the step of {optimizer.target}, and its other arguments: it has no kernel for CPUs")
    return sections.AdamW(lr=optimizer.lr, weight_decay=optimizer.weight_decay)
