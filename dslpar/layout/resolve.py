"""From a Spec and a world size to a Job: every inferred value decided, nothing clamped.

`resolve` is the story; each function below it decides one part. The linter uses the same functions to find what is
wrong, and `resolve` runs on a spec that the linter has passed. Where there is something to explain, a function returns
a `Decision`, the value with its reason. LiBai's `train.dist` and dslpar's `parallel` meet here: above this package
there is one form.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Literal, Protocol

from dslpar.core.frozen import frozen
from dslpar.core.mesh import STANDARD_ORDER, Inner, Keep, Mesh, Residual, Tensor
from dslpar.core.named_tuple import NamedTuple
from dslpar.layout import divisors, listed_layers
from dslpar.layout.decision import Decision
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
    sizes = Sizes(data_size=data_size_of(world_size, num_stages, cuboid.size).value, cuboid=cuboid)
    mesh = Mesh(pipe=num_stages, data=sizes.data_size, tensor=cuboid, order=spec.parallel.order or STANDARD_ORDER)
    assert mesh.world_size == world_size, "a world that lint would have refused"
    return Job(
        path=path,
        spec=spec,
        mesh=mesh,
        stages=stages_of(spec, pipeline),
        batch=batch_of(requested_batch(spec), sizes),
        seq_len=seq_len_of(spec),
        output_dir=spec.train.output_dir or default_output_dir(path),
    )


SIZE_KEYS = ("parallel.pipeline.size", "parallel.tensor.size")


def data_size_of(world_size: int, num_stages: int, tensor_size: int) -> Decision:
    """Decide the number of replicas: what the other sizes leave of the world."""
    why = f"{world_size} ranks / (pipeline {num_stages} * tensor {tensor_size})"
    return Decision(world_size // (num_stages * tensor_size), why, SIZE_KEYS)


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


def options_of(tensor: TensorParallel) -> dict[str, Decision]:
    """Decide how a mode's cuboid keeps activations: as given, else as the mode has it."""
    mode, why, keys = MODES[str(tensor.mode)], f"as mode {tensor.mode!r} has it", ("parallel.tensor.mode",)
    of_mode = {"residual": mode.residual, "inner": mode.inner, "keep": mode.keep, "impl": "ring"}
    decided = {name: Decision(value, why, keys) for name, value in of_mode.items()}
    if tensor.sequence:
        decided["residual"] = Decision("sequence", "sequence=True keeps it so", ("parallel.tensor.sequence",))
    given = {name: Decision(value) for name in of_mode if (value := getattr(tensor, name)) is not None}
    return decided | given


def cuboid_of(tensor: TensorParallel | None) -> Tensor:
    """Return the cuboid that a legal TensorParallel requests; one rank for None, or for size 1 without a mode."""
    if tensor is None or tensor.mode is None:
        return Tensor()
    axes = MODES[tensor.mode].axes(tensor)
    assert axes is not None, "a size that lint would have refused"
    d, q, y, z = axes
    options = {name: decision.value for name, decision in options_of(tensor).items()}
    split: Literal["batch", "sequence"] = "sequence" if tensor.mode == "sequence" else "batch"
    return Tensor(d=d, q=q, y=y, z=z, mode=tensor.mode, split=split, **options)


# Batch ------------------------------------------------------------------------------------------------------------


def requested_batch(spec: Spec) -> sections.Batch:
    """Return the section `batch`; where it gives no accumulation, schedule.num_microbatches is one."""
    batch, schedule = spec.batch, spec.schedule
    accumulation = batch.accumulation or (schedule.num_microbatches if schedule is not None else None)
    return sections.Batch(global_size=batch.global_size, micro_size=batch.micro_size, accumulation=accumulation)


class KnownSizes(Protocol):
    """What the batch follows from besides the config; the linter's context raises where one of them is not known."""

    @property
    def data_size(self) -> int:
        """Replicas."""
        ...

    @property
    def cuboid(self) -> Tensor:
        """The ranks of one replica's stage."""
        ...


class Sizes(NamedTuple):
    """Both of `KnownSizes`."""

    data_size: int
    cuboid: Tensor


