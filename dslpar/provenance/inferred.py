"""Inferred values of the keys that a config leaves out, with their reasons.

The functions that infer them are in `dslpar.layout.resolve` and in the model's family. `INFERRED` maps each key to such
a function. A function raises UnknownValueError if the value is not known for a config. A key has its default if it is
not in `INFERRED`, or its function returns None.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from dslpar.core.mesh import STANDARD_ORDER
from dslpar.layout import batch, modes, resolve
from dslpar.layout.family_interface import layout_of
from dslpar.layout.inferred_value import InferredValue
from dslpar.linter.problem import UnknownValueError
from dslpar.provenance.subject import Subject
from dslpar.schema import sections

Infer = Callable[[Subject], InferredValue | None]


# The cuboid -------------------------------------------------------------------------------------------------------


def _mode(subject: Subject) -> InferredValue | None:
    mode = subject.cx.tensor.cuboid.mode
    if mode is None:
        return None
    return InferredValue(mode, "LiBai's form names no mode: its tensor parallelism is '1d'", ("parallel.tensor.size",))


def _shape(subject: Subject) -> InferredValue | None:
    cuboid = subject.cx.tensor.cuboid
    if cuboid.mode is None:
        return None
    x, y, z = cuboid.shape
    why = f"mode {cuboid.mode!r} on {cuboid.size} ranks: x {x} * y {y} * z {z}"
    return InferredValue(cuboid.shape, why, ("parallel.tensor.size", "parallel.tensor.mode"))


def _option(name: str) -> Infer:
    def decide(subject: Subject) -> InferredValue | None:
        cuboid, tensor = subject.cx.tensor.cuboid, subject.cx.tensor.section
        if tensor is None or cuboid.mode is None or (name == "impl" and cuboid.mode != "sequence"):
            return None
        return modes.options_of(tensor)[name]

    return decide


def _context_size(subject: Subject) -> InferredValue:
    cuboid = subject.cx.tensor.cuboid
    if cuboid.context > 1:
        why = f"mode {cuboid.mode!r} is context parallelism by another name"
        return InferredValue(cuboid.context, why, ("parallel.tensor.mode", "parallel.tensor.size"))
    return InferredValue(1, "no context parallelism: each rank has whole sequences", how="default")


def _ulysses_size(subject: Subject) -> InferredValue | None:
    cuboid, spec = subject.cx.tensor.cuboid, subject.reading.spec
    if cuboid.impl != "hybrid":
        return None
    return modes.ulysses_size_of(spec.parallel.context, cuboid, resolve.heads_of(spec.model))


# Partition into stages --------------------------------------------------------------------------------------------


def _stages(subject: Subject) -> resolve.Stages:
    """Return the partition. Raises UnknownValueError if an error or an unbuilt model prevents it."""
    parts = ("model", "parallel", "train.dist", "data.seq_len")
    if any(finding.key.startswith(parts) for finding in subject.findings if finding.severity == "error"):
        raise UnknownValueError("stages")
    found = resolve.stages_of(subject.reading.spec, subject.cx.pipeline.section)
    if found.counts is None:
        raise UnknownValueError("layers")
    return found


def _method(subject: Subject) -> InferredValue | None:
    pipeline = subject.cx.pipeline.section
    if pipeline is None or pipeline.size == 1 or pipeline.stage_ids is not None or pipeline.counts is not None:
        return None
    return resolve.method_of(subject.cx.spec, pipeline)


def _layers_key(model: sections.Model | sections.OtherModel) -> str:
    """Return the key that sets the number of layers."""
    if isinstance(model, sections.Model):
        return "model.num_layers"
    config = model.transformers
    return "model.layers_cfg" if config is None else f"model.config.{config.key('layers')}"


def _cut(name: str, recomputed: str = "") -> Infer:
    """Make the function that decides a field of `resolve.Stages`; `recomputed` is the reason, for LiBai's keys."""

    def decide(subject: Subject) -> InferredValue | None:
        if subject.cx.pipeline.stages == 1:
            return None
        pipeline, chunks = subject.cx.pipeline.multi_stage, subject.cx.pipeline.chunks
        method, layers = resolve.method_of(subject.cx.spec, pipeline).value, subject.cx.model.num_layers
        sizes = ("parallel.pipeline.size", *(["schedule.num_model_chunks"] if chunks.num > 1 else []))
        layers_key = _layers_key(subject.reading.spec.model)
        value = getattr(_stages(subject), name)
        if name == "auto_ids":
            why = f"method {method!r} divides {layers} layers over {chunks.stages} stages; recomputed on load"
            return InferredValue(value, why, (*sizes, layers_key))
        if recomputed:
            return InferredValue(value, recomputed, ("parallel.pipeline.stage_ids",))
        if pipeline.stage_ids is not None:
            return InferredValue(value, "counted in stage_ids", ("parallel.pipeline.stage_ids",))
        if pipeline.counts is not None:
            return InferredValue(value, "spread out from counts", ("parallel.pipeline.counts",))
        why = f"method {method!r} divides {layers} layers over {chunks.stages} stages"
        return InferredValue(value, why, ("parallel.pipeline.method", *sizes, layers_key))

    return decide


