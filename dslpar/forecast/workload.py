"""Workload: a training step as plain values, the input of the forecasts of memory and time.

    workload = workload_of(job)        # from a dslpar config
    workload.costs, workload.weights(pipe_rank=0)

A workload has the model, the mesh, the schedule, and the behaviour of the training framework (`Framework`) that changes
memory or time, such as the dtype of gradients, overlap, and buffers. So the forecast is usable for other frameworks
too. The forecast's benchmark makes workloads from published runs of several frameworks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from operator import attrgetter
from typing import Literal

from dslpar.core.mesh import Mesh, TensorMesh
from dslpar.costs.any_model import costs_function, model_costs
from dslpar.costs.collective_traffic import Number
from dslpar.costs.memory import LayerMemory
from dslpar.costs.model_costs import Costs, ModelCosts
from dslpar.layout.chunks import Chunks
from dslpar.layout.deepspeed_config import CHOICES, overlaps_param_gather, overlaps_reduction
from dslpar.layout.resolve import Job, offloads
from dslpar.layout.schedule import Schedule
from dslpar.schema.sections import SGD, AdamW, Model, Optimizer, OtherModel, Spec, TokenModel

Recompute = Literal["none", "selective", "full"]
CostsOf = Callable[[TensorMesh, int], ModelCosts | None]
"""Function from a cuboid and the samples of a micro-batch to the costs of a job's model on a rank; None if unknown."""
DTYPE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


@dataclass(frozen=True, kw_only=True)
class Buckets:
    """Sizes of DeepSpeed's buffers in elements, and their dtypes; backquoted names are keys of DeepSpeed's config."""

    reduce: float | None = None
    """`reduce_bucket_size`. None means dslpar's choice at ZeRO 1 and 2, and DeepSpeed's default at ZeRO 3."""
    num_staged: int = 1
    """Buckets that DeepSpeed fills in turn, if DeepSpeed reduces the gradients: 2 with `overlap_comm`."""
    overlapped: bool = True
    """True if dslpar reduces the gradients of ZeRO 1 and 2 during the backward; False if DeepSpeed reduces them."""
    summed_bytes: int = 4
    """Bytes per element of an accumulated gradient: `data_types.grad_accum_dtype`."""
    communicated_bytes: int | None = None
    """Bytes per element of a gradient in a collective: `communication_data_type`. None means 4, or 2 in fp16."""
    prefetched: float = 5e7
    """`stage3_prefetch_bucket_size`."""
    persistent: float = 1e5
    """`stage3_param_persistence_threshold`."""
    live: float = 1e9
    """`stage3_max_live_parameters`."""
    reused: float = 1e9
    """`stage3_max_reuse_distance`."""
    step_elements: float = 1e9
    """`sub_group_size`: elements that ZeRO 3's optimizer updates at once."""
    offloads_weights: bool = False
    """True if ZeRO 3's weights are in the host's memory (`offload_param`)."""

    def reduce_elements(self, zero: int) -> float:
        """Return the elements of a gradient bucket at a ZeRO stage."""
        if self.reduce is not None:
            return self.reduce
        return 5e8 if zero == 3 else float(CHOICES["zero_optimization.reduce_bucket_size"].value)


