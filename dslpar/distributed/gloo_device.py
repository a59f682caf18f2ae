"""Make gloo cheap where many ranks share few cores: one device per process, and threads that do not preempt each other.

    share_device()                   # before init_process_group
    dist.new_group([0, 1])           # uses the device that the world has opened, where torch opens one a group
    use_batch_scheduling()             # ranks on CPUs: before init_process_group, whose threads inherit it

A device has a thread that looks after its sockets, and wakes a hundred times a second though nothing was sent. A rank
is in some ten to fifty groups, and all ranks of a host wake for each: of attention over 32 ranks on 2 cores that took
six of seven parts of the time, over 64 all but one of seventy. Sockets are each pair's own as before, and so are the
threads of a group that run its collectives. Groups that torch makes without `init_process_group` and `new_group`, as
its rpc does, have devices of their own.

A thread that sends holds the lock of its pair of ranks, and wakes the receiver: under Linux's usual policy the receiver
takes the core at once. Until the sender has it again, the device's thread asks the socket, finds the lock taken, and
asks again, since there is still something to read. Under SCHED_BATCH a thread that wakes waits for the end of a slice:
eight ranks on two cores need a third of the CPU time for a small all-reduce (`python -m benchmarks gloo_scheduling`).
"""

from __future__ import annotations

import contextlib
import os
from typing import Any

from torch.distributed import distributed_c10d

_devices: dict[tuple[int, str | None, str | None], list[Any]] = {}
"""By process, since threads do not live on in a fork, and by what torch opens them by."""


def use_batch_scheduling() -> None:
    """Put this thread, and those that it starts later, under SCHED_BATCH: they preempt nobody when they wake.

    On Linux alone. It needs no privilege; where it is refused, nothing changes.
    """
    if not hasattr(os, "SCHED_BATCH"):
        return
    with contextlib.suppress(OSError):  # a container may forbid either call
        if os.sched_getscheduler(0) == os.SCHED_OTHER:
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def share_device() -> None:
    """Have groups that torch makes over gloo from now on use one device; it may be said again."""
    torchs: Any = getattr(distributed_c10d, "ProcessGroupGloo", None)
    # A build without gloo has none, and a torch without `options` tells nobody its devices.
    if torchs is None or not hasattr(torchs, "options") or getattr(torchs, "shares_device", False):
        return

    class AsTorchs(type(torchs)):  # type: ignore[misc]
        """torch asks whether a group is of this class, also of one that was there before."""

        def __instancecheck__(cls, group: object) -> bool:
            return isinstance(group, torchs) if cls is ProcessGroupGloo else super().__instancecheck__(group)

    class ProcessGroupGloo(torchs, metaclass=AsTorchs):  # type: ignore[misc]
        """torch's, on the device of the first one of this process."""

        shares_device = True

        def __init__(self, store: Any, rank: int, size: int, *args: Any, **kwargs: Any) -> None:
            key = os.getpid(), os.environ.get("GLOO_SOCKET_IFNAME"), os.environ.get("TORCH_GLOO_LAZY_INIT")
            devices = _devices.get(key)
            if devices is not None and not args and kwargs.keys() <= {"timeout"}:
                options = torchs._Options()
                options._devices, options._threads = devices, 2 * len(devices)  # as many as torch's own
                if "timeout" in kwargs:
                    options._timeout = kwargs["timeout"]
                super().__init__(store, rank, size, options)
                return
            super().__init__(store, rank, size, *args, **kwargs)
            _devices.setdefault(key, self.options._devices)

    distributed_c10d.ProcessGroupGloo = ProcessGroupGloo  # type: ignore[misc]
