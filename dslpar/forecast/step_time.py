"""Time of a training step that was never run, from what each rank computes and sends: closed forms over a workload.

    time = step_time(workload, device, Nodes.usual(device))
    time.step_s, time.tensor_s, time.bubble

A layer takes what its kernels (`dslpar.forecast.kernels`) and its collectives (`links`) take, or what its host needs to
launch them all, whichever is longer; where both are close, a little more than either. The rank of the pipeline with the
most to do sets the pace; the step is its micro-batches, its idle time, and what follows the last backward::

    step = m * busiest + (sum - busiest) / v + messages + reduction + gather + optimizer + rest

for m micro-batches, v chunks on each rank, and the sum over the ranks of the pipeline: of equal stages this is the
closed form of `dslpar.layout.schedule`. ZeRO 2 and 3 send gradients and weights in each micro-batch, under what it
computes.

What was taken from whom: operations over a share of the peak that falls with the size of a product, from vTrain and
Calculon; exposed and hidden communication, from Calculon and llm-analysis; recomputation and the parts of a layer, from
Megatron-LM's papers. Launches as a floor of a layer's time, and what a message that a host waits for costs, are from
the runs that the constants were fitted on. `terms_of` does all that no constant enters, so that a calibration need
do it once a run.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import log2, sqrt

from dslpar.core.frozen import frozen
from dslpar.core.mesh import TENSOR_AXES
from dslpar.core.named_tuple import NamedTuple
from dslpar.forecast.constants import DEFAULT, Constants
from dslpar.forecast.device import Device
from dslpar.forecast.kernels import Kernels, attention_s, kernels_of, model_kernels, products_s
from dslpar.forecast.links import NO_TRANSFER, Group, Nodes, Transfer, group_of, transfer
from dslpar.forecast.ring import LayerTraffic, Traffic
from dslpar.forecast.workload import Workload

BACKWARD_FUSED, BACKWARD_PLAIN = 2.5, 2.0
"""Attention's backward over its forward: fused, it computes its scores again."""
BACKWARD_ELEMENTWISE = 1.7
RECOMPUTED_ELEMENTWISE = 0.3
"""Of what lies between products, the share that selective recomputation repeats."""
OVERLAP = 0.5
"""With `comm_overlap`, the share of a layer's products under which collectives run; measured on few devices so far."""
LEAST_EXPOSED = 0.3
"""Of those collectives, the share that stays: their first and last parts."""
HIDING_BACKWARD = 0.6
"""Of the last micro-batch's backward, the share under which a reduction runs."""
WIDE_BYTES = 4
"""Of an element of gradients that add up around a ring: float32."""
HOST_BYTES_PER_S = 12e9
"""Between a device and its host, where the optimizer's states are there."""


class Sent(NamedTuple):
    """Bytes that a rank of the busiest stage sends in a step along an axis."""

    axis: str
    across: bool
    """Whether the axis leaves a node."""
    num_bytes: float


@frozen
class StepTime:
    """Seconds of a step; its parts add up to it, those of a micro-batch taken as often as a step has them."""

    step_s: float
    compute_s: float
    """Kernels of the busiest rank, a micro-batch, with what is computed again."""
    tensor_s: float
    """Tensor parallelism's collectives on that rank, beside its kernels."""
    launch_s: float
    """By how much launches make both longer."""
    weights_s: float
    """By how much ZeRO 2's or 3's traffic makes a micro-batch longer."""
    bubble_s: float
    """Idle time of the busiest rank."""
    hops_s: float
    """Messages between stages."""
    reduction_s: float
    """Of the reduction of gradients, what the backward does not hide."""
    gather_s: float
    """The gather of weights that the step has changed."""
    optimizer_s: float
    other_s: float
    """What nothing else explains."""
    bubble: float
    """Idle time of the busiest rank over its busy time."""
    sent: tuple[Sent, ...]
    """By axis."""