@dataclass(frozen=True, kw_only=True)
class Framework:
    """Behaviour of a training framework that changes memory or time.

    The defaults describe dslpar on DeepSpeed in half precision with ZeRO.
    """

    name: str = "dslpar"
    gradient_bytes: float = 4.0
    """Bytes per element of an accumulated gradient."""
    reduced_bytes: float = 4.0
    """Bytes per element of a gradient in the reduction over replicas."""
    overlaps_reduction: bool = True
    """True if the reduction over replicas runs during the last micro-batch's backward."""
    overlaps_gather: bool = False
    """True if updated weights are gathered during the next forward."""
    gathers_buffers: bool = True
    """True if updated weights are gathered in large buffers; False if each weight is gathered by itself."""
    prefetches_weights: bool = True
    """True if ZeRO 2's and 3's collectives of a layer run while its neighbour computes."""
    fused_attention: bool = True
    """True if attention is fused (flash attention). It saves no scores, and computes half of them under a causal mask.
    """
    offloads_optimizer: bool = False
    """True if optimizer states are in the host's memory."""
    moments: float = 2.0
    """Numbers in fp32 that the optimizer keeps per weight, besides the weight itself: 2 for Adam."""
    buckets: Buckets | None = Buckets()
    """DeepSpeed's buckets. None means a framework without DeepSpeed, which allocates gradients when the run starts."""
    boundaries: int = 2
    """Activations at a stage's ends that it keeps per micro-batch: 2 if it keeps both the received and the sent one."""
    fused_norms: bool = True
    """True if norms save only their input, like GPU kernels. On a CPU torch's RMSNorm also saves its result."""
    logit_bytes: float | None = None
    """Bytes per logit while the loss is computed. None means those of `dslpar.layers.loss`."""
    splits_messages: bool = False
    """True if the ranks of a tensor group each send a part of a message between stages, although all have the whole."""
    blocking_messages: bool = False
    """True if the host waits for each message between stages, and launches no kernels meanwhile."""
    fused_optimizer: bool = True
    """True if one kernel updates a weight; False if each operation of the optimizer is a kernel."""
    launch_ratio: float = 1.0
    """Kernels that the host launches per layer, relative to a dslpar layer."""
    compiles_layers: bool = False
    """True if torch.compile compiles layers. Compiled layers do not prefetch weights."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One training step: model, layout and framework."""

    model: Model | OtherModel
    mesh: Mesh
    counts: tuple[int, ...]
    """Layers on each stage."""
    schedule: Schedule
    """Schedule of the pipeline. Without a pipeline it still has the number of micro-batches per step."""
    micro_size: int
    """Samples per micro-batch of one data rank."""
    seq_len: int
    """Tokens per sample."""
    zero: int = 0
    """ZeRO stage."""
    dtype: str = "bf16"
    """Dtype in which the model computes: a key of `DTYPE_BYTES`."""
    recompute: Recompute = "none"
    """Activation checkpointing: "none", "selective" for attention's scores, or "full" for groups of layers."""
    interval: int = 1
    """Layers per recomputed group with "full"."""
    offloads_inputs: bool = False
    """True if the saved inputs of recomputed layers are in the host's memory."""
    mlp_chunks: int = 1
    """Number of chunks of tokens in which a recomputed layer computes its norm and MLP one after the other."""
    loss_chunks: int = 1
    """Number of chunks of tokens for which logits and loss are computed one after the other."""
    framework: Framework = Framework()
    """Behaviour of the training framework."""
    known_costs: ModelCosts | None = None
    """Costs of the model's parts on a rank, if computed before."""
    expert_load: float = 1.0
    """Rows that the experts of the fullest rank get, relative to the even load, if tokens are sent to experts."""

    @property
    def tokens(self) -> int:
        """Tokens per micro-batch."""
        return self.micro_size * self.seq_len

    @property
    def micro_batches(self) -> int:
        """Micro-batches per step."""
        return self.schedule.num_micro_batches

    @property
    def global_size(self) -> int:
        """Samples per step, over all replicas."""
        return self.micro_size * self.micro_batches * self.mesh.data

    @property
    def chunks(self) -> Chunks:
        """Stages, and the pipeline rank that holds each."""
        return self.schedule.chunks

    @property
    def element_bytes(self) -> int:
        """Bytes per element of an activation or a weight."""
        return DTYPE_BYTES[self.dtype]

    @cached_property
    def costs(self) -> ModelCosts:
        """Costs of the model's parts on a rank."""
        if self.known_costs is not None:
            return self.known_costs
        found = model_costs(self.model, self.mesh.tensor, self.tokens, self.seq_len)
        assert found is not None, "a model whose costs are known"
        return found

    def ends(self, stage: int) -> Costs:
        """Return the costs of a stage without its layers: the tables in the first stage, the head in the last."""
        first, last = stage == 0, stage == self.chunks.last
        return (self.costs.first if first else Costs()) + (self.costs.last if last else Costs())

    def layers_of(self, stage: int) -> tuple[tuple[Costs, int], ...]:
        """Return the layers of a stage as pairs (costs, number of layers with these costs)."""
        if not self.costs.units:
            return ((self.costs.layer, self.counts[stage]),)
        before = sum(self.counts[:stage])
        return tuple((each, 1) for each in self.costs.units[before : before + self.counts[stage]])

    @property
    def layers_on_ranks(self) -> tuple[float, ...]:
        """Number of times that each pipeline rank computes `costs.layer` per micro-batch.

        This is the rank's number of layers. In a traced model, where `costs.layer` is all layers together, it is the
        rank's share of their compute.
        """
        return layers_on_ranks(self.costs, self.counts, self.chunks.pipe)

    def weights(self, pipe_rank: int) -> float:
        """Return the elements of weights that a pipeline rank holds; a tied weight counts once."""
        return self._held(pipe_rank, self.costs.weights, attrgetter("weights"))

    def trained(self, pipe_rank: int) -> float:
        """Return the elements of trained weights that a pipeline rank holds."""
        return self.weights(pipe_rank) - self._held(pipe_rank, self.costs.frozen, attrgetter("frozen"))

    def experts(self, pipe_rank: int) -> float:
        """Return the elements of weights that only the ranks of "expert_data" share; 0 unless tokens are exchanged."""
        return sum(
            float(costs.memory.experts) * number
            for stage in self.chunks.held_by(pipe_rank)
            for costs, number in self.layers_of(stage)
        )

    def _held(
        self, pipe_rank: int, parts: tuple[float, float, float, float], of: Callable[[LayerMemory], Number]
    ) -> float:
        first, layer, last, tied = parts
        held = self.chunks.held_by(pipe_rank)
        if self.costs.units:
            total = sum(float(of(each.memory)) for stage in held for each, _ in self.layers_of(stage))
        else:
            total = layer * sum(self.counts[stage] for stage in held)
        has_first, has_last = pipe_rank == 0, pipe_rank == self.chunks.pipe - 1
        total += (first if has_first else 0.0) + (last if has_last else 0.0)
        return total - (tied if has_first and has_last else 0.0)


