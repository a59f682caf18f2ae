"""Candidate layouts of a job: their settings, their workloads, and the overrides that turn the config into a candidate.

    candidate = candidate_of(job)                     # the config's own layout
    Workloads(job).workload(candidate)                # input of a memory and time forecast
    overrides(job, other)                             # overrides that turn the config into `other`: ["zero.stage=2"]

Overrides are words of the command line, as in `dslpar lint CFG key=value`. All candidates have the config's global
batch, so training gives the same results.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from functools import lru_cache
from typing import Any, NamedTuple

from dslpar.core.mesh import Mesh, TensorMesh
from dslpar.costs.model_costs import ModelCosts
from dslpar.forecast.workload import (
    CostsOf,
    Framework,
    Workload,
    costs_by_form,
    framework_of,
    layers_on_ranks,
    workload_of,
)
from dslpar.layout.batch import Batch, Sizes, batch_of, requested_batch
from dslpar.layout.chunks import Chunks
from dslpar.layout.modes import cuboid_of
from dslpar.layout.resolve import Job, auto_counts, heads_of, method_of, with_experts, with_zero
from dslpar.layout.schedule import Schedule
from dslpar.layout.stages import automatic
from dslpar.schema.parallel_forms import (
    is_of_libai,
    pipeline_key,
    pipeline_of,
    stage_ids_key,
    stated_replicas,
    tensor_key,
    tensor_of,
)
from dslpar.schema.sections import ContextParallel, ExpertParallel, PipelineParallel, Spec, TensorParallel


class Candidate(NamedTuple):
    """One layout, as settings of a config."""

    pipe: int
    """Pipeline ranks."""
    chunks: int
    """Stages per pipeline rank."""
    split: bool
    """True if the schedule is 'zero_bubble', which splits the backward."""
    tensor: TensorParallel
    """`NO_TENSOR` (size 1, no mode) means no tensor parallelism."""
    context: ContextParallel | None
    """None means no context parallelism. Otherwise the size is above 1."""
    zero: int
    """ZeRO stage."""
    micro_size: int
    """Samples per micro-batch of one data rank."""
    interval: int
    """Layers that activation checkpointing recomputes together; 0 means no recomputation."""
    expert: ExpertParallel | None = None
    """None means that a mixture's tokens are gathered, if the model has experts."""

    @property
    def schedule_type(self) -> str:
        """`type` of the section `schedule`."""
        if self.split:
            return "zero_bubble"
        return "interleaved" if self.chunks > 1 else "1f1b"

    def changes(self, other: Candidate) -> int:
        """Count the settings in which two candidates differ; each field of tensor and context parallelism counts."""
        count = (self.pipe != other.pipe) + (self.chunks != other.chunks) + (self.split != other.split)
        count += (self.zero != other.zero) + (self.micro_size != other.micro_size) + (self.interval != other.interval)
        count += _num_differing(self.tensor, other.tensor)
        if self.expert is None or other.expert is None:
            count += self.expert is not other.expert
        else:
            count += _num_differing(self.expert, other.expert)
        if self.context is None or other.context is None:
            return count + (self.context is not other.context)
        return count + _num_differing(self.context, other.context)


def _differing(one: Any, other: Any) -> set[str]:
    """Return the fields in which two values of one class differ."""
    if one is other:
        return set()
    return {item.name for item in fields(one) if getattr(one, item.name) != getattr(other, item.name)}


@lru_cache(maxsize=1024)
def _num_differing(one: object, other: object) -> int:
    """Count the differing fields; cached, because many layouts of a search share a cuboid."""
    return len(_differing(one, other))


NO_TENSOR = TensorParallel(size=1)


def cuboid_in(job: Job, tensor: TensorParallel, context: ContextParallel | None) -> TensorMesh:
    """Return the cuboid of tensor and context parallelism for a job's model."""
    return _cuboid_of(tensor, context, heads_of(job.spec.model))


_cuboid_of = lru_cache(maxsize=1024)(cuboid_of)


def candidate_of(job: Job) -> Candidate:
    """Return the settings of a job."""
    checkpoint = job.spec.activation_checkpoint
    tensor, context = tensor_of(job.spec), job.spec.parallel.context
    return Candidate(
        pipe=job.mesh.pipe,
        chunks=job.chunks.num,
        split=job.schedule.split,
        tensor=NO_TENSOR if tensor is None or tensor.size == 1 else tensor,
        context=None if context is None or context.size == 1 else context,
        zero=job.spec.zero.stage,
        micro_size=job.batch.micro_size,
        interval=0 if checkpoint is None else checkpoint.interval,
        expert=job.spec.parallel.expert,
    )


