"""The machine that a job is meant for: what the command line, the config, or this machine says of it."""

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
    """It is not known which machine is meant, or what it reaches; the message says what would tell."""


def machine_of(
    job: Job,
    device: str | None = None,
    per_node: int | None = None,
    cluster: Cluster | None = None,
    calibration: str | None = None,
    calibrated: bool = True,
) -> Machine:
    """Return the machine of a job: as given, else as the config says, the hostfile, or this machine.

    `calibration` is a file, relative to the working folder; memory needs none (`calibrated` False).

    Raises:
        MachineError: the table has no device of that name; none is given, and this machine has none that it knows; or
            the calibration of the config cannot be read.
    """
    section = job.spec.cluster
    hosts = cluster.hosts if cluster is not None else ()
    name = device or section.device or (cluster.device if cluster is not None else None)
    # Where hosts differ, groups are as near to each other as the smallest lets them be.
    per_node = per_node or section.nodes_of or min((host.slots for host in hosts), default=None)
    try:
        found = device_named(name) if name else local_device()
    except UnknownDeviceError as error:
        raise MachineError(str(error)) from error
    if found is None:
        raise MachineError(
            "no device is given, and this machine has none that is known: --device h100-80g, or "
            "cluster=dict(device='h100-80g') in the config, or `# device: h100-80g` in the hostfile"
        )
    nodes = Nodes(per_node or found.per_node, section.nic_gb_per_s or found.nic_gb_per_s)
    if calibration is None and section.calibration is not None:
        calibration = os.path.join(os.path.dirname(job.path), section.calibration)
    if calibration is None or not calibrated:
        return Machine(device=found, nodes=nodes)
    try:
        constants, of_calibration = load(calibration)
    except (OSError, ValueError) as problem:
        raise MachineError(f"cannot use the calibration {calibration}: {problem}") from problem
    return Machine(device=found, nodes=nodes, constants=constants, error=of_calibration)
