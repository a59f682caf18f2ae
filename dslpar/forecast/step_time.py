"""Forecast the time of a training step from what each rank computes and sends, in closed form.

    time = step_time(workload, device, Nodes.usual(device))
    time.step_s, time.tensor_s, time.bubble_s

A layer's time is that of its kernels (`dslpar.forecast.kernels`) and collectives (`dslpar.forecast.links`), or the time
that the host needs to launch them, whichever is longer (`dslpar.forecast.part_times`). The pipeline rank with the most
work per micro-batch, the busiest rank, sets the pace. A step consists of its micro-batches, of the pipeline's idle
time, and of the work after the last backward::

    step = m * busiest + (sum - busiest) / v + messages + reduction + gather + optimizer + rest

Here m is the number of micro-batches, v the number of stages per rank, and `sum` the time of a micro-batch on all
pipeline ranks. For equal stages this is the closed form of `dslpar.layout.schedule`. ZeRO 2 and 3 send gradients and
weights in each micro-batch, while it computes.

The forecast has two phases. `terms_of` computes all inputs that need no fitted constant (the terms), which a
calibration does once per run. `time_of` applies `Constants`.

Sources: vTrain and Calculon for the share of the peak that a matrix product reaches, which falls with its size;
Calculon and llm-analysis for exposed and hidden communication; Megatron-LM's papers for recomputation and the parts of
a layer. The runs that the constants were fitted to showed that launches are a lower limit of a layer's time, and the
cost of messages that a host waits for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from dslpar.forecast.constants import DEFAULT, Constants
from dslpar.forecast.device import Device
from dslpar.forecast.links import NO_TRANSFER, Nodes, Transfer, group_of, transfer
from dslpar.forecast.part_terms import HOST_BYTES_PER_S, PartTerms, Sent, part_terms
from dslpar.forecast.part_times import PartTimes, part_times, smooth_max
from dslpar.forecast.workload import Workload
from dslpar.layout.schedule import Schedule

ROUNDED = 1 - 1e-9
"""Factor just below 1, so that rounding never lifts a lower bound above the time that it bounds."""
HIDING_BACKWARD = 0.6
"""Share of the last micro-batch's backward that hides a gradient reduction."""


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of a step on the busiest rank, and their parts.

    `compute_s` and `weights_s` are per micro-batch, and all others per step. The parts, with these two multiplied by
    the number of micro-batches, add up to `step_s`.
    """

    step_s: float
    compute_s: float
    """Kernels per micro-batch, including recomputation."""
    tensor_s: float
    """Exposed collectives of tensor and context parallelism."""
    launch_s: float
    """Time by which the host's launches lengthen kernels and collectives."""
    weights_s: float
    """Time by which the traffic of ZeRO 2 or 3 lengthens a micro-batch."""
    bubble_s: float
    """Idle time of the busiest rank in the pipeline; `Forecast.bubble` is its share for equal stages."""
    hops_s: float
    """Messages between stages."""
    reduction_s: float
    """Reduction of gradients that the backward does not hide."""
    gather_s: float
    """ZeRO 1's and 2's gather of updated weights, without the part that the next forward hides."""
    optimizer_s: float
    """The optimizer's update, and transfers of offloaded states."""
    other_s: float
    """Fixed time per step (the constant `step_s`)."""
    terms: Terms
    """Inputs that do not depend on fitted constants."""

    @property
    def sent(self) -> tuple[Sent, ...]:
        """Bytes that a rank of the busiest stage sends per step along each axis."""
        return self.terms.sent