class SameLayout:
    """Workloads that differ only in micro-batch size, in recomputation, and in splitting the backward or not.

    They share mesh, pipeline partition and ZeRO stage. `samples` is the number of samples per step and replica. `costs`
    maps micro-batch sizes to the model's costs; all layouts with the same cuboid share this dict. `find_costs` computes
    missing costs.
    """

    def __init__(
        self, layout: Workload, samples: int, costs: dict[int, ModelCosts | None], find_costs: CostsOf
    ) -> None:
        self._layout, self._samples, self._costs, self._find_costs = layout, samples, costs, find_costs

    def costs_of(self, micro_size: int) -> ModelCosts | None:
        """Return the model's costs on a rank for a micro-batch; None if they are unknown."""
        if micro_size not in self._costs:
            self._costs[micro_size] = self._find_costs(self._layout.mesh.tensor, micro_size)
        return self._costs[micro_size]

    def layers_on_ranks(self, costs: ModelCosts) -> tuple[float, ...]:
        """Return how many times each pipeline rank computes `costs.layer` (see `Workload.layers_on_ranks`)."""
        return layers_on_ranks(costs, self._layout.counts, self._layout.mesh.pipe)

    def schedule(self, candidate: Candidate) -> Schedule:
        """Return the schedule of a candidate."""
        chunks = Chunks(candidate.pipe, candidate.chunks)
        return Schedule(chunks, self._samples // candidate.micro_size, candidate.split)

    def workload(self, candidate: Candidate) -> Workload:
        """Return the workload of a candidate, which must have this object's mesh, partition and ZeRO stage."""
        return replace(
            self._layout,
            known_costs=self.costs_of(candidate.micro_size),
            micro_size=candidate.micro_size,
            schedule=self.schedule(candidate),
            recompute="full" if candidate.interval else "none",
            interval=candidate.interval or 1,
        )


class Workloads:
    """Workloads of candidates for one job, with caches for the parts that several candidates share.

    `per_node` is the number of devices per node, 0 if unknown. Context parallelism by heads (Ulysses) stays within a
    node. `costs_of` returns the costs of a traced model; it is None for models whose costs have closed forms.
    """

    def __init__(self, job: Job, per_node: int = 0, costs_of: CostsOf | None = None) -> None:
        self._find_costs, self._is_traced = costs_of or costs_by_form(job), costs_of is not None
        base = workload_of(job, self._find_costs)
        assert base is not None, "a model whose costs are known"
        self.job, self.base, self.own, self.per_node = job, base, candidate_of(job), per_node
        self._cuboids: dict[tuple[TensorParallel, ContextParallel | None], TensorMesh] = {}
        self._costs: dict[TensorMesh, dict[int, ModelCosts | None]] = {}
        self._counts: dict[tuple[int, int], tuple[int, ...]] = {}
        self._framework: dict[int, Framework] = {}
        self._last: tuple[object, SameLayout] | None = None

    def cuboid(self, tensor: TensorParallel, context: ContextParallel | None) -> TensorMesh:
        """Return the cuboid of tensor and context parallelism."""
        key = tensor, context
        if key not in self._cuboids:
            self._cuboids[key] = cuboid_in(self.job, *key)
        return self._cuboids[key]

    def counts(self, candidate: Candidate) -> tuple[int, ...]:
        """Return the number of layers on each stage.

        A candidate with the config's own number of stages keeps the config's partition. Others get an automatic one.
        """
        key = candidate.pipe, candidate.chunks
        if key not in self._counts:
            own = (self.own.pipe, self.own.chunks)
            counts = self.job.stages.counts if key == own else self._automatic(candidate)
            assert counts is not None, "layers that can be counted"
            self._counts[key] = counts
        return self._counts[key]

    def _automatic(self, candidate: Candidate) -> tuple[int, ...] | None:
        spec, model, units = self.job.spec, self.job.spec.model, self.base.costs.units
        if candidate.pipe == 1:
            return (sum(self.base.counts),)
        pipeline = pipeline_of(spec) or PipelineParallel(size=candidate.pipe)
        given = replace(pipeline, size=candidate.pipe, stage_ids=None, counts=None)
        in_parallel = replace(spec, parallel=replace(spec.parallel, pipeline=given))
        method = method_of(spec if is_of_libai(spec) else in_parallel, given).value
        chunks = Chunks(candidate.pipe, candidate.chunks)
        counts = auto_counts(model, method, chunks, self.job.seq_len)
        if (
            counts is None and units
        ):  # a traced model: partition by the traced weights, as the engine does when it builds
            return automatic(method, len(units), chunks, lambda _: [int(each.memory.weights) for each in units])
        return counts

    def workload(self, candidate: Candidate) -> Workload:
        """Return the workload of a candidate."""
        return self.same_layout(candidate).workload(candidate)

    def same_layout(self, candidate: Candidate) -> SameLayout:
        """Return the workloads that share a candidate's mesh, partition and ZeRO stage.

        Only the last result is cached, so callers should group candidates by these settings.
        """
        pipe, zero = candidate.pipe, candidate.zero
        key = candidate.tensor, candidate.context, candidate.expert, pipe, candidate.chunks, zero
        if self._last is None or self._last[0] != key:
            job = self.job
            cuboid = with_experts(
                self.cuboid(candidate.tensor, candidate.context), self.job.spec.model, candidate.expert
            )
            cuboid = with_zero(cuboid, job.spec.model, zero, pipe)
            data = job.mesh.world_size // (pipe * cuboid.size)
            mesh = Mesh(pipe=pipe, data=data, tensor=cuboid, order=job.mesh.order)
            framework = self._framework_at(zero)
            made = replace(self.base, mesh=mesh, counts=self.counts(candidate), zero=zero, framework=framework)
            samples = job.batch.global_size // data
            self._last = key, SameLayout(made, samples, self._costs.setdefault(cuboid, {}), self._find_costs)
        return self._last[1]

    def _framework_at(self, zero: int) -> Framework:
        """Return the behaviour of DeepSpeed and dslpar at a ZeRO stage."""
        if zero not in self._framework:
            spec = self.job.spec
            self._framework[zero] = framework_of(replace(spec, zero=replace(spec.zero, stage=zero)))
        return self._framework[zero]

    def has_costs(self, cuboid: TensorMesh, micro_size: int) -> bool:
        """Return whether the model's layers can be sharded on this cuboid; always True unless the model was traced."""
        if not self._is_traced:
            return True
        known = self._costs.setdefault(cuboid, {})
        if micro_size not in known:
            known[micro_size] = self._find_costs(cuboid, micro_size)
        return known[micro_size] is not None


# Command-line overrides -------------------------------------------------------------------------------------------


def overrides(job: Job, candidate: Candidate, written: Mapping[str, str] = {}) -> list[str]:
    """Return the overrides that turn the job's config into the candidate; an empty list if it is the config's layout.

    `written` maps keys to the names that the config's author used for them (`Reading.written`).
    """
    return [f"{written.get(key, key)}={value}" for key, value in settings(job, candidate).items()]


def settings(job: Job, candidate: Candidate) -> dict[str, str]:
    """Return the keys that the candidate sets differently from the config, with their values as text."""
    return layout_settings(job, candidate) | _batch_settings(job, candidate)


def layout_settings(job: Job, candidate: Candidate) -> dict[str, str]:
    """Return the differing settings except those of the batch."""
    own, spec = candidate_of(job), job.spec
    found: dict[str, str] = {}
    if candidate.zero != own.zero:
        found["zero.stage"] = str(candidate.zero)
    if candidate.interval != own.interval:
        found |= _recompute_settings(spec, candidate.interval)
    if candidate.tensor != own.tensor:
        found |= _tensor_settings(spec, own.tensor, candidate.tensor)
    if candidate.context != own.context:
        found |= _context_settings(own.context, candidate.context)
    if candidate.expert != own.expert:
        found["parallel.expert"] = _expert_setting(candidate.expert)
    if (candidate.pipe, candidate.chunks) != (own.pipe, own.chunks):
        found |= _pipeline_settings(spec, own, candidate)
    if (candidate.chunks, candidate.split) != (own.chunks, own.split):
        found |= _schedule_settings(spec, candidate)
    return found | _data_settings(job, candidate)


def _recompute_settings(spec: Spec, interval: int) -> dict[str, str]:
    """Return the setting of the recomputation interval.

    Other options of the section, such as offloading, stay unless recomputation is switched off.
    """
    checkpoint = spec.activation_checkpoint
    has_options = checkpoint is not None and (checkpoint.offload or checkpoint.mlp_chunks > 1)
    if not interval or not has_options:
        return {"activation_checkpoint": str(interval) if interval else "None"}
    return {"activation_checkpoint.interval": str(interval)}


def _replicas(job: Job, candidate: Candidate) -> int:
    """Return the size of the data axis."""
    return job.mesh.world_size // (candidate.pipe * cuboid_in(job, candidate.tensor, candidate.context).size)


def _data_settings(job: Job, candidate: Candidate) -> dict[str, str]:
    """Unset the data-parallel size if the config states it and the candidate has another one."""
    spec = job.spec
    if _replicas(job, candidate) == job.mesh.data:
        return {}
    return {key.removesuffix(".size"): "None" for key in stated_replicas(spec)}


def _pipeline_settings(spec: Spec, own: Candidate, candidate: Candidate) -> dict[str, str]:
    """Set the pipeline's size, and unset the config's list of layers per stage, which fits only the old size."""
    pipeline, size = pipeline_of(spec), str(candidate.pipe)
    lists_layers = pipeline is not None and (pipeline.stage_ids is not None or pipeline.counts is not None)
    if is_of_libai(spec):
        found = {stage_ids_key(spec): "None"} if lists_layers else {}
        return found | ({pipeline_key(spec): size} if candidate.pipe != own.pipe else {})
    if lists_layers:
        return {"parallel.pipeline": size}
    if candidate.pipe == own.pipe:
        return {}
    return {"parallel.pipeline.size" if pipeline is not None and pipeline.method else "parallel.pipeline": size}


def _tensor_settings(spec: Spec, own: TensorParallel, other: TensorParallel) -> dict[str, str]:
    if is_of_libai(spec):
        return {tensor_key(spec): str(other.size)}
    if other.size == 1:
        return {"parallel.tensor": "None"}
    if own.mode == other.mode:
        return {f"parallel.tensor.{name}": _literal(getattr(other, name)) for name in sorted(_differing(own, other))}
    return {"parallel.tensor": _whole(other)}


def _context_settings(own: ContextParallel | None, other: ContextParallel | None) -> dict[str, str]:
    """Set single keys if the config's section has options besides its size; otherwise set the whole section."""
    if other is None:
        return {"parallel.context": "None"}
    if own is None or (own.impl is None and own.ulysses_size is None):
        return {"parallel.context": _whole(other)}
    return {f"parallel.context.{name}": _literal(getattr(other, name)) for name in sorted(_differing(own, other))}


def _expert_setting(expert: ExpertParallel | None) -> str:
    if expert is None:
        return "None"
    return str(expert.size) if expert.chunks == 1 else f"dict(size={expert.size}, chunks={expert.chunks})"


def _whole(section: TensorParallel | ContextParallel) -> str:
    """Return a section as config text for a command line.

    Strings have double quotes, because the whole argument is quoted with single quotes.
    """
    given = {item.name: getattr(section, item.name) for item in fields(section)}
    shown = [
        f'{name}="{value}"' if isinstance(value, str) else f"{name}={value!r}"
        for name, value in given.items()
        if value is not None
    ]
    return f"dict({', '.join(shown)})"


def _schedule_settings(spec: Spec, candidate: Candidate) -> dict[str, str]:
    found = {"schedule.type": candidate.schedule_type}
    given = spec.schedule.num_model_chunks if spec.schedule is not None else None
    default = 2 if found["schedule.type"] == "interleaved" else 1
    if (given or default) != candidate.chunks:
        found["schedule.num_model_chunks"] = str(candidate.chunks)
    return found


def _batch_settings(job: Job, candidate: Candidate) -> dict[str, str]:
    """Return the smallest set of batch keys that gives the candidate's micro-batch and keeps the global batch."""
    spec, cuboid = job.spec, cuboid_in(job, candidate.tensor, candidate.context)
    data = _replicas(job, candidate)
    whole, micro = job.batch.global_size, candidate.micro_size
    wanted = Batch(global_size=whole, micro_size=micro, accumulation=whole // (data * micro))
    of_schedule = spec.batch.accumulation is None and spec.schedule is not None and spec.schedule.num_microbatches
    count_key = "schedule.num_microbatches" if of_schedule else "batch.accumulation"
    keys = {"global_size": "batch.global_size", "micro_size": "batch.micro_size", "accumulation": count_key}
    given = requested_batch(spec)
    for names in _FEWEST_FIRST:
        changed = {name: getattr(wanted, name) for name in names}
        if batch_of(replace(given, **changed), Sizes(data, cuboid)) == wanted:
            return {keys[name]: str(size) for name, size in changed.items()}
    raise AssertionError("global size, micro size and accumulation determine the batch")


_FEWEST_FIRST = (
    (),
    ("micro_size",),
    ("accumulation",),
    ("micro_size", "accumulation"),
    ("global_size",),
    ("global_size", "micro_size"),
    ("global_size", "micro_size", "accumulation"),
)
"""Combinations of batch sizes to set, the smallest first."""


def _literal(value: object) -> str:
    return value if isinstance(value, str) else repr(value)
