"""Resolution of a Spec and a world size to a Job: every value that the config leaves out is inferred.

An illegal value is an error, never rounded to a legal one. `resolve` is the overview. Each function below it decides
one part. The linter uses the same functions to find errors, and `resolve` runs on a spec that the linter has passed. A
function returns an `InferredValue`, a value with its reason, if the value needs an explanation.
`dslpar.schema.parallel_forms` merges LiBai's `train.dist` and dslpar's `parallel`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from dslpar.core.mesh import STANDARD_ORDER, Mesh, TensorMesh
from dslpar.layout.batch import Batch, Sizes, batch_of, requested_batch
from dslpar.layout.chunks import Chunks
from dslpar.layout.family_interface import pipeline_weights
from dslpar.layout.inferred_value import InferredValue
from dslpar.layout.listed_layers import are_all_of_torch
from dslpar.layout.modes import Heads, cuboid_of
from dslpar.layout.schedule import Schedule
from dslpar.layout.stages import Counts, Weights, automatic, counts_of, ids_of
from dslpar.schema.parallel_forms import pipeline_of, tensor_of
from dslpar.schema.sections import ExpertParallel, Model, OtherModel, PipelineParallel, Spec


class Stages(NamedTuple):
    """Partition of layers into pipeline stages.

    A field is None if it needs the built model. With one stage, both ids are None.
    """

    auto_ids: tuple[int, ...] | None
    """Pipeline rank of each layer by the automatic method."""
    actual_ids: tuple[int, ...] | None
    """Pipeline rank of each layer in the partition that is used."""
    counts: tuple[int, ...] | None
    """Number of layers on each stage in the partition that is used."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """Run with every value decided."""

    path: str
    """Path of the config file."""
    spec: Spec
    """Contents of the config."""
    mesh: Mesh
    """Mesh of all ranks."""
    stages: Stages
    """Layers on each stage."""
    batch: Batch
    """Batch sizes of a step."""
    seq_len: int
    """Tokens per sample; 0 if not known."""
    output_dir: str
    """Folder that the run writes to."""
    trusted: tuple[str, ...] = ()
    """Packages that the config may call (`dslpar.core.trust`)."""
    has_program_model: bool = False
    """Whether a program passes the model. The spec then names its class, from which alone it cannot be built."""

    @property
    def chunks(self) -> Chunks:
        """The stages of the pipeline, and the rank that holds each."""
        return chunks_of(self.spec, self.mesh.pipe)

    @property
    def schedule(self) -> Schedule:
        """The actions of each rank of the pipeline in a step, in order."""
        return schedule_of(self.spec, self.mesh.pipe, self.batch.accumulation)


def resolve(spec: Spec, world_size: int, path: str = "", trusted: tuple[str, ...] = ()) -> Job:
    """Decide all values of a run. The spec must have passed the linter for this world size."""
    pipeline, cuboid = pipeline_of(spec), cuboid_of(tensor_of(spec), spec.parallel.context, heads_of(spec.model))
    num_stages = pipeline.size if pipeline else 1
    cuboid = with_zero(with_experts(cuboid, spec.model, spec.parallel.expert), spec.model, spec.zero.stage, num_stages)
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
        trusted=trusted,
    )


SIZE_KEYS = ("parallel.pipeline.size", "parallel.tensor.size")


def data_size_of(world_size: int, num_stages: int, tensor_size: int) -> InferredValue:
    """Decide the number of replicas: the world size divided by the other sizes."""
    why = f"{world_size} ranks / (pipeline {num_stages} * tensor {tensor_size})"
    return InferredValue(world_size // (num_stages * tensor_size), why, SIZE_KEYS)


def heads_of(model: Model | OtherModel) -> Heads:
    """Return the known properties of a model's attention, from its section."""
    if isinstance(model, Model):
        return Heads(getattr(model, "num_heads", None), getattr(model, "num_kv_heads", None), model.is_causal)
    config = model.transformers
    if config is None:
        return Heads()
    return Heads(config.size("heads"), config.size("kv_heads"), config.is_causal)