class Terms(NamedTuple):
    """Inputs of a step's time that depend on the workload and the machine, and on no fitted constant."""

    parts: PartTerms
    """Terms of a layer, the tables and the head."""
    splits_backward: bool
    """True if the schedule computes the gradients of weights separately."""
    layers: tuple[float, ...]
    """Number of times that each pipeline rank computes `ModelCosts.layer` per micro-batch."""
    micro_batches: int
    """Micro-batches per step."""
    chunks: int
    """Stages per pipeline rank."""
    message: Transfer
    """One message between two stages."""
    num_messages: int
    """Length of a step's chain of messages, each of which waits for the one before."""
    replicas: ReplicaTerms
    """Traffic between replicas, and the optimizer's update."""
    overlaps_reduction: bool
    overlaps_gather: bool
    gathers_buffers: bool
    prefetches_weights: bool
    fused_optimizer: bool
    """As in `Framework`."""
    offloaded_s: float
    """Seconds to send gradients to the host and weights back, if the optimizer or the weights are offloaded."""
    message_sent: tuple[Sent, ...]
    """Bytes of all messages between stages in a step."""

    @property
    def sent(self) -> tuple[Sent, ...]:
        """Bytes that a rank of the busiest stage sends per step along each axis.

        Layers and replicas may send along the same axis. Their bytes are added.
        """
        num_layers, replicas = max(self.layers), self.replicas
        parts = (
            (self.parts.sent, num_layers * self.micro_batches),
            (replicas.sent_each, self.micro_batches),
            (replicas.sent_once, 1),
            (self.message_sent, 1),
        )
        found: dict[str, Sent] = {}
        for part, times in parts:
            for axis, across, num_bytes in part:
                if num_bytes:
                    before = found[axis].num_bytes if axis in found else 0.0
                    found[axis] = Sent(axis, across, before + num_bytes * times)
        return tuple(found.values())


def step_time(
    workload: Workload,
    device: Device,
    nodes: Nodes,
    constants: Constants = DEFAULT,
    replicas: ReplicaTerms | None = None,
) -> StepTime:
    """Return the time of a step; `replicas` is the result of `replica_terms`, if known."""
    return time_of(terms_of(workload, device, nodes, replicas), constants)


# Terms ------------------------------------------------------------------------------------------------------------


def terms_of(workload: Workload, device: Device, nodes: Nodes, replicas: ReplicaTerms | None = None) -> Terms:
    """Return the inputs of a step's time that need no fitted constant."""
    framework, chunks = workload.framework, workload.chunks
    pipe, micro_batches, nodes = chunks.pipe, workload.micro_batches, nodes.linked(device)
    if replicas is None:
        replicas = replica_terms(workload, device, nodes)
    message, message_sent = _message(workload, device, nodes) if pipe > 1 else (NO_TRANSFER, ())
    to_host = replicas.stepped * (4 + workload.element_bytes) if framework.offloads_optimizer else 0.0
    if framework.buckets is not None and framework.buckets.offloads_weights:  # each forward and backward reads them
        to_host += replicas.stepped * workload.element_bytes * 2 * micro_batches
    return Terms(
        parts=part_terms(workload, device, nodes),
        splits_backward=workload.schedule.split,
        layers=workload.layers_on_ranks,
        micro_batches=micro_batches,
        chunks=chunks.num,
        message=message,
        num_messages=2 * (micro_batches * chunks.num + pipe - 1) if pipe > 1 else 0,
        replicas=replicas,
        overlaps_reduction=framework.overlaps_reduction,
        overlaps_gather=framework.overlaps_gather,
        gathers_buffers=framework.gathers_buffers,
        prefetches_weights=framework.prefetches_weights,
        fused_optimizer=framework.fused_optimizer,
        offloaded_s=to_host / HOST_BYTES_PER_S,
        message_sent=message_sent,
    )


class ReplicaTerms(NamedTuple):
    """Traffic between replicas (ranks with the same weights) at a ZeRO stage, and the optimizer's update.

    It does not depend on the number or size of micro-batches.
    """

    each_micro_batch: tuple[Transfer, ...]
    """Collectives of ZeRO 2 and 3 in each micro-batch."""
    reduction: Transfer
    """All-reduce of gradients per step, at ZeRO 0 and 1."""
    gather: Transfer
    """All-gather of updated weights per step, at ZeRO 1 and 2."""
    stepped: float
    """Number of weights that a rank updates."""
    stepped_s: float
    """Seconds to read or write one byte per updated weight, at the memory's bandwidth."""
    sent_each: tuple[Sent, ...] = ()
    """Bytes sent per micro-batch."""
    sent_once: tuple[Sent, ...] = ()
    """Bytes sent once per step."""
    expert_reduction: Transfer = NO_TRANSFER
    expert_gather: Transfer = NO_TRANSFER
    """The parts of `reduction` and `gather` for experts that tokens are sent to: over "expert_data" alone."""


