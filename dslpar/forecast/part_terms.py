"""Terms of a model's parts: kernels and collectives of one micro-batch on a rank, at the peak speeds of data sheets.

    part_terms(workload, device, nodes).layer.forward

*Terms* are the inputs of a step's time that need no fitted constant: seconds at a device's or a link's peak, hops, and
counts of launches. `dslpar.forecast.part_times` turns them into times with `Constants` (`dslpar.forecast.constants`:
efficiencies, latencies, launch overheads). `Workload.framework` is the behaviour of the training framework, such as
fused attention.

The parts are those of `dslpar.costs.model_costs.ModelCosts`: the tables before the layers, a layer, and the head with
its loss. Terms depend neither on the number of layers per stage nor on replicas. They are cached in the model's costs,
because a search needs the same terms for every pipeline and every ZeRO stage.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from dslpar.core.mesh import TENSOR_AXES
from dslpar.costs.collective_traffic import LayerTraffic, Traffic
from dslpar.forecast.device import Device
from dslpar.forecast.kernels import Kernels, kernels_of
from dslpar.forecast.links import NO_TRANSFER, Group, Nodes, Transfer, group_of, transfer
from dslpar.forecast.workload import Workload

WIDE_BYTES = 4
"""Bytes per element of the gradients of keys and values that travel around a ring (float32)."""
HOST_BYTES_PER_S = 12e9
"""Bandwidth between a device and its host, for offloaded optimizer states or offloaded layer inputs."""


class Sent(NamedTuple):
    """Bytes that a rank sends along an axis."""

    axis: str
    """Name of an axis, or of several axes separated by spaces: "y", "d q", "pipe"."""
    across: bool
    """True if the axis spans several nodes."""
    num_bytes: float


@dataclass(frozen=True, kw_only=True)
class PartTerms:
    """Terms of a model's parts on a machine, for one micro-batch on one rank.

    "A layer" below means `ModelCosts.layer`: one layer, or all layers together in a traced model, whose layers may
    differ.
    """

    wide_tiles: bool
    """True if the device's tiles are wider than 128 columns (Hopper and later), which have their own efficiencies."""
    layer: Kernels
    """Kernels of a layer."""
    forward: tuple[Transfer, ...]
    backward: tuple[Transfer, ...]
    """Collectives of a layer in the forward and in the backward, without the messages of a ring."""
    ring: tuple[Transfer, Transfer]
    """One message of keys and values in ring attention, and one of their gradients, which are in float32."""
    ring_size: int
    """Ranks of the attention ring; 1 without a ring."""
    overlapped: bool
    """True if collectives run in parts under the matrix products that they belong to (`comm_overlap`)."""
    launches: int
    """Number of ranks of a tensor group in one node. Their hosts launch kernels and wait for the slowest one."""
    blocking: bool
    """True if the host waits for each message between stages."""
    recomputes: bool
    """True if the backward recomputes the whole layer."""
    recomputes_scores: bool
    """True if the backward recomputes only attention's scores (selective recomputation)."""
    recomputed_part: Kernels | None
    """With `mlp_chunks`: kernels of norm and MLP, which the backward recomputes once more by chunks. Else None."""
    part_sent: tuple[Transfer, ...]
    """Collectives of `recomputed_part`."""
    offload_s: float
    """Seconds that the device waits while a recomputed layer's input goes to the host and back."""
    launched: int
    """Number of layers in `layer`: 1, or all layers of a traced model."""
    launch_ratio: float
    """Kernels that the host launches per layer, relative to a dslpar layer."""
    head: Kernels
    """Kernels of the last norm, the head and the loss."""
    repeats_head: bool
    """True if the backward recomputes the head's forward, as it does with several `loss_chunks`."""
    first_sent: tuple[Transfer, ...]
    last_sent: tuple[Transfer, ...]
    """Collectives of the tables, and those of the head and the loss, forward and backward."""
    sent: tuple[Sent, ...]
    """Bytes that a layer sends along each axis, forward and backward, including a ring's messages."""


def part_terms(workload: Workload, device: Device, nodes: Nodes) -> PartTerms:
    """Return the terms of a workload's parts, from the cache in its costs if possible.

    `device` must have the peak of the workload's dtype (`Device.computing_in`).
    """
    framework, nodes = workload.framework, nodes.linked(device)
    again = workload.recompute, workload.interval, workload.offloads_inputs, workload.mlp_chunks
    of_framework = (
        framework.fused_attention,
        framework.launch_ratio,
        framework.blocking_messages and workload.chunks.pipe > 1,
    )
    key = "parts", workload.dtype, again, of_framework, workload.loss_chunks > 1
    kept = workload.costs.kept
    if key not in kept or kept[key][:2] != (device, nodes):
        kept[key] = device, nodes, _part_terms(workload, device, nodes)
    found: PartTerms = kept[key][2]
    return found