def with_experts(cuboid: TensorMesh, model: Model | OtherModel | None, expert: ExpertParallel | None) -> TensorMesh:
    """Return the cuboid, whose mixtures send tokens to their experts on `expert.size` ranks, if the config has that.

    dslpar's own mixtures always send tokens. Without `expert` the ranks of a tensor group hold all experts.
    """
    if expert is None:
        is_own = isinstance(model, Model) and model.num_experts is not None
        return replace(cuboid, exchanges_tokens=True) if is_own else cuboid
    return replace(cuboid, e=max(1, expert.size // cuboid.size), exchanges_tokens=True, expert_chunks=expert.chunks)


def with_zero(cuboid: TensorMesh, model: Model | OtherModel, stage: int, num_stages: int) -> TensorMesh:
    """Return the cuboid, with `zero_over_d` set if ZeRO can shard over axis d as well as over replicas.

    Ranks along d hold equal weights. ZeRO cannot shard over d in a model with experts, since each rank of a tensor
    group holds different experts. It cannot do so in a pipeline either, since DeepSpeed's grid of pipeline ranks has no
    axis but replicas for ZeRO.
    """
    has_experts = cuboid.exchanges_tokens or model.num_experts is not None
    zero_over_d = cuboid.d > 1 and stage > 0 and num_stages == 1 and not has_experts
    return replace(cuboid, zero_over_d=zero_over_d) if zero_over_d != cuboid.zero_over_d else cuboid


# Pipeline ---------------------------------------------------------------------------------------------------------


def auto_counts(model: Model | OtherModel, method: str, chunks: Chunks, seq_len: int) -> Counts | None:
    """Return the layers on each stage by an automatic method; None if that needs the built model."""

    def weights_by(method: str) -> Weights | None:
        return pipeline_weights(model, method, seq_len)

    return None if model.num_layers is None else automatic(method, model.num_layers, chunks, weights_by)


def method_of(spec: Spec, pipeline: PipelineParallel) -> InferredValue:
    """Decide the automatic method of the partition."""
    if spec.parallel.pipeline is None:
        why = "the pipeline is requested in LiBai's form, so layers are divided as in LiBai"
        return InferredValue("libai", why, ("parallel.pipeline.size",))
    if pipeline.method is not None:
        return InferredValue(pipeline.method)
    return InferredValue("cost", "left out: the work of stages is as even as possible", how="default")


def stages_of(spec: Spec, pipeline: PipelineParallel | None) -> Stages:
    """Return the automatic partition and the one that is used; values that need the built model are None."""
    model = spec.model
    if model.num_layers is None:
        return Stages(None, None, None)
    if pipeline is None or pipeline.size == 1:
        return Stages(None, None, (model.num_layers,))
    chunks = chunks_of(spec, pipeline.size)
    auto = auto_counts(model, method_of(spec, pipeline).value, chunks, seq_len_of(spec))
    return stages_from(pipeline, chunks, auto)


def stages_from(pipeline: PipelineParallel, chunks: Chunks, auto: Counts | None) -> Stages:
    """Return the automatic partition `auto`, and the one that is used: by stage_ids, else by counts, else `auto`."""
    counts = pipeline.counts or auto
    if pipeline.stage_ids is not None:
        counts = counts_of(pipeline.stage_ids, chunks)
    return Stages(auto and ids_of(auto, chunks), counts and ids_of(counts, chunks), counts and tuple(counts))


# Schedule ---------------------------------------------------------------------------------------------------------


def num_model_chunks_of(spec: Spec) -> InferredValue:
    """Decide the number of stages per rank of a pipeline."""
    schedule = spec.schedule
    if schedule is not None and schedule.num_model_chunks is not None:
        return InferredValue(schedule.num_model_chunks)
    if schedule is not None and schedule.type == "interleaved":
        return InferredValue(2, "left out: the fewest that can be interleaved", ("schedule.type",))
    return InferredValue(1, "left out: one stage per rank", how="default")


def chunks_of(spec: Spec, pipe: int) -> Chunks:
    """Return the stages of a pipeline over `pipe` ranks; '1f1b' has one per rank, and the linter refuses more."""
    several = pipe > 1 and spec.schedule is not None and spec.schedule.type != "1f1b"
    return Chunks(pipe, num_model_chunks_of(spec).value if several else 1)


def schedule_of(spec: Spec, pipe: int, num_micro_batches: int) -> Schedule:
    """Return the schedule of a step over `pipe` ranks."""
    return Schedule(chunks_of(spec, pipe), num_micro_batches, splits_backward(spec))


def splits_backward(spec: Spec) -> bool:
    """Return whether the schedule splits the backward; it does not if no layer can defer weight gradients."""
    return spec.schedule is not None and spec.schedule.type == "zero_bubble" and can_defer_weight_gradients(spec)


def can_defer_weight_gradients(spec: Spec) -> bool:
    """Return whether layers can defer the gradients of their weights; True if only the built model shows it.

    Layers of torch.nn cannot. With adapters (LoRA) there is nothing to defer, since the weights are frozen.
    """
    return isinstance(spec.model, Model) or (spec.model.lora is None and not are_all_of_torch(spec.model))


# Other inferred values --------------------------------------------------------------------------------------------


def offloads(spec: Spec, what: str) -> bool:
    """Return whether ZeRO offloads `what`, "optimizer" or "param", from the device."""
    device: str | None = spec.zero.extra.get(f"offload_{what}", {}).get("device")
    return device not in (None, "none")


def seq_len_of(spec: Spec) -> int:
    """Return the tokens per sample; 0 if neither the data nor the model's own keys set it."""
    if spec.data.seq_len or isinstance(spec.model, Model):
        return spec.data.seq_len or spec.model.longest_sample  # type: ignore[union-attr]
    config = spec.model.transformers
    if config is None or not config.given("positions"):
        return 0  # not the class's default of about 131,072 tokens, which no author asked for
    return config.longest_sequence or 0


def run_name(path: str) -> str:
    """Return the config's name, which is the default name of a run."""
    return default_output_dir(path).rpartition("/")[2]


def default_output_dir(path: str) -> str:
    """Return outputs/<config name> in the working folder; for a run's config.yaml, the folder of that run."""
    folder, _, name = path.replace("\\", "/").rpartition("/")
    return folder if folder and name == "config.yaml" else "outputs/" + name.rpartition(".")[0].strip("<>")