def replica_terms(workload: Workload, device: Device, nodes: Nodes) -> ReplicaTerms:
    """Return the traffic and updates of replicas, for the first or the last stage, whichever has more weights.

    Experts that tokens are sent to have fewer replicas: the ranks of "expert_data".
    """
    mesh, zero, nodes = workload.mesh, workload.zero, nodes.linked(device)
    axes = [each for each in mesh.zero_axes if mesh.sizes[each] > 1] or ["data"]
    pipe_ranks = {0, workload.chunks.pipe - 1}
    trained = max(map(workload.trained, pipe_ranks))
    experts = max(map(workload.experts, pipe_ranks))
    memory_per_s = device.hbm_gb_per_s * 1e9
    replicas, expert_replicas = mesh.size(*axes), mesh.size("expert_data")
    if replicas == 1:
        return ReplicaTerms((), NO_TRANSFER, NO_TRANSFER, trained, trained / memory_per_s)
    # ZeRO 3 gathers frozen weights as well.
    gathered = max(map(workload.weights, pipe_ranks)) if zero == 3 else trained
    made = _replicas_of(workload, device, nodes, axes, trained - experts, gathered - experts)
    stepped = (trained - experts) / replicas + experts / expert_replicas if zero else trained
    if experts:
        of_experts = _replicas_of(workload, device, nodes, ["expert_data"], experts, experts)
        made = made._replace(
            each_micro_batch=made.each_micro_batch + of_experts.each_micro_batch,
            sent_each=made.sent_each + of_experts.sent_each,
            sent_once=made.sent_once + of_experts.sent_once,
            expert_reduction=of_experts.reduction,
            expert_gather=of_experts.gather,
        )
    return made._replace(stepped=stepped, stepped_s=stepped / memory_per_s)


def _replicas_of(
    workload: Workload, device: Device, nodes: Nodes, axes: Sequence[str], trained: float, gathered: float
) -> ReplicaTerms:
    """Return the traffic over `axes` of `trained` weights that their ranks share, without the optimizer's update.

    `gathered` is the number of weights that ZeRO gathers.
    """
    group, zero, framework = group_of(workload.mesh, nodes, *axes), workload.zero, workload.framework
    replicas = group.size
    sent_each: list[Sent] = []
    sent_once: list[Sent] = []

    def send(to: list[Sent], kind: str, num_bytes: float, calls: float = 1.0) -> Transfer:
        to.append(Sent(" ".join(axes), group.across, num_bytes))
        return transfer(kind, group, device, nodes, num_bytes, calls)

    weight_bytes = workload.element_bytes * gathered * (replicas - 1) / replicas
    gradient_bytes = framework.reduced_bytes * trained * (replicas - 1) / replicas
    each: tuple[Transfer, ...] = ()
    reduction = gather = NO_TRANSFER
    if zero >= 2:
        each += (send(sent_each, "reduce_scatter", gradient_bytes),)
    else:
        reduction = send(sent_once, "all_reduce", 2 * gradient_bytes)
    if zero == 3:
        each += (send(sent_each, "all_gather", 2 * weight_bytes, 2),)
    elif zero:
        gather = send(sent_once, "all_gather", weight_bytes)
    return ReplicaTerms(each, reduction, gather, 0.0, 0.0, tuple(sent_each), tuple(sent_once))


def _message(workload: Workload, device: Device, nodes: Nodes) -> tuple[Transfer, tuple[Sent, ...]]:
    """Return one message to the next stage, and the bytes of all messages in a step."""
    tensor, group = workload.mesh.tensor, group_of(workload.mesh, nodes, "pipe")
    pieces = tensor.y if workload.framework.splits_messages and tensor.residual == "replicated" else 1
    num_bytes = workload.element_bytes * float(workload.costs.boundary) / pieces
    times = 2 * workload.micro_batches * workload.chunks.num
    return transfer("send", group, device, nodes, num_bytes, 0), (Sent("pipe", group.across, num_bytes * times),)


# Time -------------------------------------------------------------------------------------------------------------