# Batch, model, run ------------------------------------------------------------------------------------------------


def _of_batch(decide: Callable[[sections.Batch, batch.KnownSizes], InferredValue]) -> Infer:
    def decided(subject: Subject) -> InferredValue:
        found = decide(subject.cx.layout.requested_batch, subject.cx.layout)
        if "parallel.data.size" in found.sources:
            whole, micro, accumulation = subject.cx.layout.batch
            if micro * accumulation * subject.cx.layout.data_size != whole:
                raise UnknownValueError("batch")  # BAT101 reports it
        return found

    return decided


def _num_microbatches(subject: Subject) -> InferredValue | None:
    if subject.reading.spec.schedule is None:
        return None
    decided = batch.accumulation_of(subject.cx.layout.requested_batch, subject.cx.layout)
    return InferredValue(decided.value, "as many as batch.accumulation", ("batch.accumulation",))


def of_model(subject: Subject, key: str) -> InferredValue | None:
    """Return the value that the model's family infers for a key from other keys; None if it infers none."""
    section, _, field = key.partition(".")
    if section != "model" or not isinstance(subject.reading.spec.model, sections.Model):
        return None
    model = subject.cx.model.of(sections.Model)
    return layout_of(model).inferred(model, field)


def _num_model_chunks(subject: Subject) -> InferredValue | None:
    return None if subject.reading.spec.schedule is None else resolve.num_model_chunks_of(subject.cx.spec)


def _of_config_name(name_of: Callable[[str], str]) -> Infer:
    return lambda subject: InferredValue(name_of(subject.config.path), f"the name of the config, {subject.config.path}")


def _monitor_path(section: str) -> Infer:
    def decide(subject: Subject) -> InferredValue:
        folder = subject.reading.spec.train.output_dir or resolve.default_output_dir(subject.config.path)
        return InferredValue(f"{folder}/{section}", f"{section} in train.output_dir", ("train.output_dir",))

    return decide


_FILE_MONITORS = ("csv", "tensorboard")


def _seq_len(subject: Subject) -> InferredValue | None:
    model, length = subject.cx.spec.model, resolve.seq_len_of(subject.cx.spec)
    if not length:
        return None
    if isinstance(model, sections.Model):
        keys = model.LENGTH_KEYS
        return InferredValue(length, f"the model's {' and '.join(keys)}", tuple(f"model.{key}" for key in keys))
    config = model.transformers
    assert config is not None, "nothing else sets a length"
    name = config.key("positions")
    if config.given("positions") == "file":
        return InferredValue(length, f"{name} of the folder's config.json", ("model.pretrained",))
    return InferredValue(length, f"the model's {name}", (f"model.config.{name}",))


