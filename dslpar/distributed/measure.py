"""One rank of `dslpar measure`: time the operations that the forecast needs; rank 0 writes the calibration."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from deepspeed.accelerator import get_accelerator

from dslpar.core.mesh import Mesh
from dslpar.core.visible import visible
from dslpar.distributed import bootstrap, timing
from dslpar.distributed.groups import Groups
from dslpar.distributed.rank_session import RankSession
from dslpar.forecast import constants
from dslpar.forecast.device import Device, UnknownDeviceError, device_named, device_of_driver
from dslpar.forecast.links import Nodes
from dslpar.forecast.timings import Timings, constants_of


class NoDeviceError(ValueError):
    """No device to measure, an unknown device, or no place to write; the message says how to fix it."""


def run(name: str | None, per_node: int | None, path: Path) -> int:
    """Measure the devices of one process, or of all ranks that a launcher started; return the exit status.

    name: the device in the table, if its driver's name does not identify it.
    per_node: devices per node; None: the number of ranks on this host.

    Raises:
        NoDeviceError: this host has no accelerator and `name` is None, the device is not in the table, or the file
            cannot be written.
    """
    found = _device(name)
    if not os.access(path.absolute().parent, os.W_OK):
        raise NoDeviceError(f"cannot write {path}: its folder does not exist or is not writable")
    with RankSession(os.environ) as rank:
        dist_env = rank.prepare(lambda dist_env: dist_env)
        rank.meet(None)
        nodes = Nodes(per_node or max(dist_env.local_size, 1), found.nic_gb_per_s)
        timings = _measured(dist_env.world_size, bootstrap.current_device())
        if dist_env.rank == 0:
            made = constants_of(timings, found.computing_in("bf16"), nodes)
            path.write_text(constants.dump(made), encoding="utf-8")
            sys.stdout.write(_report(timings, found, made, path))
    return rank.status


def _device(name: str | None) -> Device:
    accelerator = get_accelerator()
    if name is None and accelerator.device_name() == "cpu":
        raise NoDeviceError("this host has no accelerator: run it where the devices are, or name one with --device")
    driver = name or torch.cuda.get_device_name()
    try:
        found = device_named(name) if name else device_of_driver(driver)
    except UnknownDeviceError as error:
        raise NoDeviceError(str(error)) from error
    if found is None:
        raise NoDeviceError(
            f"{driver!r} is not in the table of devices: name the one that is most like it, --device NAME"
        )
    return found


def _measured(world_size: int, device: torch.device) -> Timings:
    sizes = (
        timing.PRODUCTS
        if device.type != "cpu"
        else tuple((rows // 16, k // 4, n // 4) for rows, k, n in timing.PRODUCTS)
    )
    products = timing.time_products(device, torch.bfloat16, sizes)
    copied = timing.time_copies(device)
    sums = []
    if world_size > 1:
        axis = Groups(Mesh(data=world_size)).axis("data")
        sums = timing.time_sums(axis, device, timing.SUM_BYTES if device.type != "cpu" else timing.SUM_BYTES[:6])
    return Timings(products=tuple(products), sums=tuple(sums), world_size=world_size, copied_gb_per_s=copied / 1e9)


def _report(timings: Timings, device: Device, made: constants.Constants, path: Path) -> str:
    lines = [f"{device.name}: rows x depth x columns of products in bf16, and their share of {device.tflops:g} TFLOP/s"]
    for (rows, depth, columns), seconds in timings.products:
        rate = 2 * rows * depth * columns / seconds / 1e12
        lines.append(f"  {rows:6} x {depth:6} x {columns:6} {rate:9.2f} TFLOP/s {100 * rate / device.tflops:6.1f} %")
    copied = timings.copied_gb_per_s or 0.0
    lines.append(
        f"a copy reads and writes {copied:,.1f} GB/s, {100 * copied / device.hbm_gb_per_s:.1f} % of its memory's"
    )
    if timings.sums:
        lines.append(f"all-reduces over {timings.world_size} ranks")
        lines += [f"  {size / 2**20:10.3f} MiB {1e6 * seconds:10.1f} us" for size, seconds in timings.sums]
    for name, bounds in constants.BOUNDS.items():
        old, new = getattr(constants.DEFAULT, name), getattr(made, name)
        if old != new:
            bound = " (as far as it goes: this is no such device, or it is busy)" if new in bounds else ""
            lines.append(f"{name}: {old:.4g} -> {new:.4g}{bound}")
    lines.append(f"written to {path}: cluster=dict(calibration={str(path)!r}) in a config, or --calibration {path}")
    return "".join(visible(line) + "\n" for line in lines)