def time_of(terms: Terms, constants: Constants) -> StepTime:
    """Return the time of a step from its terms and fitted constants.

    1. The load of each pipeline rank: seconds per micro-batch. The largest load is the busiest rank's.
    2. ZeRO 2's and 3's traffic per micro-batch lengthens the busiest load.
    3. The bubble, and messages between stages.
    4. Work after the last backward: reduction, gather, optimizer.
    5. The split of the busiest load into kernels, collectives and launch overhead.
    """
    parts = part_times(terms.parts, constants, splits_backward=terms.splits_backward)
    layer, head_s, first_sent_s, last_sent_s = parts
    loads = _loads(parts, terms.layers)
    most = max(loads)
    busiest = loads.index(most)
    micro_batches, replicas = terms.micro_batches, terms.replicas

    busy, zero_s = most, 0.0
    if replicas.each_micro_batch:
        zero_s = sum([each.seconds(constants) for each in replicas.each_micro_batch])
        busy = smooth_max(most, zero_s) + _exposed(terms, constants) * zero_s
    bubble_s = busy * (sum(loads) / most - 1) / terms.chunks * layer.idle
    hops_s = terms.num_messages * (terms.message.seconds(constants) + constants.hop_s)

    reduction_s = replicas.reduction.seconds(constants) + replicas.expert_reduction.seconds(constants)
    if terms.overlaps_reduction and reduction_s:
        hidden = (1 - constants.reduction_exposed) * reduction_s
        reduction_s -= min(hidden, HIDING_BACKWARD * most * layer.backward_share)
    gathers_s = replicas.gather.seconds(constants) + replicas.expert_gather.seconds(constants)
    gather_s = gathers_s * (constants.flat_gather_passes if terms.gathers_buffers else constants.gather_passes)
    if terms.overlaps_gather:
        gather_s = max(0.0, gather_s - most * (1 - layer.backward_share))
    optimizer_s = constants.optimizer_bytes * replicas.stepped_s
    if not terms.fused_optimizer:
        optimizer_s *= constants.unfused_optimizer
    optimizer_s += terms.offloaded_s
    after = reduction_s + gather_s + optimizer_s + constants.step_s

    num_layers = terms.layers[busiest]
    kernels_s = layer.kernels_s * num_layers + (head_s if busiest == len(loads) - 1 else 0.0)
    tensor_s = layer.collectives_s * num_layers
    tensor_s += (first_sent_s if busiest == 0 else 0.0) + (last_sent_s if busiest == len(loads) - 1 else 0.0)
    return StepTime(
        step_s=micro_batches * busy + bubble_s + hops_s + after,
        compute_s=kernels_s,
        tensor_s=micro_batches * tensor_s,
        launch_s=micro_batches * (most - kernels_s - tensor_s),
        weights_s=busy - most,
        bubble_s=bubble_s,
        hops_s=hops_s,
        reduction_s=reduction_s,
        gather_s=gather_s,
        optimizer_s=optimizer_s,
        other_s=constants.step_s,
        terms=terms,
    )


def _exposed(terms: Terms, constants: Constants) -> float:
    """Return the share of ZeRO 2's and 3's collectives of a micro-batch that compute does not hide, however short.

    With prefetch the collectives of a layer run while its neighbour computes, and only the first layers' are exposed.
    """
    if not terms.prefetches_weights:
        return constants.weights_exposed
    num_layers = terms.parts.launched * max(terms.layers)
    return min(1.0, constants.exposed_layers / max(1.0, num_layers))


def least_s(parts: PartTimes, layers: Sequence[float], schedule: Schedule) -> float:
    """Return a lower bound of a step's time: micro-batches and idle time, without traffic between replicas.

    `parts` must be for this schedule. `layers` is the number of layers per pipeline rank. The bound costs much less
    than `step_time` and never exceeds it, so a search orders layouts by the bound first.
    """
    loads = _loads(parts, layers)
    most = max(loads)
    idle = (sum(loads) - most) / schedule.chunks.num * parts.layer.idle
    return ROUNDED * (schedule.num_micro_batches * most + idle)


def _loads(parts: PartTimes, layers: Sequence[float]) -> list[float]:
    """Return the seconds of each pipeline rank per micro-batch, including the tables and the head at the ends."""
    loads = [parts.layer.seconds * num for num in layers]
    loads[0] += parts.first_sent_s
    loads[-1] += parts.head_s + parts.last_sent_s
    return loads
