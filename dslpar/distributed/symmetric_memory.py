"""Check that ranks can access each other's device memory, before a run that relies on symmetric memory.

    require(groups, device)              # parallel.tensor.comm_overlap='symmetric_memory'

torch shares device memory between processes through file descriptors and waits for them without a timeout, so ranks on
several hosts would hang. Therefore each rank's host and device are gathered first, and if memory cannot be shared, all
ranks raise the same error. A fabric across hosts (rack-scale NVLink) is not considered.
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
"""torch's module; importing it defines the fused products. torch 2.4 does not have it."""
ALLOW_SHARED = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"
"""torch's variable that allows several ranks to have the same device index."""


class Place(NamedTuple):
    """A rank's host and device."""

    host: str
    number: int
    """Device index as this rank sees it."""
    uuid: str
    """Device UUID, the same for all ranks."""
    reached: tuple[int, ...]
    """Indices of the devices whose memory this rank can access, as it sees them, including its own."""
    lacks: str = ""
    """Reason why this rank's torch does not support symmetric memory; empty if it does."""


def require(groups: Groups, device: torch.device) -> None:
    """Raise DslparError, on all ranks, if CUDA devices cannot access each other's memory. All ranks together.

    If they can, torch's workspaces are allocated. Other devices do not use symmetric memory and are not checked.
    """
    axes = [groups.axis(letter) for letter in groups.tensor.token_axes]
    if not axes:
        return
    if device.type != "cuda":
        log.info("comm_overlap='symmetric_memory': on %s, chunks are sent around rings instead", device.type)
        return
    world = groups.axis("pipe", "data", "tensor")
    places = dict(zip(world.peers, gather_objects(_place(device), world), strict=True))
    _refuse([why_apart(axis.peers, places) for axis in axes], world)
    for axis in axes:
        _refuse([_why_not_met(axis)], world)


def why_apart(peers: Sequence[int], places: Mapping[int, Place]) -> str:
    """Return the reason why ranks cannot access each other's memory, or "" if no place rules it out."""
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
                own = f"ranks {_listed((rank, other))} see only their own device, both as number {place.number}"
                return f"{own}: let each rank see all devices of its host, or set {ALLOW_SHARED}=1"
            if there.number not in place.reached:
                return f"on {place.host}, device {place.number} does not reach device {there.number}"
    return ""


def _place(device: torch.device) -> Place:
    """Return this rank's place."""
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
    """Have torch share some memory over an axis; return torch's error if that fails, else ""."""
    memory: Any = importlib.import_module(MODULE)
    enable = memory.enable_symm_mem_for_group
    try:
        if not hasattr(enable, "__deprecated__"):  # newer versions need no such call
            enable(axis.group_name)
        memory.get_symm_mem_workspace(axis.group_name, min_size=1)
    except RuntimeError as error:
        first_line = str(error).partition("\n")[0]
        return f"torch cannot share memory between ranks {_listed(axis.peers)}: {first_line}"
    return ""


def _refuse(reasons: Sequence[str], world: Axis) -> None:
    """Raise the first reason of any rank on all ranks: if one rank raised alone, the others would hang."""
    of_all = [reason for found in gather_objects(list(reasons), world) for reason in found if reason]
    if of_all:
        message = f"comm_overlap='symmetric_memory': {of_all[0]}"
        hint = "use comm_overlap=True, which sends chunks around rings"
        raise_finding("HST234", message, hint, key="parallel.tensor.comm_overlap")


def _listed(ranks: Sequence[int]) -> str:
    return " and ".join(filter(None, (", ".join(map(str, ranks[:-1])), str(ranks[-1]))))
