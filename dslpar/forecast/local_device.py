"""Find the device of this machine in the NVIDIA driver's files, without starting a process or loading a library.

Every `dslpar lint` calls `local_device`. Imports that only machines with a device need are therefore inside it.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dslpar.forecast.device import Device

NVIDIA = "/proc/driver/nvidia/gpus"


def local_device() -> Device | None:
    """Return the device of this machine; None if it has no device, has different ones, or has an unknown one."""
    try:
        folders = os.listdir(NVIDIA)
    except OSError:
        return None
    names = {name for folder in folders if (name := _model(os.path.join(NVIDIA, folder, "information")))}
    if len(names) != 1:
        return None
    from dslpar.forecast.device import device_of_driver  # its table is needed only where there is a driver

    return device_of_driver(names.pop())


def _model(path: str) -> str | None:
    """Return the device's name in a file of the driver; None if the file cannot be read or has no name."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            lines = file.read(4096).splitlines()
    except OSError:
        return None
    return next((value.strip() for name, _, value in (line.partition(":") for line in lines) if name == "Model"), None)