def batch_of(requested: sections.Batch, sizes: KnownSizes) -> Batch:
    """Return the sizes of a step from those that were given; where they do not fit, the product tells (BAT101)."""
    return Batch(*(decide(requested, sizes).value for decide in (global_size_of, micro_size_of, accumulation_of)))


_DATA = "parallel.data.size"


def global_size_of(requested: sections.Batch, sizes: KnownSizes) -> Decision:
    """Decide the samples of a step."""
    if requested.global_size is not None:
        return Decision(requested.global_size)
    micro, accumulation = micro_size_of(requested, sizes).value, accumulation_of(requested, sizes).value
    why = f"micro_size {micro} * accumulation {accumulation} * data {sizes.data_size}"
    value = micro * accumulation * sizes.data_size
    return Decision(value, why, ("batch.micro_size", "batch.accumulation", _DATA))


def micro_size_of(requested: sections.Batch, sizes: KnownSizes) -> Decision:
    """Decide the samples of a micro-batch; the least legal one where global_size is not given either."""
    if requested.micro_size is not None:
        return Decision(requested.micro_size)
    if requested.global_size is None:
        least = least_micro_size(sizes.cuboid)
        cuts = [each.why for each in divisors.batch(least, sizes.cuboid) if each.by > 1]
        why = (
            f"the least that divides by {' and '.join(cuts)}" if cuts else "the least there is: no rank splits samples"
        )
        sources = ("parallel.tensor.shape",) if cuts else ()
        return Decision(least, f"neither it nor global_size is given: {why}", sources)
    whole, accumulation = requested.global_size, accumulation_of(requested, sizes).value
    why = f"global_size {whole} / (accumulation {accumulation} * data {sizes.data_size})"
    value = whole // (accumulation * sizes.data_size)
    return Decision(value, why, ("batch.global_size", "batch.accumulation", _DATA))


def accumulation_of(requested: sections.Batch, sizes: KnownSizes) -> Decision:
    """Decide the micro-batches of a step."""
    if requested.accumulation is not None:
        return Decision(requested.accumulation)
    whole, micro = requested.global_size, requested.micro_size
    if whole is None or micro is None:
        return Decision(1, "left out: one micro-batch a step", how="default")
    why = f"global_size {whole} / (micro_size {micro} * data {sizes.data_size})"
    return Decision(whole // (micro * sizes.data_size), why, ("batch.global_size", "batch.micro_size", _DATA))


# Pipeline ---------------------------------------------------------------------------------------------------------


def auto_counts(model: Model | OtherModel, method: str, num_stages: int, seq_len: int) -> Counts | None:
    """Return the layers on each stage by an automatic method; None where only the built model can tell."""

    def weights_by(method: str) -> Weights | None:
        if isinstance(model, OtherModel):
            return listed_layers.weights(model, method)
        return layout_of(model).pipeline_weights(model, method, seq_len)

    return None if model.num_layers is None else automatic(method, model.num_layers, num_stages, weights_by)


def method_of(spec: Spec, pipeline: PipelineParallel) -> Decision:
    """Decide the automatic method of a cut."""
    if spec.parallel.pipeline is None:
        why = "the pipeline is requested in LiBai's form, which is cut as LiBai does"
        return Decision("libai", why, ("parallel.pipeline.size",))
    if pipeline.method is not None:
        return Decision(pipeline.method)
    return Decision("cost", "left out: stages whose work is as even as can be", how="default")


def stages_of(spec: Spec, pipeline: PipelineParallel | None) -> Stages:
    """Return the automatic cut and the one that is used; what only the built model can tell is None."""
    model = spec.model
    if model.num_layers is None:
        return Stages(None, None, None)
    if pipeline is None or pipeline.size == 1:
        return Stages(None, None, (model.num_layers,))
    auto = auto_counts(model, method_of(spec, pipeline).value, pipeline.size, seq_len_of(spec))
    return stages_from(pipeline, auto)


def stages_from(pipeline: PipelineParallel, auto: Counts | None) -> Stages:
    """Return the automatic cut, and the one that is used: stage_ids, counts, or the automatic one."""
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
