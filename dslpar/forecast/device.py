"""Devices and the links between them: peak, memory and bandwidth from data sheets and published measurements.

    >>> device_named("h100-80g").memory_bytes / 2**30
    79.6
    >>> device_of_driver("NVIDIA A100-SXM4-80GB").name
    'a100-80g'

Peaks are those of dense matrix products in bf16, or fp16 if a device has no bf16; `dslpar.costs.flops.CHIPS` has them.
Bandwidths of links count one direction. Sources: stas00/ml-engineering (compute/accelerator and network),
cli99/llm-analysis, and vendors' data sheets. The share of its peak that a device reaches is a constant of the forecast
(`dslpar.forecast.constants`), and not in this table.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from dslpar.core.suggest import did_you_mean
from dslpar.costs.flops import CHIPS, is_partial

GIB = 2**30
USABLE = 0.995
"""Share of a card's nominal GiB that its driver reports."""


@dataclass(frozen=True, kw_only=True)
class Device:
    """An accelerator, with the links of the node that it usually comes in."""

    name: str
    """Name in `--device` and `cluster.device`."""
    tflops: float
    """Peak of dense products in bf16, TFLOP/s."""
    fp32_tflops: float
    """Peak in fp32 without TF32, which torch leaves off."""
    memory_gib: int
    """Nominal memory."""
    hbm_gb_per_s: float
    """Bandwidth of the device's memory."""
    num_sms: int
    """Multiprocessors (SMs or compute units). Each computes one tile of a matrix product at a time."""
    tile: tuple[int, int]
    """Rows and columns of a tile of a matrix product's result; the result is rounded up to whole tiles."""
    link_gb_per_s: float
    """Bandwidth to the other devices of its node: NVLink, xGMI, or PCIe."""
    per_node: int
    """Devices in a usual node."""
    nic_gb_per_s: float
    """Bandwidth from a usual node to the others, over all its network cards together."""
    linked: int = 0
    """Devices that share the fast links if these reach beyond a node: the 72 of a rack of GB200; else 0."""
    driver: str = ""
    """Regular expression for the names that drivers report for the device."""

    @property
    def flops_per_s(self) -> float:
        """Peak of dense products in half precision."""
        return self.tflops * 1e12

    def computing_in(self, dtype: str) -> Device:
        """Return the device with `tflops` set to its peak in `dtype`."""
        return replace(self, tflops=self.fp32_tflops) if dtype == "fp32" else self

    @property
    def memory_bytes(self) -> float:
        """The most that a process may allocate, including the driver's share."""
        return self.memory_gib * USABLE * GIB


_AMPERE, _HOPPER = (128, 128), (128, 256)


def _device(
    name: str,
    chip: str,
    memory_gib: int,
    hbm_tb_per_s: float,
    sms: tuple[int, tuple[int, int]],
    links: tuple[float, int, float],
    driver: str = "",
    linked: int = 0,
) -> Device:
    """Make a row: `chip` of `CHIPS`; `links` within a node, devices per node, network of a node."""
    link, per_node, nic = links
    peaks = CHIPS[chip]
    return Device(
        name=name,
        tflops=peaks.bf16 or peaks.fp16,
        fp32_tflops=peaks.fp32,
        memory_gib=memory_gib,
        hbm_gb_per_s=hbm_tb_per_s * 1e3,
        num_sms=sms[0],
        tile=sms[1],
        link_gb_per_s=link,
        per_node=per_node,
        nic_gb_per_s=nic,
        driver=driver,
        linked=linked,
    )


