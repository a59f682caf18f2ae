"""Forecast the time of a training step from what each rank computes and sends, in closed form.

    time = step_time(workload, device, Nodes.usual(device))
    time.step_s, time.tensor_s, time.bubble

A layer takes the time of its kernels (`dslpar.forecast.kernels`) and collectives (`links`), or the time in which its
host launches them, whichever is longer; if both are close, a little more than either. The pipeline rank with the most
work sets the pace. A step is its micro-batches, its idle time, and what follows the last backward::

    step = m * busiest + (sum - busiest) / v + messages + reduction + gather + optimizer + rest

with m micro-batches, v chunks per rank, and the sum over the pipeline's ranks. For equal stages this is the closed form
of `dslpar.layout.schedule`. ZeRO 2 and 3 send gradients and weights in each micro-batch, while it computes.

Sources: vTrain and Calculon for operations over a share of the peak that falls with the size of a product; Calculon and
llm-analysis for exposed and hidden communication; Megatron-LM's papers for recomputation and the parts of a layer. The
runs that the constants were fitted to showed launches as a floor of a layer's time, and the cost of a message that a
host waits for. `terms_of` does everything that needs no constant, so that a calibration does it once per run.
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
"""Just below 1, by more than sums in another order differ."""
HIDING_BACKWARD = 0.6
"""Share of the last micro-batch's backward that hides a gradient reduction."""


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of a step; the parts add up to it, with `compute_s` and `weights_s` times the number of micro-batches."""

    step_s: float
    compute_s: float
    """Kernels of the busiest rank per micro-batch, including recomputation."""
    tensor_s: float
    """Tensor collectives of that rank in a step, beside its kernels."""
    launch_s: float
    """Seconds by which launches lengthen kernels and collectives in a step."""
    weights_s: float
    """Seconds by which ZeRO 2's or 3's traffic lengthens a micro-batch."""
    bubble_s: float
    """Idle time of the busiest rank."""
    hops_s: float
    """Messages between stages."""
    reduction_s: float
    """Reduction of gradients that the backward does not hide."""
    gather_s: float
    """Gather of the weights that the step has changed."""
    optimizer_s: float
    other_s: float
    """Time that nothing else explains."""
    bubble: float
    """Idle time of the busiest rank over its busy time."""
    terms: Terms

    @property
    def sent(self) -> tuple[Sent, ...]:
        """Bytes that a rank of the busiest stage sends along each axis."""
        return self.terms.sent


class Terms(NamedTuple):
    """A workload on a machine, before any constant is applied."""

    parts: PartTerms
    splits_backward: bool
    layers: tuple[float, ...]
    """Number of times that each pipeline rank computes a layer."""
    micro_batches: int
    chunks: int
    message: Transfer
    """One message between two stages."""
    num_messages: int
    """Messages of a step that are waited for one after the other."""
    replicas: ReplicaTerms
    overlaps_reduction: bool
    overlaps_gather: bool
    fused_optimizer: bool
    offloaded_s: float
    """Gradients and weights to the host and back."""
    message_sent: tuple[Sent, ...]
    """All messages of a step."""

    @property
    def sent(self) -> tuple[Sent, ...]:
        """Bytes that a rank of the busiest stage sends per step along each axis; layers and replicas may share one."""
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
    """Return how long a step takes; `replicas`: what they send, if computed before."""
    return time_of(terms_of(workload, device, nodes, replicas), constants)


# Terms ------------------------------------------------------------------------------------------------------------


def terms_of(workload: Workload, device: Device, nodes: Nodes, replicas: ReplicaTerms | None = None) -> Terms:
    """Return everything in a step's time that needs no constant."""
    habits, chunks = workload.habits, workload.chunks
    pipe, micro_batches = chunks.pipe, workload.micro_batches
    if replicas is None:
        replicas = replica_terms(workload, device, nodes)
    message, message_sent = _message(workload, device, nodes) if pipe > 1 else (NO_TRANSFER, ())
    to_host = replicas.stepped * (4 + workload.element_bytes) if habits.offloads_optimizer else 0.0
    return Terms(
        parts=part_terms(workload, device, nodes),
        splits_backward=workload.schedule.split,
        layers=workload.layers_on_ranks,
        micro_batches=micro_batches,
        chunks=chunks.num,
        message=message,
        num_messages=2 * (micro_batches * chunks.num + pipe - 1) if pipe > 1 else 0,
        replicas=replicas,
        overlaps_reduction=habits.overlaps_reduction,
        overlaps_gather=habits.overlaps_gather,
        fused_optimizer=habits.fused_optimizer,
        offloaded_s=to_host / HOST_BYTES_PER_S,
        message_sent=message_sent,
    )


