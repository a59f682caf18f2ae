"""What follows from what: for each key that nobody wrote, its value in this world, and the numbers that say so.

Each function repeats no rule: the numbers are those of the linter's context and of the Job, the sentence says how they
hang together. A key without a function, or whose function has nothing to say, has its default.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from dslpar.core.mesh import STANDARD_ORDER
from dslpar.layout import divisors
from dslpar.layout.family import layout_of
from dslpar.layout.resolve import MODES, Stages, default_output_dir, pipeline_of, run_name, seq_len_of, stages_of
from dslpar.linter.problem import UnknownValueError
from dslpar.provenance.subject import Case
from dslpar.schema import sections


class Inferred(NamedTuple):
    """A value that nobody wrote."""

    value: Any
    why: str
    sources: tuple[str, ...] = ()
    """The keys that it follows from."""
    how: str = "inferred"


# Sizes ------------------------------------------------------------------------------------------------------------

SIZES = ("parallel.pipeline.size", "parallel.tensor.size")


def _data(case: Case) -> Inferred:
    cx = case.cx
    ranks, stages, tensor = cx.world, cx.stages, cx.cuboid.size
    return Inferred(cx.data_size, f"{ranks} ranks / (pipeline {stages} * tensor {tensor})", SIZES)


def _stages(case: Case) -> Inferred:
    return Inferred(case.cx.stages, "there is no pipeline: one stage", how="default")


def _tensor(case: Case) -> Inferred:
    return Inferred(case.cx.cuboid.size, "no tensor parallelism: each rank has whole layers", how="default")


def _order(case: Case) -> Inferred:
    return Inferred(STANDARD_ORDER, "left out: the standard order, DeepSpeed's and LiBai's", how="default")


def _mode(case: Case) -> Inferred | None:
    mode = case.cx.cuboid.mode
    if mode is None:
        return None
    return Inferred(mode, "LiBai's form names no mode: its tensor parallelism is '1d'", ("parallel.tensor.size",))


def _shape(case: Case) -> Inferred | None:
    cuboid = case.cx.cuboid
    if cuboid.mode is None:
        return None
    x, y, z = cuboid.shape
    words = f"mode {cuboid.mode!r} on {cuboid.size} ranks: x {x} * y {y} * z {z}"
    return Inferred((x, y, z), words, ("parallel.tensor.size", "parallel.tensor.mode"))


def _depth(case: Case) -> Inferred | None:
    cuboid = case.cx.cuboid
    return Inferred(cuboid.d, "left out: 1", how="default") if cuboid.mode == "2.5d" else None


def _of_mode(name: str) -> Callable[[Case], Inferred | None]:
    def inferred(case: Case) -> Inferred | None:
        cuboid = case.cx.cuboid
        if cuboid.mode is None or (name == "impl" and cuboid.mode != "sequence"):
            return None
        key = "parallel.tensor.sequence" if name == "residual" and _is_sequence(case) else "parallel.tensor.mode"
        message = "sequence=True keeps it so" if key.endswith("sequence") else f"as mode {cuboid.mode!r} has it"
        return Inferred(getattr(cuboid, name), message, (key,))

    return inferred


def _is_sequence(case: Case) -> bool:
    tensor = case.cx.tensor
    return bool(tensor and tensor.sequence)


# The cut ----------------------------------------------------------------------------------------------------------


def stages(case: Case) -> Stages:
    """The cut of layers over stages. Raises UnknownValueError where a mistake or an unbuilt model stands before it."""
    parts = ("model", "parallel", "train.dist", "data.seq_len")
    touched = (finding.key for finding in case.findings if finding.severity == "error")
    if any(key.startswith(parts) for key in touched):
        raise UnknownValueError("stages")
    found = stages_of(case.reading.spec, pipeline_of(case.reading.spec))
    if found.counts is None:
        raise UnknownValueError("layers")
    return found


def _cut(case: Case) -> tuple[str, tuple[str, ...]]:
    """Which key says the cut, in words, and the keys."""
    pipeline = case.cx.multi_stage_pipeline
    layers, size = case.cx.num_layers, case.cx.stages
    if pipeline.stage_ids is not None:
        return "counted in stage_ids", ("parallel.pipeline.stage_ids",)
    if pipeline.counts is not None:
        return "spread out from counts", ("parallel.pipeline.counts",)
    method = pipeline.method or _default_method(case)
    words = f"method {method!r} cuts {layers} layers over {size} stages"
    return words, ("parallel.pipeline.method", "parallel.pipeline.size", *_layers_key(case))


def _layers_key(case: Case) -> tuple[str, ...]:
    return ("model.num_layers",) if isinstance(case.reading.spec.model, sections.Model) else ("model.layers_cfg",)


def _default_method(case: Case) -> str:
    return "cost" if case.cx.from_parallel("pipeline") else "libai"


def _method(case: Case) -> Inferred | None:
    pipeline = case.cx.pipeline
    if pipeline is None or pipeline.size == 1 or pipeline.stage_ids is not None or pipeline.counts is not None:
        return None
    if case.cx.from_parallel("pipeline"):
        return Inferred("cost", "left out: stages whose work is as even as can be", how="default")
    return Inferred("libai", "the pipeline is asked for in LiBai's form, which is cut as LiBai does", (SIZES[0],))


def _stage_ids(case: Case) -> Inferred | None:
    if case.cx.stages == 1:
        return None
    words, sources = _cut(case)
    return Inferred(stages(case).actual_ids, words, sources)


def _counts(case: Case) -> Inferred | None:
    if case.cx.stages == 1:
        return None
    words, sources = _cut(case)
    return Inferred(stages(case).counts, words, sources)


def _auto_ids(case: Case) -> Inferred | None:
    if case.cx.stages == 1:
        return None
    method = case.cx.multi_stage_pipeline.method or _default_method(case)
    words = (
        f"what method {method!r} makes of {case.cx.num_layers} layers over {case.cx.stages} stages, recomputed on load"
    )
    return Inferred(stages(case).auto_ids, words, (SIZES[0], *_layers_key(case)))


def _actual_ids(case: Case) -> Inferred | None:
    if case.cx.stages == 1:
        return None
    return Inferred(stages(case).actual_ids, "the cut that runs, recomputed on load", ("parallel.pipeline.stage_ids",))


# The batch --------------------------------------------------------------------------------------------------------

_DATA = "parallel.data.size"


def _fitting(case: Case) -> tuple[Any, int]:
    """The batch and the data size, where they fit; where not, BAT101 has the word."""
    batch, data = case.cx.batch, case.cx.data_size
    if batch.micro_size * batch.accumulation * data != batch.global_size:
        raise UnknownValueError("batch")
    return batch, data


def _global_size(case: Case) -> Inferred:
    batch, data = _fitting(case)
    words = f"micro_size {batch.micro_size} * accumulation {batch.accumulation} * data {data}"
    return Inferred(batch.global_size, words, ("batch.micro_size", "batch.accumulation", _DATA))


def _micro_size(case: Case) -> Inferred:
    if case.cx.requested_batch.global_size is None:
        return _least(case)
    batch, data = _fitting(case)
    words = f"global_size {batch.global_size} / (accumulation {batch.accumulation} * data {data})"
    return Inferred(batch.micro_size, words, ("batch.global_size", "batch.accumulation", _DATA))


def _least(case: Case) -> Inferred:
    cuboid = case.cx.cuboid
    least = divisors.least_micro_size(cuboid)
    cuts = [each.why for each in divisors.batch(least, cuboid) if each.by > 1]
    words = f"the least that divides by {' and '.join(cuts)}" if cuts else "the least there is: no rank splits samples"
    return Inferred(least, f"neither it nor global_size is given: {words}", ("parallel.tensor.shape",) if cuts else ())


def _accumulation(case: Case) -> Inferred:
    asked = case.cx.requested_batch
    if asked.global_size is None or asked.micro_size is None:
        return Inferred(1, "left out: one micro-batch a step", how="default")
    batch, data = _fitting(case)
    words = f"global_size {batch.global_size} / (micro_size {batch.micro_size} * data {data})"
    return Inferred(batch.accumulation, words, ("batch.global_size", "batch.micro_size", _DATA))


def _num_microbatches(case: Case) -> Inferred | None:
    if case.reading.spec.schedule is None:
        return None
    batch = case.cx.batch if case.cx.requested_batch.accumulation is None else case.cx.requested_batch
    return Inferred(batch.accumulation, "as many as batch.accumulation", ("batch.accumulation",))


# Model, data, run -------------------------------------------------------------------------------------------------


def of_model(case: Case, key: str) -> Inferred | None:
    """A field of the model that follows from its others, as its family tells."""
    section, _, field = key.rpartition(".")
    if section != "model" or not isinstance(case.reading.spec.model, sections.Model):
        return None
    model = case.cx.model_of(sections.Model)
    found = layout_of(model).inferred(model, field)
    return found and Inferred(found.value, found.why, tuple(f"model.{name}" for name in found.sources))


def _seq_len(case: Case) -> Inferred | None:
    length = seq_len_of(case.cx.spec)
    return Inferred(length, "the model's max_seq_len", ("model.max_seq_len",)) if length else None


def _output_dir(case: Case) -> Inferred:
    folder = default_output_dir(case.config.path)
    return Inferred(folder, f"the name of the config, {case.config.path}")


def _monitor(section: str, name: str) -> Callable[[Case], Inferred | None]:
    def inferred(case: Case) -> Inferred | None:
        if name == "output_path":
            base = case.reading.spec.train.output_dir or default_output_dir(case.config.path)
            return Inferred(f"{base}/{section}", f"{section} in train.output_dir", ("train.output_dir",))
        return Inferred(run_name(case.config.path), f"the name of the config, {case.config.path}")

    return inferred


INFERRED: Mapping[str, Callable[[Case], Inferred | None]] = {
    "parallel.data.size": _data,
    "parallel.pipeline.size": _stages,
    "parallel.pipeline.method": _method,
    "parallel.pipeline.stage_ids": _stage_ids,
    "parallel.pipeline.counts": _counts,
    "parallel.tensor.size": _tensor,
    "parallel.tensor.mode": _mode,
    "parallel.tensor.shape": _shape,
    "parallel.tensor.depth": _depth,
    **{f"parallel.tensor.{name}": _of_mode(name) for name in ("residual", "inner", "keep", "impl")},
    "parallel.order": _order,
    "batch.global_size": _global_size,
    "batch.micro_size": _micro_size,
    "batch.accumulation": _accumulation,
    "schedule.num_microbatches": _num_microbatches,
    "data.seq_len": _seq_len,
    "train.output_dir": _output_dir,
    **{f"monitor.{section}.output_path": _monitor(section, "output_path") for section in ("csv", "tensorboard")},
    **{f"monitor.{section}.job_name": _monitor(section, "job_name") for section in ("csv", "tensorboard")},
    "monitor.wandb.project": _monitor("wandb", "project"),
}
RECOMPUTED: Mapping[str, Callable[[Case], Inferred | None]] = {
    "train.dist.auto_pipeline_stage_id": _auto_ids,
    "train.dist.actual_pipeline_stage_id": _actual_ids,
}
"""Keys that dslpar writes for information, and does not read."""
OF_THE_NAME = ("train.output_dir", "monitor.")
"""What may follow from the config's name alone."""


# What else is true of a value that was written ---------------------------------------------------------------------


def notes(case: Case, key: str) -> tuple[str, ...]:
    """What becomes of the value where it runs."""
    if key.startswith("model.") and isinstance(model := case.cx.spec.model, sections.Model):
        for size in layout_of(model).padding(model, case.cx.cuboid):
            if key == f"model.{size.key}" and size.value != getattr(model, size.key):
                message = size.why.partition(";")[0]
                return (f"padded to {size.value}, a multiple of {message}",)
    if key == "parallel.tensor.size" and case.cx.cuboid.mode in MODES and math.prod(case.cx.cuboid.shape) > 1:
        x, y, z = case.cx.cuboid.shape
        return (f"mode {case.cx.cuboid.mode!r}: x {x} * y {y} * z {z}",)
    return ()
