"""Whether ranks reach each other's memory: asked before a run whose pieces are to come through it.

    require(groups, device)              # parallel.tensor.comm_overlap='symmetric_memory'

torch hands the memory of a device on by descriptors of files, from process to process, and waits for them without an
end: ranks on several hosts would wait for each other. So what decides it is gathered first, and all ranks refuse alike.
A fabric that reaches over hosts (NVLink of a whole rack) is not asked for.
"""

from __future__ import annotations

import importlib
import logging
import os
import socket
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from dslpar.core.catalog import raise_finding
from dslpar.distributed.collectives import Axis, gather_objects
from dslpar.distributed.groups import Groups

log = logging.getLogger("dslpar")

MODULE = "torch.distributed._symmetric_memory"
"""Of torch's, which defines the products when it is imported; torch 2.4 has none."""
ALLOW_SHARED = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"
"""The switch by which torch lets ranks have devices of one number."""


class Place(NamedTuple):
    """Where a rank computes."""

    host: str
    number: int
    """Of its device, as the rank sees them."""
    uuid: str
    """Of its device, whoever sees it."""
    reached: tuple[int, ...]
    """Devices of the host whose memory it reaches, as it sees them; its own among them."""
    lacks: str = ""
    """Why its torch cannot."""


def require(groups: Groups, device: torch.device) -> None:
    """Raise DslparError, on all ranks alike, where CUDA devices do not reach each other. All ranks together.

    Where they do, what torch needs for it is made. On other devices nothing is asked.
    """
    axes = [groups.axis(letter) for letter in groups.tensor.token_axes]
    if not axes:
        return
    if device.type != "cuda":
        log.info("comm_overlap='symmetric_memory': on %s, pieces go around rings", device.type)
        return
    world = groups.axis("pipe", "data", "tensor")
    places = dict(zip(world.peers, gather_objects(_place(device), world), strict=True))
    _refuse([why_apart(axis.peers, places) for axis in axes], world)
    for axis in axes:
        _refuse([_why_not_met(axis)], world)


def why_apart(peers: Sequence[int], places: Mapping[int, Place]) -> str:
    """Return why ranks cannot reach each other's memory; empty: they can, as far as is known before they try."""
    hosts = dict.fromkeys(places[rank].host for rank in peers)
    if len(hosts) > 1:
        return f"ranks {_listed(peers)} are on several hosts: {', '.join(hosts)}"
    for rank in peers:
        place = places[rank]
        if place.lacks:
            return f"rank {rank}: {place.lacks}"
        for other in peers:
            there = places[other]
            if os.environ.get(ALLOW_SHARED) == "1" or rank == other:
                continue
            if place.uuid == there.uuid:
                return f"ranks {_listed((rank, other))} share a device"
            if place.number == there.number:
                own = f"ranks {_listed((rank, other))} see their own devices alone, both as number {place.number}"
                return f"{own}: let all see all of the host's, or set {ALLOW_SHARED}=1"
            if there.number not in place.reached:
                return f"on {place.host}, device {place.number} does not reach device {there.number}"
    return ""


def _place(device: torch.device) -> Place:
    """Return where this rank computes."""
    index, count = torch.cuda.current_device() if device.index is None else device.index, torch.cuda.device_count()
    reached = [other for other in range(count) if other == index or torch.cuda.can_device_access_peer(index, other)]
    uuid = str(getattr(torch.cuda.get_device_properties(index), "uuid", index))
    return Place(socket.gethostname(), index, uuid, tuple(reached), _lacks())


def _lacks() -> str:
    try:
        importlib.import_module(MODULE)
    except ImportError:
        return f"torch {torch.__version__} has no symmetric memory"
    has_products = hasattr(torch.ops.symm_mem, "fused_all_gather_matmul")
    return "" if has_products else f"torch {torch.__version__} has no fused products"


def _why_not_met(axis: Axis) -> str:
    """Have torch share some memory over an axis; return what it said if it could not, or an empty text."""
    memory: Any = importlib.import_module(MODULE)
    enable = memory.enable_symm_mem_for_group
    try:
        if not hasattr(enable, "__deprecated__"):  # later ones need no such call
            enable(axis.group_name)
        memory.get_symm_mem_workspace(axis.group_name, min_size=1)
    except RuntimeError as error:
        first_line = str(error).partition("\n")[0]
        return f"torch cannot share memory between ranks {_listed(axis.peers)}: {first_line}"
    return ""


def _refuse(reasons: Sequence[str], world: Axis) -> None:
    """Raise the first reason of all ranks, on all: one that left alone would leave the others waiting."""
    of_all = [reason for found in gather_objects(list(reasons), world) for reason in found if reason]
    if of_all:
        message = f"comm_overlap='symmetric_memory': {of_all[0]}"
        hint = "comm_overlap=True, whose pieces go around rings"
        raise_finding("HST234", message, hint, key="parallel.tensor.comm_overlap")


def _listed(ranks: Sequence[int]) -> str:
    return " and ".join(filter(None, (", ".join(map(str, ranks[:-1])), str(ranks[-1]))))