def layers_on_ranks(costs: ModelCosts, counts: tuple[int, ...], pipe: int) -> tuple[float, ...]:
    """Return `Workload.layers_on_ranks` for `counts` layers on the stages of `pipe` ranks."""
    loads: tuple[float, ...] = counts
    if costs.units:
        ends = [0, *accumulate(counts)]
        loads = tuple(sum(costs.shares[begin:end]) for begin, end in pairwise(ends))
    return loads if len(loads) == pipe else tuple(sum(loads[rank::pipe]) for rank in range(pipe))


def costs_by_form(job: Job) -> CostsOf:
    """Return the function that computes a job's costs in closed form; it returns None if they are unknown."""

    by_form = costs_function(job.spec.model, job.seq_len) if job.seq_len else None

    def costs_of(cuboid: TensorMesh, micro_size: int) -> ModelCosts | None:
        return None if by_form is None else by_form(cuboid, float(micro_size * job.seq_len))

    return costs_of


def workload_of(job: Job, costs_of: CostsOf | None = None) -> Workload | None:
    """Return the workload of a job; None if the costs of its model are unknown."""
    model, spec = job.spec.model, job.spec
    costs = (costs_of or costs_by_form(job))(job.mesh.tensor, job.batch.micro_size)
    if costs is None or job.stages.counts is None:
        return None
    checkpoint = spec.activation_checkpoint
    return Workload(
        model=model,
        mesh=job.mesh,
        counts=job.stages.counts,
        schedule=job.schedule,
        micro_size=job.batch.micro_size,
        seq_len=job.seq_len or 1,  # job.seq_len is 0 for a traced model whose samples are not sequences
        zero=spec.zero.stage,
        dtype=spec.precision.dtype,
        recompute="none" if checkpoint is None else "full",
        interval=1 if checkpoint is None else checkpoint.interval,
        offloads_inputs=checkpoint is not None and checkpoint.offload,
        mlp_chunks=checkpoint.mlp_chunks if checkpoint is not None and isinstance(model, TokenModel) else 1,
        loss_chunks=spec.train.loss_chunks,
        framework=framework_of(spec),
        known_costs=costs,
    )