class Terms(NamedTuple):
    """A workload on a machine, as far as no constant enters."""

    wide_tiles: bool
    layer: Kernels
    forward: tuple[Transfer, ...]
    backward: tuple[Transfer, ...]
    """Collectives of a layer."""
    ring: tuple[Transfer, Transfer]
    """One message of keys and values that go around a ring, and one of their gradients, which are in float32."""
    ring_size: int
    overlapped: bool
    """Whether the collectives run in parts under its products."""
    launches: int
    """Ranks of a tensor group that share a node: hosts that wait for each other."""
    blocking: bool
    """Whether the host waits for messages between stages."""
    recomputes: bool
    recomputes_scores: bool
    recomputed_part: Kernels | None
    """What a layer computes once more for each part of the tokens: norm and MLP, of `mlp_chunks`."""
    part_sent: tuple[Transfer, ...]
    """And what it sends for that."""
    offload_s: float
    """A layer's stored input to the host and back, for as long as its device waits."""
    head: Kernels
    repeats_head: bool
    """Whether the head runs again in the backward, for each of `loss_chunks`."""
    first_sent: tuple[Transfer, ...]
    last_sent: tuple[Transfer, ...]
    """Collectives of the tables, and of the head and the loss."""
    layers: tuple[float, ...]
    """How many times each rank of the pipeline computes `layer`."""
    launched: int
    """Layers that `layer` stands for: 1, or all of a model whose layers differ."""
    launch_ratio: float
    """Kernels that a host launches for a layer, over those of one of ours."""
    micro_batches: int
    chunks: int
    splits_backward: bool
    message: Transfer
    """One of those between two stages."""
    num_messages: int
    """That a micro-batch waits for, one after the other, in a step."""
    each_micro_batch: tuple[Transfer, ...]
    """Of ZeRO 2 and 3."""
    reduction: Transfer
    overlaps_reduction: bool
    gather: Transfer
    overlaps_gather: bool
    fused_optimizer: bool
    stepped_s: float
    """One byte of each weight that the rank steps, through memory."""
    offloaded_s: float
    """Gradients and weights to the host and back."""
    sent: tuple[Sent, ...]


def step_time(workload: Workload, device: Device, nodes: Nodes, constants: Constants = DEFAULT) -> StepTime:
    """Return how long a step takes."""
    return time_of(terms_of(workload, device, nodes), constants)


# Terms ------------------------------------------------------------------------------------------------------------


def terms_of(workload: Workload, device: Device, nodes: Nodes) -> Terms:
    """Return all of a step's time that no constant enters."""
    habits, costs, chunks = workload.habits, workload.costs, workload.chunks
    size, pipe, micro_batches = workload.element_bytes, chunks.pipe, workload.micro_batches
    layer, head = model_kernels(costs, device, fused=habits.fused_attention, element_bytes=size)
    network = _Network(workload, device, nodes)
    layers, launched = workload.layers_on_ranks, max(1, len(costs.units))
    forward, backward = network.transfers(costs.layer.traffic, max(layers))
    part = _recomputed_part(workload, device)
    part_sent = network.transfers(costs.mlp_part.traffic, 0)[0] if part else ()
    part_sent += network.of_each_part(costs.weights_of_parts, workload.mlp_chunks - 1) if part else ()
    ends = [network.transfers(end.traffic, 0) for end in (costs.first, costs.last)]
    data = network.data({0, pipe - 1})
    return Terms(
        wide_tiles=device.tile[1] > 128,
        layer=layer,
        forward=forward,
        backward=backward,
        ring=network.ring(costs.layer.traffic.forward, max(layers)),
        ring_size=workload.mesh.tensor.ring,
        overlapped=workload.mesh.tensor.comm_overlap,
        launches=group_of(workload.mesh, nodes, *TENSOR_AXES).inner,
        blocking=habits.blocking_messages and pipe > 1,
        recomputes=workload.recompute == "full",
        recomputes_scores=workload.recompute == "selective",
        recomputed_part=part,
        part_sent=part_sent,
        offload_s=launched * _offload_s(workload),
        head=head,
        repeats_head=workload.loss_chunks > 1,
        first_sent=ends[0][0] + ends[0][1],
        last_sent=ends[1][0] + ends[1][1],
        layers=layers,
        launched=launched,
        launch_ratio=habits.launch_ratio,
        micro_batches=micro_batches,
        chunks=chunks.num,
        splits_backward=workload.schedule.split,
        message=network.message() if pipe > 1 else NO_TRANSFER,
        num_messages=2 * (micro_batches * chunks.num + pipe - 1) if pipe > 1 else 0,
        each_micro_batch=data.each_micro_batch,
        reduction=data.reduction,
        overlaps_reduction=habits.overlaps_reduction,
        gather=data.gather,
        overlaps_gather=habits.overlaps_gather,
        fused_optimizer=habits.fused_optimizer,
        stepped_s=data.stepped / (device.hbm_gb_per_s * 1e9),
        offloaded_s=data.stepped * (4 + size) / HOST_BYTES_PER_S if habits.offloads_optimizer else 0.0,
        sent=network.sent(),
    )


def _recomputed_part(workload: Workload, device: Device) -> Kernels | None:
    if workload.recompute != "full" or workload.mlp_chunks == 1:
        return None
    fused = workload.habits.fused_attention
    return kernels_of(workload.costs.mlp_part.work, device, fused=fused, element_bytes=workload.element_bytes)


