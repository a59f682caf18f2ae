"""Determine the machine that a job is planned for from the command line, the config, the hostfile or this machine."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from dslpar.forecast.constants import load
from dslpar.forecast.device import UnknownDeviceError, device_named
from dslpar.forecast.links import Nodes
from dslpar.forecast.local_device import local_device
from dslpar.forecast.plan import Machine
from dslpar.layout.resolve import Job

if TYPE_CHECKING:
    from dslpar.cluster.hostfile import Cluster


class MachineError(ValueError):
    """The device is unknown or the calibration cannot be read; the message names the key or option to set."""


def machine_of(
    job: Job,
    device: str | None = None,
    per_node: int | None = None,
    cluster: Cluster | None = None,
    calibration: str | None = None,
    calibrated: bool = True,
    project_device: str | None = None,
) -> Machine:
    """Return the machine of a job: from the arguments, else the config, the hostfile, the project, or this machine.

    `calibration` is the path of a calibration file, relative to the working folder. With `calibrated` False it is not
    read, because memory forecasts need no constants.

    Raises:
        MachineError: the device's name is unknown; no name is given and this machine has no known device; or the
            calibration cannot be read.
    """
    section = job.spec.cluster
    hosts = cluster.hosts if cluster is not None else ()
    name = device or section.device or (cluster.device if cluster is not None else None) or project_device
    # If hosts have different numbers of devices, use the smallest: groups then span the most nodes.
    per_node = per_node or section.nodes_of or min((host.slots for host in hosts), default=None)
    try:
        found = device_named(name) if name else local_device()
    except UnknownDeviceError as error:
        raise MachineError(str(error)) from error
    if found is None:
        raise MachineError(
            "no device is given, and this machine has no known one: --device h100-80g, or "
            "cluster=dict(device='h100-80g') in the config, `# device: h100-80g` in the hostfile, or "
            'device = "h100-80g" in [tool.dslpar] of pyproject.toml'
        )
    nodes = Nodes(per_node or found.per_node, section.nic_gb_per_s or found.nic_gb_per_s)
    if calibration is None and section.calibration is not None:
        calibration = os.path.join(os.path.dirname(job.path), section.calibration)
    if calibration is None or not calibrated:
        return Machine(device=found, nodes=nodes)
    try:
        file = load(calibration)
    except (OSError, ValueError) as problem:
        raise MachineError(f"cannot use the calibration {calibration}: {problem}") from problem
    return Machine(
        device=found,
        nodes=nodes,
        constants=file.constants,
        error=file.error,
        num_runs=file.num_runs,
        covers=file.covers,
    )