class ReplicaTerms(NamedTuple):
    """Traffic and updates of ranks with the same weights, at a ZeRO stage; independent of micro-batches."""

    each_micro_batch: tuple[Transfer, ...]
    """Collectives of ZeRO 2 and 3 in each micro-batch."""
    reduction: Transfer
    gather: Transfer
    stepped: float
    """Weights that a rank updates."""
    stepped_s: float
    """One byte of each of these weights, through memory."""
    sent_each: tuple[Sent, ...] = ()
    """In each micro-batch."""
    sent_once: tuple[Sent, ...] = ()
    """In a step."""


def replica_terms(workload: Workload, device: Device, nodes: Nodes) -> ReplicaTerms:
    """Return what replicas send: of the first and the last stage, the one with more weights."""
    mesh, zero, habits = workload.mesh, workload.zero, workload.habits
    axes = [each for each in mesh.zero_axes if mesh.sizes[each] > 1] or ["data"]
    group = group_of(mesh, nodes, *axes)
    replicas, pipe_ranks = group.size, {0, workload.chunks.pipe - 1}
    trained = max(map(workload.trained, pipe_ranks))
    memory_per_s = device.hbm_gb_per_s * 1e9
    if replicas == 1:
        return ReplicaTerms((), NO_TRANSFER, NO_TRANSFER, trained, trained / memory_per_s)
    sent_each: list[Sent] = []
    sent_once: list[Sent] = []

    def send(to: list[Sent], kind: str, num_bytes: float, calls: float = 1.0) -> Transfer:
        to.append(Sent(" ".join(axes), group.across, num_bytes))
        return transfer(kind, group, device, nodes, num_bytes, calls)

    # ZeRO 3 gathers frozen weights as well.
    gathered = max(map(workload.weights, pipe_ranks)) if zero == 3 else trained
    weight_bytes = workload.element_bytes * gathered * (replicas - 1) / replicas
    gradient_bytes = habits.reduced_bytes * trained * (replicas - 1) / replicas
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
    stepped = trained / replicas if zero else trained
    return ReplicaTerms(each, reduction, gather, stepped, stepped / memory_per_s, tuple(sent_each), tuple(sent_once))


def _message(workload: Workload, device: Device, nodes: Nodes) -> tuple[Transfer, tuple[Sent, ...]]:
    """Return a message to the next stage, and all of a step; between nodes, all devices of a node send at once."""
    tensor, group = workload.mesh.tensor, group_of(workload.mesh, nodes, "pipe")
    pieces = tensor.y if workload.habits.splits_messages and tensor.residual == "replicated" else 1
    num_bytes = workload.element_bytes * float(workload.costs.boundary) / pieces
    times = 2 * workload.micro_batches * workload.chunks.num
    return transfer("send", group, device, nodes, num_bytes, 0), (Sent("pipe", group.across, num_bytes * times),)


# Time -------------------------------------------------------------------------------------------------------------


def time_of(terms: Terms, constants: Constants) -> StepTime:
    """Return the time of a step from its terms."""
    parts = part_times(terms.parts, constants, splits_backward=terms.splits_backward)
    layer, head_s, first_sent_s, last_sent_s = parts
    loads = _loads(parts, terms.layers)
    most = max(loads)
    busiest = loads.index(most)
    micro_batches, replicas = terms.micro_batches, terms.replicas

    busy, zero_s = most, 0.0
    if replicas.each_micro_batch:
        zero_s = sum([each.seconds(constants) for each in replicas.each_micro_batch])
        busy = smooth_max(most, zero_s) + constants.weights_exposed * zero_s
    bubble_s = busy * (sum(loads) / most - 1) / terms.chunks * layer.idle
    hops_s = terms.num_messages * (terms.message.seconds(constants) + constants.hop_s)

    reduction_s = replicas.reduction.seconds(constants)
    if terms.overlaps_reduction and reduction_s:
        hidden = (1 - constants.reduction_exposed) * reduction_s
        reduction_s -= min(hidden, HIDING_BACKWARD * most * layer.backward_share)
    gather_s = constants.gather_passes * replicas.gather.seconds(constants)
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
        bubble=bubble_s / (micro_batches * busy),
        terms=terms,
    )


def least_s(parts: PartTimes, layers: Sequence[float], schedule: Schedule) -> float:
    """Return a lower bound of a step's time: computing, with a pipeline's idle time, and nothing that replicas send.

    `parts` are times in this schedule, `layers` the layers of each pipeline rank. A search ranks layouts by it until it
    needs `step_time`: it costs a small part of that, and never returns more.
    """
    loads = _loads(parts, layers)
    most = max(loads)
    idle = (sum(loads) - most) / schedule.chunks.num * parts.layer.idle
    return ROUNDED * (schedule.num_micro_batches * most + idle)


def _loads(parts: PartTimes, layers: Sequence[float]) -> list[float]:
    """Return the seconds that each pipeline rank computes in a micro-batch."""
    loads = [parts.layer.seconds * num for num in layers]
    loads[0] += parts.first_sent_s
    loads[-1] += parts.head_s + parts.last_sent_s
    return loads