def _offload_s(workload: Workload) -> float:
    """Return what the stored inputs of recomputed groups take to the host and back, a layer."""
    if workload.recompute != "full" or not workload.offloads_inputs:
        return 0.0
    num_bytes = 2 * workload.element_bytes * float(workload.costs.boundary)
    return num_bytes / workload.interval / HOST_BYTES_PER_S


class _Data(NamedTuple):
    """What replicas send, by the stage of ZeRO."""

    each_micro_batch: tuple[Transfer, ...]
    reduction: Transfer
    gather: Transfer
    stepped: float
    """Weights that a rank steps."""


class _Network:
    """A workload's groups on the links of a machine, and what was sent so far."""

    def __init__(self, workload: Workload, device: Device, nodes: Nodes) -> None:
        self.workload, self.device, self.nodes = workload, device, nodes
        self.groups: dict[str, Group] = {}
        self.sent_bytes: dict[str, float] = {}

    def group(self, axis: str) -> Group:
        """Return the group over an axis, or over several whose names are apart."""
        found = self.groups.get(axis)
        if found is None:
            found = self.groups[axis] = group_of(self.workload.mesh, self.nodes, *axis.split())
        return found

    def send(self, kind: str, axis: str, num_bytes: float, calls: float = 1.0, times: float = 1.0) -> Transfer:
        """Return collectives of a kind on an axis, and count what they send, so many times in a step."""
        self.sent_bytes[axis] = self.sent_bytes.get(axis, 0.0) + num_bytes * times
        return transfer(kind, self.group(axis), self.device, self.nodes, num_bytes, calls)

    def ring(self, forward: Traffic, num_layers: float) -> tuple[Transfer, Transfer]:
        """Return a message of keys and values, and one of their gradients; a rank has so many layers."""
        found = [key for key in forward if key[0] == "send"]
        if not found:
            return NO_TRANSFER, NO_TRANSFER
        (key,) = found  # attention's, of one axis
        elements, others = float(forward[key]) / float(forward.calls[key]), float(forward.calls[key])
        times = num_layers * self.workload.micro_batches
        # Keys go around in the forward and in the backward; their gradients once more than these, home.
        keys = self.send(*key, self.workload.element_bytes * elements, 1.0, 2 * others * times)
        home = max(1, len(self.workload.costs.units))
        return keys, self.send(*key, WIDE_BYTES * elements, 1.0, (others + home) * times)

    def transfers(self, traffic: LayerTraffic, num_layers: float) -> tuple[tuple[Transfer, ...], tuple[Transfer, ...]]:
        """Return the collectives of a layer, forward and backward, without a ring's; a rank has so many layers.

        Among all-reduces of a backward are those of vectors' gradients, which run once a step in truth: of no more
        than the forward has over an axis the latency counts.
        """
        size, times = self.workload.element_bytes, num_layers * self.workload.micro_batches
        in_forward = traffic.forward.calls
        ways = []
        for way in (traffic.forward, traffic.backward):
            made = []
            for key in way:
                kind, axis = key
                if kind == "send":
                    continue
                calls = way.calls[key]
                if kind == "all_reduce" and way is traffic.backward:
                    calls = min(calls, in_forward.get(key, 0))
                made.append(self.send(kind, axis, size * float(way[key]), float(calls), times))
            ways.append(tuple(made))
        return ways[0], ways[1]

    def of_each_part(self, weights: LayerTraffic, more: int) -> tuple[Transfer, ...]:
        """Return what weights send so many times more: each part gathers them and reduces their gradients by itself."""
        forward, backward = self.transfers(weights * more, 0)
        return 3 * forward + backward  # the forward, the layer's that is computed again, and the part's

    def data(self, pipe_ranks: Iterable[int]) -> _Data:
        """Return what ranks that hold the same weights send: the most of these ranks of the pipeline."""
        workload, mesh = self.workload, self.workload.mesh
        axis = " ".join(each for each in mesh.zero_axes if mesh.sizes[each] > 1) or "data"
        zero, habits, micro_batches = workload.zero, workload.habits, workload.micro_batches
        replicas = self.group(axis).size
        trained = max(map(workload.trained, pipe_ranks))
        if replicas == 1:
            return _Data((), NO_TRANSFER, NO_TRANSFER, trained)
        # ZeRO 3 gathers what is frozen as well.
        gathered = max(map(workload.weights, pipe_ranks)) if zero == 3 else trained
        weight_bytes = workload.element_bytes * gathered * (replicas - 1) / replicas
        gradient_bytes = habits.reduced_bytes * trained * (replicas - 1) / replicas
        each: tuple[Transfer, ...] = ()
        reduction = gather = NO_TRANSFER
        if zero >= 2:
            each += (self.send("reduce_scatter", axis, gradient_bytes, times=micro_batches),)
        else:
            reduction = self.send("all_reduce", axis, 2 * gradient_bytes)
        if zero == 3:
            each += (self.send("all_gather", axis, 2 * weight_bytes, 2, times=micro_batches),)
        elif zero:
            gather = self.send("all_gather", axis, weight_bytes)
        return _Data(each, reduction, gather, trained / replicas if zero else trained)

    def message(self) -> Transfer:
        """Return a message to the next stage: where one leaves the node, all devices of the node send at once."""
        workload = self.workload
        tensor, times = workload.mesh.tensor, 2 * workload.micro_batches * workload.chunks.num
        parts = tensor.y if workload.habits.splits_messages and tensor.residual == "replicated" else 1
        return self.send("send", "pipe", workload.element_bytes * float(workload.costs.boundary) / parts, 0, times)

    def sent(self) -> tuple[Sent, ...]:
        """Return what a rank sends in a step along each axis."""
        return tuple(
            Sent(axis, self.groups[axis].across, num_bytes) for axis, num_bytes in self.sent_bytes.items() if num_bytes
        )