_TABLE = (
    _device("h100-80g", "H100", 80, 3.35, (132, _HOPPER), (450, 8, 400), r"\bH100 80GB HBM3\b"),
    _device("h100-80g-pcie", "H100 PCIe", 80, 2.0, (114, _HOPPER), (63, 8, 100), r"\bH100 PCIe\b"),
    _device("h100-96g", "H100", 96, 2.4, (132, _HOPPER), (450, 8, 400), r"\bH100.*96GB\b"),
    _device("h200-141g", "H200", 141, 4.8, (132, _HOPPER), (450, 8, 400), r"\bH200\b"),
    _device("h800-80g", "H800", 80, 3.35, (132, _HOPPER), (200, 8, 400), r"\bH800\b"),
    _device("gh200-96g", "GH200", 96, 4.0, (132, _HOPPER), (450, 1, 50), r"\bGH200 480GB\b"),
    _device("gh200-141g", "GH200", 141, 4.8, (132, _HOPPER), (450, 1, 50), r"\bGH200 144G\b"),
    _device("b200-180g", "B200", 180, 8.0, (148, _HOPPER), (900, 8, 400), r"\bB200\b"),
    _device("gb200-186g", "GB200", 186, 8.0, (148, _HOPPER), (900, 4, 200), r"\bGB200\b", linked=72),
    _device("b300-288g", "B300", 288, 8.0, (148, _HOPPER), (900, 8, 800), r"\bB300\b"),
    _device("a100-80g", "A100", 80, 2.039, (108, _AMPERE), (300, 8, 200), r"\bA100-SXM4-80GB\b"),
    _device("a100-80g-pcie", "A100", 80, 1.94, (108, _AMPERE), (31, 8, 200), r"\bA100 80GB PCIe\b"),
    _device("a100-40g", "A100", 40, 1.555, (108, _AMPERE), (300, 8, 200), r"\bA100-SXM4-40GB\b"),
    _device("v100-32g", "V100", 32, 0.9, (80, _AMPERE), (150, 8, 50), r"\bV100-SXM[23]-32GB\b"),
    _device("v100-16g", "V100", 16, 0.9, (80, _AMPERE), (150, 8, 50), r"\bV100-SXM2-16GB\b"),
    _device("l40s-48g", "L40S", 48, 0.864, (142, _AMPERE), (31, 8, 50), r"\bL40S$"),
    _device("a10-24g", "A10", 24, 0.6, (72, _AMPERE), (31, 4, 12.5), r"\bA10$"),
    _device("rtx4090-24g", "RTX 4090", 24, 1.008, (128, _AMPERE), (31, 8, 12.5), r"\bRTX 4090$"),
    _device("mi250x-64g", "MI250X", 64, 1.64, (110, _HOPPER), (175, 16, 100), r"\bMI250X$"),
    _device("mi300x-192g", "MI300X", 192, 5.3, (304, _HOPPER), (448, 8, 400), r"\bMI300X\b"),
    _device("mi325x-256g", "MI325X", 256, 6.0, (304, _HOPPER), (448, 8, 400), r"\bMI325X\b"),
)
DEVICES: dict[str, Device] = {device.name: device for device in _TABLE}
"""Devices by name. A name without a form factor such as `-pcie` means SXM. One MI250X counts as two devices, its dies.
"""


class UnknownDeviceError(ValueError):
    """`DEVICES` has no device of the given name; the message suggests names."""


def device_named(name: str) -> Device:
    """Return a device by its name, or by its family's name if there is only one: 'h200' is 'h200-141g'.

    Raises:
        UnknownDeviceError: `DEVICES` has no such name, or several devices of that family.
    """
    found = find_device(name)
    if found is None:
        raise UnknownDeviceError(f"unknown device {name!r}; {device_hint(name)}")
    return found


def find_device(name: str) -> Device | None:
    """Return a device as `device_named` does; None if the name is unknown or means several devices."""
    lower = name.lower()
    family = [each for known, each in DEVICES.items() if known.startswith(f"{lower}-")] if lower else []
    return DEVICES.get(lower) or (family[0] if len(family) == 1 else None)


def device_hint(name: str) -> str:
    """Return a hint for an unknown name: a device whose name begins with it or resembles it, else all names."""
    for beginning in (f"{name.lower()}-", name.lower()) if name else ():
        for each in DEVICES:
            if each.startswith(beginning):
                return f"did you mean {each!r}?"
    return did_you_mean(name, DEVICES) or f"choose one of {', '.join(DEVICES)}"


def device_of_driver(name: str) -> Device | None:
    """Return the device for a name that a driver reports; None if it is unknown, or a part of a device (MIG, vGPU)."""
    if is_partial(name):
        return None
    return next((device for device in _TABLE if device.driver and re.search(device.driver, name)), None)
