"""Bind a rank to the CPUs of its accelerator's NUMA node, unless it is bound already.

    bind_to_node(torch.cuda.get_device_properties(device))

On a host with several NUMA nodes, threads on another node than the GPU's reach host memory and the GPU through the link
between sockets. torchrun binds ranks on request (`--numa-binding=node`). dslpar starts mpirun and deepspeed without
binding, since these launchers bind by rank number, and not by the accelerator's location.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Protocol

SYSFS = Path("/sys")


class PciDevice(Protocol):
    """PCI address of a device, as torch reports it."""

    pci_domain_id: int
    pci_bus_id: int
    pci_device_id: int


def bind_to_node(device: PciDevice, sysfs: Path = SYSFS) -> frozenset[int]:
    """Bind this process to the CPUs of the device's NUMA node; return them, or empty if nothing was changed.

    Threads started later inherit the binding. If the process may not run on all CPUs of the host, a launcher, scheduler
    or user has bound it, and this binding is kept.
    """
    if not hasattr(os, "sched_setaffinity"):
        return frozenset()
    own = cpus_beside(device, sysfs)
    if own and os.sched_getaffinity(0) == _online(sysfs):
        os.sched_setaffinity(0, own)
        return own
    return frozenset()


def num_threads(num_local_ranks: int) -> int:
    """Return torch's number of threads: the host's CPUs per rank, at most the CPUs that this rank may use."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(usable, (os.cpu_count() or 1) // num_local_ranks))


def cpus_beside(device: PciDevice, sysfs: Path = SYSFS) -> frozenset[int]:
    """Return the CPUs of the device's NUMA node; empty: the system does not report it, or has only one node."""
    if not hasattr(device, "pci_bus_id"):  # older versions of torch do not have it
        return frozenset()
    address = f"{device.pci_domain_id:04x}:{device.pci_bus_id:02x}:{device.pci_device_id:02x}.0"
    node = _read(sysfs / "bus/pci/devices" / address / "numa_node") or "-1"
    cpus = _numbers(_read(sysfs / f"devices/system/node/node{node}/cpulist"))
    return cpus if cpus < _online(sysfs) else frozenset()


def _online(sysfs: Path) -> frozenset[int]:
    return _numbers(_read(sysfs / "devices/system/cpu/online"))


def _numbers(text: str) -> frozenset[int]:
    """Parse a CPU list in the kernel's format.

    >>> sorted(_numbers("0-2,8"))
    [0, 1, 2, 8]
    """
    ranges = [part.partition("-")[::2] for part in text.split(",") if part]
    return frozenset(number for first, last in ranges for number in range(int(first), int(last or first) + 1))


def _read(path: Path) -> str:
    """Return a file's text; empty if it cannot be read, as in many containers."""
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:
        return ""