# Time -------------------------------------------------------------------------------------------------------------


def time_of(terms: Terms, constants: Constants) -> StepTime:
    """Return the time of a step whose terms are known."""
    layer = _layer(terms, constants)
    wide, head = terms.wide_tiles, terms.head
    head_s = products_s(head.forward, constants, wide) + products_s(head.backward, constants, wide)
    if terms.repeats_head:
        head_s += products_s(head.forward, constants, wide)
    head_s += head.logits_s * constants.logit_bytes
    first_sent_s = sum([each.seconds(constants) for each in terms.first_sent])
    last_sent_s = sum([each.seconds(constants) for each in terms.last_sent])
    loads = [layer.seconds * num for num in terms.layers]
    loads[0] += first_sent_s
    loads[-1] += head_s + last_sent_s
    most = max(loads)
    busiest = loads.index(most)
    micro_batches = terms.micro_batches

    busy, zero_s = most, 0.0
    if terms.each_micro_batch:
        zero_s = sum([each.seconds(constants) for each in terms.each_micro_batch])
        busy = _either(most, zero_s) + constants.weights_exposed * zero_s
    bubble_s = busy * (sum(loads) / most - 1) / terms.chunks * layer.idle
    hops_s = terms.num_messages * (terms.message.seconds(constants) + constants.hop_s)

    reduction_s = terms.reduction.seconds(constants)
    if terms.overlaps_reduction and reduction_s:
        hidden = (1 - constants.reduction_exposed) * reduction_s
        reduction_s -= min(hidden, HIDING_BACKWARD * most * layer.backward_share)
    gather_s = constants.gather_passes * terms.gather.seconds(constants)
    if terms.overlaps_gather:
        gather_s = max(0.0, gather_s - most * (1 - layer.backward_share))
    optimizer_s = constants.optimizer_bytes * terms.stepped_s
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
        sent=terms.sent,
    )


def layer_s(terms: Terms, constants: Constants) -> float:
    """Return what a layer takes, forward and backward, of one micro-batch."""
    return _layer(terms, constants).seconds


class _Layer(NamedTuple):
    """One layer, forward and backward."""

    seconds: float
    kernels_s: float
    collectives_s: float
    backward_share: float
    idle: float
    """Idle time of a pipeline over that of one whose backward is whole."""


