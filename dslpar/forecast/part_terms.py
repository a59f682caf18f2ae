"""Kernels and collectives of a model's parts on a rank, for one micro-batch, before any constant is applied.

    part_terms(workload, device, nodes).layer.forward

Parts are those of `ModelCosts`: what comes before the layers, a layer, and the head with its loss. Their terms depend
neither on the number of layers per stage nor on replicas, so they are cached with the costs: a search asks for the same
ones with every pipeline and every ZeRO stage.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from dslpar.core.mesh import TENSOR_AXES
from dslpar.costs.ring import LayerTraffic, Traffic
from dslpar.forecast.device import Device
from dslpar.forecast.kernels import Kernels, kernels_of
from dslpar.forecast.links import NO_TRANSFER, Group, Nodes, Transfer, group_of, transfer
from dslpar.forecast.workload import Workload

WIDE_BYTES = 4
"""Bytes per element of gradients that add up around a ring (float32)."""
HOST_BYTES_PER_S = 12e9
"""Bandwidth between a device and its host, for offloaded optimizer states or stored inputs."""


class Sent(NamedTuple):
    """Bytes that a rank sends along an axis."""

    axis: str
    across: bool
    """True if the axis spans several nodes."""
    num_bytes: float


@dataclass(frozen=True, kw_only=True)
class PartTerms:
    """Parts of a model on a machine, for one micro-batch."""

    wide_tiles: bool
    layer: Kernels
    forward: tuple[Transfer, ...]
    backward: tuple[Transfer, ...]
    """Collectives of a layer."""
    ring: tuple[Transfer, Transfer]
    """One message of keys and values around a ring, and one of their gradients, which are in float32."""
    ring_size: int
    overlapped: bool
    """True if collectives run in pieces under the products they belong to."""
    launches: int
    """Ranks of a tensor group in one node: hosts that wait for each other."""
    blocking: bool
    """True if the host waits for messages between stages."""
    recomputes: bool
    recomputes_scores: bool
    recomputed_part: Kernels | None
    """Kernels that a layer recomputes for each chunk of tokens with `mlp_chunks`: norm and MLP."""
    part_sent: tuple[Transfer, ...]
    """Collectives of that recomputation."""
    offload_s: float
    """Seconds that the device waits while a layer's stored input goes to the host and back."""
    launched: int
    """Layers that `layer` stands for: 1, or all layers of a model whose layers differ."""
    launch_ratio: float
    """Kernels that a host launches per layer, relative to a dslpar layer."""
    head: Kernels
    repeats_head: bool
    """True if the head runs again in the backward, for each of `loss_chunks`."""
    first_sent: tuple[Transfer, ...]
    last_sent: tuple[Transfer, ...]
    """Collectives of the tables, and of the head and the loss."""
    sent: tuple[Sent, ...]
    """Bytes that a layer sends along each axis."""


def part_terms(workload: Workload, device: Device, nodes: Nodes) -> PartTerms:
    """Return the terms of the parts; `device` has the peak of the workload's type."""
    habits = workload.habits
    again = workload.recompute, workload.interval, workload.offloads_inputs, workload.mlp_chunks
    of_habits = habits.fused_attention, habits.launch_ratio, habits.blocking_messages and workload.chunks.pipe > 1
    key = "parts", workload.dtype, again, of_habits, workload.loss_chunks > 1
    kept = workload.costs.kept
    if key not in kept or kept[key][:2] != (device, nodes):
        kept[key] = device, nodes, _part_terms(workload, device, nodes)
    found: PartTerms = kept[key][2]
    return found


def _part_terms(workload: Workload, device: Device, nodes: Nodes) -> PartTerms:
    habits, costs, size = workload.habits, workload.costs, workload.element_bytes
    links = _Links(workload, device, nodes)
    layer, head = _kernels(workload, device)
    launched = max(1, len(costs.units))
    recomputed_part: Kernels | None = None
    part_sent: tuple[Transfer, ...] = ()
    forward, backward = links.transfers(costs.layer.traffic)
    ring = links.ring(costs.layer.traffic.forward)
    sent = links.sent()
    if workload.recompute == "full" and workload.mlp_chunks > 1:
        recomputed_part = kernels_of(costs.mlp_part.work, device, fused=habits.fused_attention, element_bytes=size)
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
        blocking=habits.blocking_messages and workload.chunks.pipe > 1,
        recomputes=workload.recompute == "full",
        recomputes_scores=workload.recompute == "selective",
        recomputed_part=recomputed_part,
        part_sent=part_sent,
        offload_s=launched * _offload_s(workload),
        launched=launched,
        launch_ratio=habits.launch_ratio,
        head=head,
        repeats_head=workload.loss_chunks > 1,
        first_sent=ends[0][0] + ends[0][1],
        last_sent=ends[1][0] + ends[1][1],
        sent=sent,
    )


def _kernels(workload: Workload, device: Device) -> tuple[Kernels, Kernels]:
    """Return the kernels of a layer, and of the head with the loss; they do not depend on recomputation."""
    costs, fused, size = workload.costs, workload.habits.fused_attention, workload.element_bytes
    key = "kernels", device, fused, size
    if key not in costs.kept:
        layer, head = (
            kernels_of(each.work, device, fused=fused, element_bytes=size) for each in (costs.layer, costs.last)
        )
        costs.kept[key] = layer, head
    found: tuple[Kernels, Kernels] = costs.kept[key]
    return found


def _offload_s(workload: Workload) -> float:
    """Return the seconds per layer in which stored inputs of recomputed groups go to the host and back."""
    if workload.recompute != "full" or not workload.offloads_inputs:
        return 0.0
    num_bytes = 2 * workload.element_bytes * float(workload.costs.boundary)
    return num_bytes / workload.interval / HOST_BYTES_PER_S


class _Links:
    """Groups of a cuboid on a machine's links, and what a layer has sent so far."""

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
        """Return collectives of a kind on an axis, and add `times` their bytes to what was sent."""
        self.sent_bytes[axis] = self.sent_bytes.get(axis, 0.0) + num_bytes * times
        return transfer(kind, self.group(axis), self.device, self.nodes, num_bytes, calls)

    def ring(self, forward: Traffic) -> tuple[Transfer, Transfer]:
        """Return one message of keys and values, and one of their gradients."""
        found = [key for key in forward if key[0] == "send"]
        if not found:
            return NO_TRANSFER, NO_TRANSFER
        (key,) = found  # attention's, on one axis
        elements, others = float(forward[key]) / float(forward.calls[key]), float(forward.calls[key])
        # Keys go around in the forward and in the backward; their gradients go one hop further than the keys, home.
        keys = self.send(*key, self.workload.element_bytes * elements, 1.0, 2 * others)
        home = max(1, len(self.workload.costs.units))
        return keys, self.send(*key, WIDE_BYTES * elements, 1.0, others + home)

    def transfers(self, traffic: LayerTraffic) -> tuple[tuple[Transfer, ...], tuple[Transfer, ...]]:
        """Return the collectives of a layer, forward and backward, without a ring's messages.

        A backward's all-reduces include the gradients of vectors, which really run once per step. So the latency
        counts for no more all-reduces over an axis than the forward has.
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
        """Return what each further chunk adds for weights: it gathers them and reduces their gradients by itself."""
        forward, backward = self.transfers(weights * more)
        return 3 * forward + backward  # the forward, the recomputed layer, and the recomputed chunk

    def sent(self) -> tuple[Sent, ...]:
        """Return what was sent so far along each axis."""
        return tuple(Sent(axis, self.group(axis).across, num_bytes) for axis, num_bytes in self.sent_bytes.items())
