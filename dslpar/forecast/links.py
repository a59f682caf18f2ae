"""Collective times on the axes of a mesh, over the links within a node and between nodes.

    >>> from dslpar.core.mesh import TensorMesh
    >>> mesh = Mesh(data=4, tensor=TensorMesh(y=4, mode="1d"))
    >>> group_of(mesh, Nodes(per_node=8, nic_gb_per_s=400), "data")
    Group(size=4, inner=2, share=0.25)

A collective runs in a ring. Its time is the bytes that a rank sends over the bandwidth of the slowest link, plus a
latency per hop. Groups that span nodes share the network cards of each node, because they communicate at the same time.
Over many nodes latency dominates, not bandwidth, as nanotron's measurements show (256 MB over 2 to 64 nodes). This is
Hockney's model. vTrain, Calculon and llm-analysis use it too, with other assumptions about a group's share of the
network cards.
"""

from __future__ import annotations

from math import log2
from typing import NamedTuple

from dslpar.core.mesh import Mesh
from dslpar.forecast.constants import Constants
from dslpar.forecast.device import Device

TREE_HOPS = 4
"""Hops of an all-reduce between two nodes."""
LEAVE_HOPS = 3
"""Hops within a node for data that comes from another node."""


class Nodes(NamedTuple):
    """Sizes of a job's nodes (machines)."""

    per_node: int
    """Devices per node."""
    nic_gb_per_s: float
    """Bandwidth in GB/s from one node to the others in one direction, over all its network cards."""

    @classmethod
    def usual(cls, device: Device) -> Nodes:
        """Return the nodes in which the device is usually sold."""
        return cls(device.per_node, device.nic_gb_per_s)

    def linked(self, device: Device) -> Nodes:
        """Return these nodes joined into groups whose devices share the fast links, such as a rack of GB200."""
        joined = device.linked / self.per_node
        return self if joined <= 1 else Nodes(device.linked, self.nic_gb_per_s * joined)


class Group(NamedTuple):
    """Ranks of a collective, and their places in nodes."""

    size: int
    """Ranks of the group."""
    inner: int
    """Ranks of the group in one node."""
    share: float
    """Share of the node's network cards that this group may use."""

    @property
    def across(self) -> bool:
        """Return whether the group spans several nodes."""
        return self.size > self.inner


def group_of(mesh: Mesh, nodes: Nodes, *axes: str) -> Group:
    """Return the group over one axis or several.

    Axes are `d`, `q`, `y`, `z`, `data` and `pipe`, or a part of d (`ulysses`, `ring`) or of data (`e`, `expert_data`).
    The result holds for the groups
    of all ranks if the sizes of axes and nodes divide each other.
    """
    size = inner = 1
    per_node, tensor = nodes.per_node, mesh.tensor
    for axis in axes:
        if axis == "ulysses":
            length, stride = tensor.ulysses, mesh.strides["d"]
        elif axis == "ring":
            length, stride = tensor.ring, mesh.strides["d"] * tensor.ulysses
        else:
            length, stride = mesh.extent(axis)
        room = per_node // stride
        size *= length
        if room > 1:
            inner *= length if length < room else room
    return Group(size, inner, min(1.0, inner / per_node))


class Transfer(NamedTuple):
    """One collective or several on a group: seconds at the links' peak bandwidth, and hops.

    `Constants` hold the shares of these peaks that collectives reach, and the latency of a hop.
    """

    link_s: float
    """Seconds over the links within a node at their peak bandwidth."""
    nic_s: float
    """Seconds over the group's share of the network cards at their peak bandwidth; 0 within a node."""
    nodes: float
    """Nodes of the group after the first."""
    link_hops: float
    """Hops within a node."""
    nic_hops: float
    """Hops between nodes."""
    calls: float
    """Number of collectives that the host launches."""

    def seconds(self, constants: Constants) -> float:
        """Return the seconds that the collectives take."""
        link_s, nic_s, nodes, link_hops, nic_hops, _ = self
        seconds = link_s / constants.link_efficiency
        if nic_s:
            over_nodes = nic_s * (1 + constants.nic_crowding * nodes) / constants.nic_efficiency
            seconds = max(seconds, over_nodes) + nic_hops * constants.nic_latency_s
        return seconds + link_hops * constants.link_latency_s


NO_TRANSFER = Transfer(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


def transfer(kind: str, group: Group, device: Device, nodes: Nodes, sent_bytes: float, calls: float = 1.0) -> Transfer:
    """Return the `Transfer` of `calls` collectives of a kind, in which a rank sends `sent_bytes` in all.

    Hops within a node are log2(ranks), since NCCL's algorithms need fewer than a ring, and twice as many for an
    all-reduce. Between nodes a ring has one hop per other rank, and an all-reduce goes up and down a tree. A message
    (`send`) takes one hop, over the network card of the sending device. In an all-to-all each device sends to other
    nodes over its own card, while in a ring only the last device of a node does. Its messages are under way at the same
    time, so it has log2(ranks) hops between nodes too.
    """
    size, inner, share = group
    if size == 1:
        return NO_TRANSFER
    link_s = sent_bytes / (device.link_gb_per_s * 1e9)
    if size <= inner:
        hops = 1.0 if kind == "send" else log2(size) * (2 if kind == "all_reduce" else 1)
        return Transfer(link_s, 0.0, 0.0, calls * hops, 0.0, calls)
    others = size / inner - 1
    nic_hops = {"send": 1.0, "all_to_all": log2(size), "all_reduce": TREE_HOPS * others}.get(kind, size - 1)
    if kind == "all_to_all":
        leaving, cards = (size - inner) / (size - 1), 1 / nodes.per_node
    else:
        leaving, cards = 1.0, 1 / nodes.per_node if kind == "send" else share
    nic_s = sent_bytes * leaving / (nodes.nic_gb_per_s * cards * 1e9)
    return Transfer(link_s, nic_s, others, calls * LEAVE_HOPS, calls * nic_hops, calls)
