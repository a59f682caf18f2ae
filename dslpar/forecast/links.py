"""Links between ranks: how long collectives take on the axes of a mesh, within a node and over nodes.

    >>> from dslpar.core.mesh import Tensor
    >>> mesh = Mesh(data=4, tensor=Tensor(y=4, mode="1d"))
    >>> group_of(mesh, Nodes(per_node=8, nic_gb_per_s=400), "data")
    Group(size=4, inner=2, share=0.25)

A collective is a ring: its time is the bytes that a rank sends over the slowest of its links, and a latency a hop.
Ranks that share a node share its network cards with the node's other groups, which use them at the same time. That
latencies and not bandwidth rule over many nodes is what nanotron's measurements show (256 MB over 2 to 64 nodes). The
form is Hockney's; vTrain, Calculon and llm-analysis have it too, with other ideas of what share of a node's cards a
group gets.
"""

from __future__ import annotations

from math import log2

from dslpar.core.mesh import Mesh
from dslpar.core.named_tuple import NamedTuple
from dslpar.forecast.constants import Constants
from dslpar.forecast.device import Device

TREE_HOPS = 4
"""Of an all-reduce, hops between two nodes."""
LEAVE_HOPS = 3
"""Hops within a node for what comes from another."""


class Nodes(NamedTuple):
    """The machines of a job."""

    per_node: int
    """Devices of a node."""
    nic_gb_per_s: float
    """Of a node to the others, one direction, all its network cards together."""

    @classmethod
    def usual(cls, device: Device) -> Nodes:
        """Return those that the device usually comes in."""
        return cls(device.per_node, device.nic_gb_per_s)


class Group(NamedTuple):
    """Ranks of a collective, as links see them."""

    size: int
    inner: int
    """Of them, how many share a node."""
    share: float
    """Of the node's network cards, what this group may use."""

    @property
    def across(self) -> bool:
        """Whether it leaves a node."""
        return self.size > self.inner


def group_of(mesh: Mesh, nodes: Nodes, *axes: str) -> Group:
    """Return the groups over some axes (of `d q y z`, not their common names), or over a part of d: ulysses, ring.

    They are alike on all ranks where sizes divide by each other.
    """
    size = inner = 1
    per_node, tensor = nodes.per_node, mesh.tensor
    for axis in axes:
        if axis == "ulysses":
            length, stride = tensor.ulysses, mesh.strides["d"]
        elif axis == "ring":
            length, stride = tensor.ring, mesh.strides["d"] * tensor.ulysses
        else:
            length, stride = mesh.sizes[axis], mesh.strides[axis]
        room = per_node // stride
        size *= length
        if room > 1:
            inner *= length if length < room else room
    return Group(size, inner, min(1.0, inner / per_node))


class Transfer(NamedTuple):
    """Collectives on one group, in seconds and hops that no constant has entered yet."""

    link_s: float
    """Over the links within a node, at their peak."""
    nic_s: float
    """Over the group's share of the network cards, at their peak; 0 within a node."""
    nodes: float
    """Nodes besides the first that the group spans."""
    link_hops: float
    nic_hops: float
    calls: float
    """Of collectives: what a host launches."""

    def seconds(self, constants: Constants) -> float:
        """Return how long they take."""
        link_s, nic_s, nodes, link_hops, nic_hops, _ = self
        seconds = link_s / constants.link_efficiency
        if nic_s:
            over_nodes = nic_s * (1 + constants.nic_crowding * nodes) / constants.nic_efficiency
            seconds = max(seconds, over_nodes) + nic_hops * constants.nic_latency_s
        return seconds + link_hops * constants.link_latency_s


NO_TRANSFER = Transfer(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


def transfer(kind: str, group: Group, device: Device, nodes: Nodes, sent_bytes: float, calls: float = 1.0) -> Transfer:
    """Return `calls` collectives of a kind in which a rank sends so many bytes in all.

    A ring takes a hop for each other rank; within a node NCCL's are shorter. An all-reduce goes round twice, or over
    nodes up and down a tree; a message takes one hop, over the card of the device that sends it. Of what is exchanged
    by all with all, the part for other nodes leaves each of the group's devices, and not only the last of a ring.
    """
    size, inner, share = group
    if size == 1:
        return NO_TRANSFER
    link_s = sent_bytes / (device.link_gb_per_s * 1e9)
    if size <= inner:
        hops = 1.0 if kind == "send" else log2(size) * (2 if kind == "all_reduce" else 1)
        return Transfer(link_s, 0.0, 0.0, calls * hops, 0.0, calls)
    others = size / inner - 1
    nic_hops = 1.0 if kind == "send" else TREE_HOPS * others if kind == "all_reduce" else size - 1
    if kind == "all_to_all":
        leaving, cards = (size - inner) / (size - 1), 1 / nodes.per_node
    else:
        leaving, cards = 1.0, 1 / nodes.per_node if kind == "send" else share
    nic_s = sent_bytes * leaving / (nodes.nic_gb_per_s * cards * 1e9)
    return Transfer(link_s, nic_s, others, calls * LEAVE_HOPS, calls * nic_hops, calls)
