"""From a Spec and a world size to a Job: every inferred value decided, nothing clamped.

`resolve` is the story; each function below it decides one part. The linter uses the same functions to find what is
wrong, and `resolve` runs on a spec that the linter has passed. LiBai's `train.dist` and dslpar's `parallel` meet here:
above this package there is one form.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import cast

from dslpar.core.frozen import frozen
from dslpar.core.mesh import STANDARD_ORDER, Impl, Inner, Keep, Mesh, Residual, Tensor
from dslpar.core.named_tuple import NamedTuple
from dslpar.layout import listed_layers
from dslpar.layout.divisors import least_micro_size
from dslpar.layout.family import layout_of
from dslpar.layout.stages import Counts, Weights, automatic, counts_of, ids_of
from dslpar.schema import sections
from dslpar.schema.sections import Model, OtherModel, PipelineParallel, Spec, TensorParallel


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
    spec: Spec
    """What the config says."""
    mesh: Mesh
    """All ranks."""
    stages: Stages
    """Which layers stand on which stage."""
    batch: Batch
    """Samples of a step."""
    seq_len: int
    """Tokens of a sample; 0 where the model is not known."""
    output_dir: str
    """Where the run writes."""


def resolve(spec: Spec, world_size: int, path: str = "") -> Job:
    """Decide everything; the spec has passed the linter for this world."""
    pipeline, cuboid = pipeline_of(spec), cuboid_of(tensor_of(spec))
    num_stages = pipeline.size if pipeline else 1
    data_size = world_size // (num_stages * cuboid.size)
    mesh = Mesh(pipe=num_stages, data=data_size, tensor=cuboid, order=spec.parallel.order or STANDARD_ORDER)
    assert mesh.world_size == world_size, "a world that lint would have refused"
    return Job(
        path=path,
        spec=spec,
        mesh=mesh,
        stages=stages_of(spec, pipeline),
        batch=batch_of(requested_batch(spec), data_size, least_micro_size(cuboid)),
        seq_len=seq_len_of(spec),
        output_dir=spec.train.output_dir or default_output_dir(path),
    )


# Sizes, in either form --------------------------------------------------------------------------------------------


def pipeline_of(spec: Spec) -> PipelineParallel | None:
    """Return the PipelineParallel of either form, or None."""
    if spec.parallel.pipeline is not None:
        return spec.parallel.pipeline
    dist = spec.train.dist
    size, ids = dist.pipeline_parallel_size or 1, dist.custom_pipeline_stage_id
    if size == 1 and ids is None:
        return None
    return PipelineParallel(size=size, stage_ids=ids, method=None if ids else "libai")


def tensor_of(spec: Spec) -> TensorParallel | None:
    """Return the TensorParallel of either form, or None."""
    if spec.parallel.tensor is not None:
        return spec.parallel.tensor
    size = spec.train.dist.tensor_parallel_size or 1
    return TensorParallel(size=size, mode="1d") if size > 1 else None


# The cuboid -------------------------------------------------------------------------------------------------------

Axes = tuple[int, int, int, int]


def _square(tensor: TensorParallel) -> Axes | None:
    side = math.isqrt(tensor.size)
    return (1, side, side, 1) if side * side == tensor.size else None


def _tesseract(tensor: TensorParallel) -> Axes | None:
    depth = tensor.depth or 1
    side = math.isqrt(tensor.size // depth)
    return (depth, side, side, 1) if depth * side * side == tensor.size else None


def _cube(tensor: TensorParallel) -> Axes | None:
    side = round(tensor.size ** (1 / 3))
    return (1, side, side, side) if side**3 == tensor.size else None


def _shaped(tensor: TensorParallel) -> Axes | None:
    shape = tensor.shape or ((1, 1, 1) if tensor.size == 1 else (0, 0, 0))
    return (1, *shape) if math.prod(shape) == tensor.size else None


class TensorMode(NamedTuple):
    """One mode: the cuboid that its size makes, and how activations are kept on it."""

    axes: Callable[[TensorParallel], Axes | None]
    """(d, q, y, z) of a TensorParallel, None where its size does not fit."""
    residual: Residual
    keep: Keep = "x"
    inner: Inner = "heads"
    options: tuple[str, ...] = ()
    """Keys of parallel.tensor that mean something in this mode, besides size, mode and keep."""


MODES: Mapping[str, TensorMode] = {
    "1d": TensorMode(lambda tensor: (1, 1, tensor.size, 1), "replicated", options=("sequence",)),
    "2d": TensorMode(_square, "hidden"),
    "2.5d": TensorMode(_tesseract, "hidden", options=("depth",)),
    "3d": TensorMode(_cube, "batch", "none", "batch", options=("residual", "inner")),
    "sequence": TensorMode(lambda tensor: (tensor.size, 1, 1, 1), "replicated", options=("impl",)),
    "cuboid": TensorMode(_shaped, "hidden", "none", options=("shape", "residual", "inner")),
}


def cuboid_of(tensor: TensorParallel | None) -> Tensor:
    """Return the cuboid that a legal TensorParallel requests; one rank for None, or for size 1 without a mode."""
    if tensor is None or tensor.mode is None:
        return Tensor()
    mode = MODES[tensor.mode]
    axes = mode.axes(tensor)
    assert axes is not None, "a size that lint would have refused"
    d, q, y, z = axes
    return Tensor(
        d=d,
        q=q,
        y=y,
        z=z,
        mode=tensor.mode,
        residual=cast(Residual, tensor.residual or ("sequence" if tensor.sequence else mode.residual)),
        inner=cast(Inner, tensor.inner or mode.inner),
        keep=cast(Keep, tensor.keep or mode.keep),
        split="sequence" if tensor.mode == "sequence" else "batch",
        impl=cast(Impl, tensor.impl or "ring"),
    )


# Batch ------------------------------------------------------------------------------------------------------------


def requested_batch(spec: Spec) -> sections.Batch:
    """Return the section `batch`; where it gives no accumulation, schedule.num_microbatches is one."""
    batch, schedule = spec.batch, spec.schedule
    accumulation = batch.accumulation or (schedule.num_microbatches if schedule is not None else None)
    return sections.Batch(global_size=batch.global_size, micro_size=batch.micro_size, accumulation=accumulation)


def batch_of(requested: sections.Batch, data_size: int, least_micro: int) -> Batch:
    """Return the three sizes of a step from those that were given; where they do not fit, the product tells (BAT101).

    Neither global_size nor micro_size given: the least legal micro-batch.
    """
    global_size, micro, accumulation = requested.global_size, requested.micro_size, requested.accumulation
    if global_size is None:
        micro, accumulation = micro or least_micro, accumulation or 1
        return Batch(micro * accumulation * data_size, micro, accumulation)
    if micro is None:
        accumulation = accumulation or 1
        micro = global_size // (accumulation * data_size)
    elif accumulation is None:
        accumulation = global_size // (micro * data_size)
    return Batch(global_size, micro, accumulation)


# Pipeline ---------------------------------------------------------------------------------------------------------


def auto_counts(model: Model | OtherModel, method: str, num_stages: int, seq_len: int) -> Counts | None:
    """Return the layers on each stage by an automatic method; None where only the built model can tell."""

    def weights_by(method: str) -> Weights | None:
        if isinstance(model, OtherModel):
            return listed_layers.weights(model, method)
        return layout_of(model).pipeline_weights(model, method, seq_len)

    return None if model.num_layers is None else automatic(method, model.num_layers, num_stages, weights_by)


def stages_of(spec: Spec, pipeline: PipelineParallel | None) -> Stages:
    """Return the automatic cut and the one that is used; what only the built model can tell is None."""
    model = spec.model
    if model.num_layers is None:
        return Stages(None, None, None)
    if pipeline is None or pipeline.size == 1:
        return Stages(None, None, (model.num_layers,))
    method = pipeline.method or ("libai" if spec.parallel.pipeline is None else "cost")
    auto = auto_counts(model, method, pipeline.size, seq_len_of(spec))
    counts = pipeline.counts or auto
    if pipeline.stage_ids is not None:
        counts = counts_of(pipeline.stage_ids, pipeline.size)
    return Stages(auto and ids_of(auto), counts and ids_of(counts), counts and tuple(counts))


# What else is inferred --------------------------------------------------------------------------------------------


def offloads(spec: Spec, what: str) -> bool:
    """Whether ZeRO keeps `what`, "optimizer" or "param", on the CPU."""
    device: str | None = spec.zero.extra.get(f"offload_{what}", {}).get("device")
    return device not in (None, "none")


def seq_len_of(spec: Spec) -> int:
    """Return the tokens of a sample; 0 where neither the data nor the model tells."""
    return spec.data.seq_len or (spec.model.max_seq_len if isinstance(spec.model, Model) else 0)


def run_name(path: str) -> str:
    """Return the config's name: what a run is called where it has no name of its own."""
    return default_output_dir(path).rpartition("/")[2]


def default_output_dir(path: str) -> str:
    """Return outputs/<config name>, below where the run starts; of a run's config.yaml, that run's own folder."""
    folder, _, name = path.replace("\\", "/").rpartition("/")
    return folder if folder and name == "config.yaml" else "outputs/" + name.rpartition(".")[0]