def _part_terms(workload: Workload, device: Device, nodes: Nodes) -> PartTerms:
    framework, costs, size = workload.framework, workload.costs, workload.element_bytes
    links = _Links(workload, device, nodes)
    layer, head = _kernels(workload, device)
    launched = max(1, len(costs.units))
    recomputed_part: Kernels | None = None
    part_sent: tuple[Transfer, ...] = ()
    forward, backward = links.transfers(costs.layer.traffic)
    ring = links.ring(costs.layer.traffic.forward)
    sent = links.sent()
    if workload.recompute == "full" and workload.mlp_chunks > 1:
        recomputed_part = kernels_of(costs.mlp_part.work, device, fused=framework.fused_attention, element_bytes=size)
        part_sent = links.transfers(costs.mlp_part.traffic)[0]
        part_sent += links.of_each_part(costs.weights_of_parts, workload.mlp_chunks - 1)
    ends = [links.transfers(end.traffic) for end in (costs.first, costs.last)]
    return PartTerms(
        wide_tiles=device.tile[1] > 128,
        layer=layer,
        forward=forward,
        backward=backward,
        ring=ring,
        ring_size=workload.mesh.tensor.ring,
        overlapped=workload.mesh.tensor.comm_overlap,
        launches=group_of(workload.mesh, nodes, *TENSOR_AXES).inner,
        blocking=framework.blocking_messages and workload.chunks.pipe > 1,
        recomputes=workload.recompute == "full",
        recomputes_scores=workload.recompute == "selective",
        recomputed_part=recomputed_part,
        part_sent=part_sent,
        offload_s=launched * _offload_s(workload),
        launched=launched,
        launch_ratio=framework.launch_ratio,
        head=head,
        repeats_head=workload.loss_chunks > 1,
        first_sent=ends[0][0] + ends[0][1],
        last_sent=ends[1][0] + ends[1][1],
        sent=sent,
    )


def _kernels(workload: Workload, device: Device) -> tuple[Kernels, Kernels]:
    """Return the kernels of a layer, and of the head with the loss. They are cached, as they ignore recomputation."""
    costs, fused, size = workload.costs, workload.framework.fused_attention, workload.element_bytes
    key = "kernels", device, fused, size
    if key not in costs.kept:
        layer, head = (
            kernels_of(each.work, device, fused=fused, element_bytes=size) for each in (costs.layer, costs.last)
        )
        costs.kept[key] = layer, head
    found: tuple[Kernels, Kernels] = costs.kept[key]
    return found


def _offload_s(workload: Workload) -> float:
    """Return the seconds per layer that the inputs of recomputed groups need to the host and back."""
    if workload.recompute != "full" or not workload.offloads_inputs:
        return 0.0
    num_bytes = 2 * workload.element_bytes * float(workload.costs.boundary)
    return num_bytes / workload.interval / HOST_BYTES_PER_S


class _Links:
    """Makes the `Transfer`s of a layer, and adds up the bytes that the layer sends along each axis."""

    def __init__(self, workload: Workload, device: Device, nodes: Nodes) -> None:
        self.workload, self.device, self.nodes = workload, device, nodes
        self.sent_bytes: dict[str, float] = {}
        self._groups: dict[str, Group] = {}

    def group(self, axis: str) -> Group:
        """Return the group over an axis, or over several axes with their names separated by spaces."""
        found = self._groups.get(axis)
        if found is None:
            found = self._groups[axis] = group_of(self.workload.mesh, self.nodes, *axis.split())
        return found

    def send(self, kind: str, axis: str, num_bytes: float, calls: float = 1.0, times: float = 1.0) -> Transfer:
        """Return collectives of a kind on an axis, and add `times` their bytes to the sum of that axis."""
        self.sent_bytes[axis] = self.sent_bytes.get(axis, 0.0) + num_bytes * times
        return transfer(kind, self.group(axis), self.device, self.nodes, num_bytes, calls)

    def ring(self, forward: Traffic) -> tuple[Transfer, Transfer]:
        """Return one message of keys and values in ring attention, and one of their gradients."""
        found = [key for key in forward if key[0] == "send"]
        if not found:
            return NO_TRANSFER, NO_TRANSFER
        (key,) = found  # only attention sends messages, along one axis
        elements, others = float(forward[key]) / float(forward.calls[key]), float(forward.calls[key])
        # Keys and values travel to the other ranks in the forward, and again in the backward. Their gradients travel
        # one hop further per layer, back to the rank that stores the keys.
        keys = self.send(*key, self.workload.element_bytes * elements, 1.0, 2 * others)
        home = max(1, len(self.workload.costs.units))
        return keys, self.send(*key, WIDE_BYTES * elements, 1.0, others + home)

    def transfers(self, traffic: LayerTraffic) -> tuple[tuple[Transfer, ...], tuple[Transfer, ...]]:
        """Return the collectives of a layer, forward and backward, without a ring's messages.

        The backward's traffic includes all-reduces of vectors' gradients per micro-batch, but these run once per step.
        Latency is therefore counted for at most as many all-reduces over an axis as the forward has.
        """
        size, in_forward = self.workload.element_bytes, traffic.forward.calls
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
                made.append(self.send(kind, axis, size * float(way[key]), float(calls)))
            ways.append(tuple(made))
        return ways[0], ways[1]

    def of_each_part(self, weights: LayerTraffic, more: int) -> tuple[Transfer, ...]:
        """Return the collectives of weights for `more` chunks after the first; each chunk repeats all of them."""
        forward, backward = self.transfers(weights * more)
        return 3 * forward + backward  # forward collectives run in the forward, the recomputed layer, and the chunk

    def sent(self) -> tuple[Sent, ...]:
        """Return the bytes along each axis that were added so far."""
        return tuple(Sent(axis, self.group(axis).across, num_bytes) for axis, num_bytes in self.sent_bytes.items())
