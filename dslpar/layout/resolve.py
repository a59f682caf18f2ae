"""From a Spec and a world size to a Job: every inferred value decided, nothing clamped.

Each function here is plain arithmetic over the spec, used twice: by the linter, to say what is wrong, and by `resolve`,
on a spec that the linter has passed. LiBai's `train.dist` and dslpar's `parallel` meet here: below this file there is
one form.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from dslpar.core import mesh
from dslpar.core.frozen import frozen
from dslpar.core.named_tuple import NamedTuple
from dslpar.layout import listed_stages
from dslpar.layout import stages as cut
from dslpar.layout.divisors import least_micro_size
from dslpar.schema import sections as spec


class Batch(NamedTuple):
    """Samples of one step; global_size = micro_size * accumulation * data size."""

    global_size: int
    micro_size: int
    accumulation: int


class Stages(NamedTuple):
    """The cut of layers over stages; ids are None where there is one stage, all where only the built model can tell."""

    auto_ids: tuple[int, ...] | None
    actual_ids: tuple[int, ...] | None
    counts: tuple[int, ...] | None


@frozen
class Job:
    """A run, decided to the last value."""

    path: str
    """The config file."""
    spec: spec.Spec
    """What the config says."""
    mesh: mesh.Mesh
    """All ranks."""
    stages: Stages
    """Which layers stand on which stage."""
    batch: Batch
    """Samples of a step."""
    seq_len: int
    """Tokens of a sample; 0 where the model is not known."""
    output_dir: str
    """Where the run writes."""


def resolve(spec_: spec.Spec, world_size: int, path: str = "") -> Job:
    """Decide everything; the spec has passed the linter for this world."""
    pipeline, cuboid = pipeline_of(spec_), cuboid_of(tensor_of(spec_))
    size = pipeline.size if pipeline else 1
    data = world_size // (size * cuboid.size)
    order = spec_.parallel.order or mesh.STANDARD_ORDER
    whole = mesh.Mesh(pipe=size, data=data, tensor=cuboid, order=order)
    assert whole.world_size == world_size, "a world that lint would have refused"
    return Job(
        path=path,
        spec=spec_,
        mesh=whole,
        stages=stages_of(spec_, pipeline),
        batch=batch_of(asked_batch(spec_), data, least_micro_size(cuboid)),
        seq_len=seq_len_of(spec_),
        output_dir=spec_.train.output_dir or default_output_dir(path),
    )


# Sizes, in either form --------------------------------------------------------------------------------------------


def pipeline_of(spec_: Any) -> Any:
    """The PipelineParallel of either form, or None."""
    if spec_.parallel.pipeline is not None:
        return spec_.parallel.pipeline
    dist = spec_.train.dist
    size, ids = dist.pipeline_parallel_size or 1, dist.custom_pipeline_stage_id
    if size == 1 and ids is None:
        return None
    return spec.PipelineParallel(size=size, stage_ids=ids, method=None if ids else "libai")


def tensor_of(spec_: Any) -> Any:
    """The TensorParallel of either form, or None."""
    if spec_.parallel.tensor is not None:
        return spec_.parallel.tensor
    size = spec_.train.dist.tensor_parallel_size or 1
    return spec.TensorParallel(size=size, mode="1d") if size > 1 else None


# The cuboid -------------------------------------------------------------------------------------------------------

Axes = tuple[int, int, int, int]


def _square(tensor: Any) -> Axes | None:
    side = math.isqrt(tensor.size)
    return (1, side, side, 1) if side * side == tensor.size else None


def _tesseract(tensor: Any) -> Axes | None:
    depth = tensor.depth or 1
    side = math.isqrt(tensor.size // depth)
    return (depth, side, side, 1) if depth * side * side == tensor.size else None


def _cube(tensor: Any) -> Axes | None:
    side = round(tensor.size ** (1 / 3))
    return (1, side, side, side) if side**3 == tensor.size else None


def _shaped(tensor: Any) -> Axes | None:
    shape = tensor.shape or ((1, 1, 1) if tensor.size == 1 else (0, 0, 0))
    return (1, *shape) if math.prod(shape) == tensor.size else None


class ModeRow(NamedTuple):
    """One row of the table of modes, DESIGN section 5."""

    axes: Callable[[Any], Axes | None]
    """(d, q, y, z) of a TensorParallel, None where its size does not fit."""
    residual: mesh.Residual
    keep: mesh.Keep = "x"
    inner: mesh.Inner = "heads"
    options: tuple[str, ...] = ()
    """Keys of parallel.tensor that mean something in this mode, besides size, mode and keep."""


MODES: Mapping[str, ModeRow] = {
    "1d": ModeRow(lambda tensor: (1, 1, tensor.size, 1), "replicated", options=("sequence",)),
    "2d": ModeRow(_square, "hidden"),
    "2.5d": ModeRow(_tesseract, "hidden", options=("depth",)),
    "3d": ModeRow(_cube, "batch", "none", "batch", options=("residual", "inner")),
    "sequence": ModeRow(lambda tensor: (tensor.size, 1, 1, 1), "replicated", options=("impl",)),
    "cuboid": ModeRow(_shaped, "hidden", "none", options=("shape", "residual", "inner")),
}


def cuboid_of(tensor: Any) -> mesh.Tensor:
    """The cuboid that a legal TensorParallel asks for; one rank for None, or for size 1 without a mode."""
    if tensor is None or tensor.mode is None:
        return mesh.Tensor()
    row = MODES[tensor.mode]
    axes = row.axes(tensor)
    assert axes is not None, "a size that lint would have refused"
    d, q, y, z = axes
    return mesh.Tensor(
        d=d,
        q=q,
        y=y,
        z=z,
        mode=tensor.mode,
        residual=tensor.residual or ("sequence" if tensor.sequence else row.residual),
        inner=tensor.inner or row.inner,
        keep=tensor.keep or row.keep,
        split="sequence" if tensor.mode == "sequence" else "batch",
        impl=tensor.impl or "ring",
    )


# Batch ------------------------------------------------------------------------------------------------------------


def asked_batch(spec_: Any) -> spec.Batch:
    """The section `batch`; where it says no accumulation, schedule.num_microbatches is one."""
    asked = spec_.batch
    accumulation = asked.accumulation or (spec_.schedule.num_microbatches if spec_.schedule is not None else None)
    return spec.Batch(global_size=asked.global_size, micro_size=asked.micro_size, accumulation=accumulation)


def batch_of(asked: spec.Batch, data: int, least: int) -> Batch:
    """The three sizes of a step from those that were given; where they do not fit, the product tells (BAT101)."""
    global_size, micro, accumulation = asked.global_size, asked.micro_size, asked.accumulation
    if global_size is None:
        micro, accumulation = micro or least, accumulation or 1
        return Batch(micro * accumulation * data, micro, accumulation)
    if micro is None:
        accumulation = accumulation or 1
        micro = global_size // (accumulation * data)
    elif accumulation is None:
        accumulation = global_size // (micro * data)
    return Batch(global_size, micro, accumulation)


# Pipeline ---------------------------------------------------------------------------------------------------------


def auto_counts(model: spec.GPT | spec.OtherModel, method: str, size: int, seq_len: int) -> tuple[int, ...] | None:
    """Layers on each stage by an automatic method; None where that is only known when the model is built."""
    num_layers = model.num_layers
    if num_layers is None:
        return None
    if method in ("libai", "uniform"):
        return {"libai": cut.libai, "uniform": cut.uniform}[method](num_layers, size)
    if isinstance(model, spec.OtherModel):
        return listed_stages.counts(model, method, size)
    if method.startswith("type:"):
        return cut.by_type(method.removeprefix("type:"), model, size)
    return cut.by_parameters(model, size) if method == "parameters" else cut.by_cost(model, size, seq_len)


def stages_of(spec_: spec.Spec, pipeline: spec.PipelineParallel | None) -> Stages:
    """The automatic cut and the one that is used; what only the built model can tell is None."""
    model = spec_.model
    if model.num_layers is None:
        return Stages(None, None, None)
    if pipeline is None or pipeline.size == 1:
        return Stages(None, None, (model.num_layers,))
    method = pipeline.method or ("libai" if spec_.parallel.pipeline is None else "cost")
    auto = auto_counts(model, method, pipeline.size, seq_len_of(spec_))
    used = pipeline.counts or auto
    if pipeline.stage_ids is not None:
        used = cut.counts_of(pipeline.stage_ids, pipeline.size)
    return Stages(auto and cut.ids_of(auto), used and cut.ids_of(used), used and tuple(used))


def offloads(spec_: Any, what: str) -> bool:
    """Whether ZeRO keeps `what`, "optimizer" or "param", on the CPU."""
    device: str | None = spec_.zero.extra.get(f"offload_{what}", {}).get("device")
    return device not in (None, "none")


def seq_len_of(spec_: Any) -> int:
    """Tokens of a sample; 0 where neither the data nor the model says."""
    return int(spec_.data.seq_len or getattr(spec_.model, "max_seq_len", 0))


def run_name(path: str) -> str:
    """The config's name: what a run is called where it has no name of its own."""
    return default_output_dir(path).rpartition("/")[2]


def default_output_dir(path: str) -> str:
    """outputs/<config name>, below where the run starts; of the config.yaml of a run, that run's own folder."""
    folder, _, name = path.replace("\\", "/").rpartition("/")
    return folder if folder and name == "config.yaml" else "outputs/" + name.rpartition(".")[0]