INFERRED: Mapping[str, Infer] = {
    # Uses the context's data size, which is unknown if the world is not a multiple of the other sizes.
    "parallel.data.size": lambda subject: resolve.data_size_of(
        subject.cx.layout.data_size * subject.cx.pipeline.stages * subject.cx.tensor.cuboid.size,
        subject.cx.pipeline.stages,
        subject.cx.tensor.cuboid.size,
    ),
    # From the context instead of just 1, since it is unknown if `train.dist` could not be read.
    "parallel.pipeline.size": lambda subject: InferredValue(
        subject.cx.pipeline.stages, "there is no pipeline: one stage", how="default"
    ),
    "parallel.pipeline.method": _method,
    "parallel.pipeline.stage_ids": _cut("actual_ids"),
    "parallel.pipeline.counts": _cut("counts"),
    "parallel.tensor.size": lambda subject: InferredValue(
        subject.cx.tensor.cuboid.size // subject.cx.tensor.cuboid.context,
        "no tensor parallelism: each rank has whole layers",
        how="default",
    ),
    "parallel.tensor.mode": _mode,
    "parallel.tensor.shape": _shape,
    "parallel.tensor.depth": lambda subject: (
        InferredValue(subject.cx.tensor.cuboid.d, "left out: 1", how="default")
        if subject.cx.tensor.cuboid.mode == "2.5d"
        else None
    ),
    **{f"parallel.tensor.{name}": _option(name) for name in ("residual", "inner", "keep", "impl")},
    "parallel.context.size": _context_size,
    "parallel.context.impl": lambda subject: (
        InferredValue(subject.cx.tensor.cuboid.impl, "left out: a ring works with any number of heads", how="default")
        if subject.reading.spec.parallel.context is not None
        else None
    ),
    "parallel.context.ulysses_size": _ulysses_size,
    "parallel.order": lambda subject: InferredValue(
        STANDARD_ORDER, "left out: the standard order, DeepSpeed's and LiBai's", how="default"
    ),
    "batch.global_size": _of_batch(batch.global_size_of),
    "batch.micro_size": _of_batch(batch.micro_size_of),
    "batch.accumulation": _of_batch(batch.accumulation_of),
    "schedule.num_microbatches": _num_microbatches,
    "schedule.num_model_chunks": _num_model_chunks,
    "data.seq_len": _seq_len,
    "train.output_dir": _of_config_name(resolve.default_output_dir),
    **{f"monitor.{section}.output_path": _monitor_path(section) for section in _FILE_MONITORS},
    **{f"monitor.{section}.job_name": _of_config_name(resolve.run_name) for section in _FILE_MONITORS},
    "monitor.wandb.project": _of_config_name(resolve.run_name),
}
RECOMPUTED: Mapping[str, Infer] = {
    "train.dist.auto_pipeline_stage_id": _cut("auto_ids"),
    "train.dist.actual_pipeline_stage_id": _cut("actual_ids", "the partition that is used; recomputed on load"),
}
"""Keys that dslpar writes for information, and computes anew instead of reading them."""
OF_THE_NAME = ("train.output_dir", "monitor.")
"""Keys whose values may follow from the config's file name alone."""


# Notes on written values -------------------------------------------------------------------------------------------


def notes(subject: Subject, key: str) -> tuple[str, ...]:
    """Return notes on how a written value is used at run time: its padding, or the cuboid of a tensor size."""
    if key.startswith("model.") and isinstance(model := subject.cx.spec.model, sections.Model):
        for size in layout_of(model).padding(model, subject.cx.tensor.cuboid):
            if key == f"model.{size.key}" and size.value != getattr(model, size.key):
                message = size.why.partition(";")[0]
                return (f"padded to {size.value}, a multiple of {message}",)
    if key != "parallel.tensor.size":
        return ()
    mode, (x, y, z) = subject.cx.tensor.cuboid.mode, subject.cx.tensor.cuboid.shape
    return (f"mode {mode!r}: x {x} * y {y} * z {z}",) if mode in modes.MODES and x * y * z > 1 else ()