def _layer(terms: Terms, constants: Constants) -> _Layer:
    kernels, wide = terms.layer, terms.wide_tiles
    scores_s = attention_s(kernels, constants, wide)
    between_s = constants.elementwise_passes * kernels.elementwise_s
    products = products_s(kernels.forward, constants, wide), products_s(kernels.backward, constants, wide)
    forward_s = products[0] + scores_s + between_s
    backward_s = products[1] + BACKWARD_ELEMENTWISE * between_s
    backward_s += scores_s * (BACKWARD_FUSED if kernels.fused_s else BACKWARD_PLAIN)
    kernels_s = forward_s + backward_s
    sent_s = [sum([each.seconds(constants) for each in way]) for way in (terms.forward, terms.backward)]
    if terms.overlapped:
        sent_s = [max(LEAST_EXPOSED * s, s - OVERLAP * under) for s, under in zip(sent_s, products, strict=True)]
    if terms.ring_size > 1:
        blocks_s = scores_s, scores_s * (BACKWARD_FUSED if kernels.fused_s else BACKWARD_PLAIN)
        messages_s = [each.seconds(constants) for each in terms.ring]
        num_blocks = terms.ring_size * terms.launched
        exposed = exposed_by_ring(messages_s, [each / num_blocks for each in blocks_s], terms.ring_size)
        sent_s = [s + terms.launched * more for s, more in zip(sent_s, exposed, strict=True)]
    host_s = _launches_s(terms, constants)
    again_s = sent_again_s = host_again_s = 0.0
    if terms.recomputes:
        again_s, sent_again_s, host_again_s = forward_s, sent_s[0], host_s[0]
    elif terms.recomputes_scores:
        again_s = scores_s + RECOMPUTED_ELEMENTWISE * between_s
    if terms.recomputed_part is not None:
        part = terms.recomputed_part
        again_s += products_s(part.forward, constants, wide) + constants.elementwise_passes * part.elementwise_s
        sent_again_s += sum([each.seconds(constants) for each in terms.part_sent])
        host_again_s += constants.collective_launch_s * sum([each.calls for each in terms.part_sent])
    forward = forward_s + sent_s[0], host_s[0]
    own = backward_s + sent_s[1], host_s[1]
    repeated = again_s + sent_again_s, host_again_s
    if terms.blocking:
        # Between a forward and a backward the host waits for a message, and loses what it was ahead.
        (in_forward,), (in_backward, in_repeats) = _elapsed(forward), _elapsed(own, repeated)
    else:
        in_forward, in_backward, in_repeats = _elapsed(forward, own, repeated)
    repeats = in_repeats + terms.offload_s
    seconds = in_forward + in_backward + repeats
    idle = 1.0
    if terms.splits_backward:
        # As `Schedule.bubble`: B and W are halves of what is not computed again.
        weights = in_backward / 2
        inputs = weights + repeats
        idle = max(inputs, in_forward + inputs - weights) / seconds
    return _Layer(seconds, kernels_s + again_s, sum(sent_s) + sent_again_s, (in_backward + repeats) / seconds, idle)


def _launches_s(terms: Terms, constants: Constants) -> tuple[float, float]:
    """Return what a host needs to launch a layer, forward and backward: kernels, collectives, a ring's messages.

    Not what a ring's further blocks need, nor what ZeRO sends in each micro-batch.
    """
    slower = 1.0
    if terms.launches > 1:
        slower += constants.tensor_launch * (terms.launches - 1) ** 2
        if terms.blocking:
            slower *= 1 + constants.blocking_launch * log2(terms.launches)
    kernels_s = constants.layer_launch_s * terms.launched * terms.launch_ratio
    calls = [sum([each.calls for each in way]) for way in (terms.forward, terms.backward)]
    # Keys go around twice, and their gradients once, home in one message more.
    others = (terms.ring_size - 1) * terms.launched
    forward_calls, backward_calls = calls[0] + others, calls[1] + (2 * others + terms.launched if others else 0)
    return (
        slower * (kernels_s + forward_calls * constants.collective_launch_s),
        slower * (kernels_s * constants.backward_launch + backward_calls * constants.collective_launch_s),
    )


def exposed_by_ring(messages_s: Sequence[float], blocks_s: Sequence[float], size: int) -> tuple[float, float]:
    """Return by how much a ring's messages make attention longer, forward and backward.

    `messages_s` are one of keys and one of gradients, `blocks_s` one block's forward and backward. While a forward's
    block is computed the next one's keys arrive. In the backward gradients follow one block later, along the same link,
    and the last ones come home when nothing is left to compute.
    """
    key_s, gradient_s = messages_s
    forward, backward = blocks_s
    between = (size - 2) * max(0.0, key_s + gradient_s - backward)
    ends = max(0.0, key_s - backward) + max(0.0, gradient_s - backward) + gradient_s
    return (size - 1) * max(0.0, key_s - forward), between + ends


def _elapsed(*parts: tuple[float, float]) -> list[float]:
    """Return what each part takes of what runs on, from what its device and its host need for it.

    What the host has gained where the device had much to do, it may lose where there was little: their sums count.
    Where the device rules, time is shared as its own is; where the host does, as the host's.
    """
    device_s, host_s = map(sum, zip(*parts, strict=True))
    by_device, by_host = device_s**7, host_s**7
    longer = _either(device_s, host_s) / (device_s * by_device + host_s * by_host)
    return [longer * (on_device * by_device + on_host * by_host) for on_device, on_host in parts]


def _either(one: float, other: float) -> float:
    """Return the longer of two times; more where they are close: which hides which varies from kernel to kernel."""
    return sqrt(sqrt(sqrt(one**8 + other**8)))