def framework_of(spec: Spec) -> Framework:
    """Return the behaviour of dslpar and DeepSpeed with this config."""
    half = spec.precision.dtype != "fp32"
    # ZeRO 0 in half precision keeps and sums gradients in the model's type; ZeRO 1 to 3 do so in fp32.
    narrow = half and spec.zero.stage == 0
    reduced = 2.0 if narrow or (half and spec.precision.dtype == "fp16") else 4.0
    return Framework(
        gradient_bytes=2.0 if narrow else 4.0,
        reduced_bytes=reduced,
        overlaps_reduction=spec.zero.stage == 3 or overlaps_reduction(spec),
        overlaps_gather=spec.zero.stage == 3 or overlaps_param_gather(spec),
        prefetches_weights=not spec.train.compiles_layers and (spec.zero.stage == 3 or overlaps_reduction(spec)),
        offloads_optimizer=offloads(spec, "optimizer"),
        moments=_moments(spec.optimizer),
        buckets=buckets_of(spec),
        compiles_layers=spec.train.compiles_layers,
    )


def buckets_of(spec: Spec) -> Buckets:
    """Return the sizes of DeepSpeed's buffers: those that the config sets, and defaults for the others."""
    own = spec.deepspeed
    zero = {**spec.zero.extra, **own.get("zero_optimization", {})}
    sizes = {name: float(zero[key]) for name, key in _SIZES.items() if key in zero}
    off = any(zero.get(key) is False for key in ("overlap_comm", "reduce_scatter", "contiguous_gradients"))
    return Buckets(
        **sizes,
        num_staged=2 if zero.get("overlap_comm") else 1,
        overlapped=not (off or zero.get("use_multi_rank_bucket_allreduce") or offloads(spec, "optimizer")),
        summed_bytes=DTYPE_BYTES.get(own.get("data_types", {}).get("grad_accum_dtype", "fp32"), 4),
        communicated_bytes=DTYPE_BYTES.get(own.get("communication_data_type", "")),
        offloads_weights=offloads(spec, "param"),
    )


_SIZES = {
    "reduce": "reduce_bucket_size",
    "prefetched": "stage3_prefetch_bucket_size",
    "persistent": "stage3_param_persistence_threshold",
    "live": "stage3_max_live_parameters",
    "reused": "stage3_max_reuse_distance",
    "step_elements": "sub_group_size",
}


def _moments(optimizer: Optimizer) -> float:
    """Return how many numbers an optimizer keeps per weight; an unknown class counts like Adam, with 2."""
    if isinstance(optimizer, SGD):
        return 1.0 if optimizer.momentum else 0.0
    if isinstance(optimizer, AdamW):
        return 3.0 if optimizer.amsgrad else 2.0
    return _MOMENTS.get(optimizer.target.rpartition(".")[2], 2.0)


_MOMENTS = {"Adagrad": 1.0, "DeepSpeedCPUAdagrad": 1.0, "Lion": 1.0, "FusedLion": 1.0, "DeepSpeedCPULion": 1.0}
