"""One device of gloo's for all process groups of a process, where torch opens one a group.

    share_device()                   # before init_process_group, or at any time after it
    dist.new_group([0, 1])           # uses the device that the first group has opened

A device has a thread that looks after its sockets, and wakes a hundred times a second though nothing was sent. A rank
is in some ten to fifty groups, and all ranks of a host wake for each: of attention over 32 ranks on 2 cores that took
six of seven parts of the time, over 64 all but one of seventy. Sockets are each pair's own as before, and so are the
threads of a group that run its collectives.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

from torch.distributed import distributed_c10d

_devices: dict[int, list[Any]] = {}
"""By process, since threads do not live on in a fork."""


def share_device() -> None:
    """Have groups that torch makes over gloo from now on use one device; it may be said again."""
    torchs: Any = getattr(distributed_c10d, "ProcessGroupGloo", None)
    # A torch before `options` tells nobody its devices, and a build without gloo has none.
    if torchs is None or not hasattr(torchs, "options") or getattr(torchs, "shares_device", False):
        return

    class AsTorchs(type(torchs)):  # type: ignore[misc]
        """torch asks whether a group is of this class, also of one that was there before."""

        def __instancecheck__(cls, group: object) -> bool:
            return isinstance(group, torchs)

    class ProcessGroupGloo(torchs, metaclass=AsTorchs):  # type: ignore[misc]
        """torch's, on the device of the first one of this process."""

        shares_device = True

        def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
            devices = _devices.get(os.getpid())
            if devices is None:
                super().__init__(store, rank, size, timeout=timeout)
                _devices[os.getpid()] = self.options._devices
                return
            options = torchs._Options()
            options._devices, options._threads, options._timeout = devices, 2 * len(devices), timeout  # as torch's own
            super().__init__(store, rank, size, options)

    distributed_c10d.ProcessGroupGloo = ProcessGroupGloo  # type: ignore[misc]
