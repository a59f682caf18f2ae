"""Reduce gloo's cost if many ranks share few cores: one device per process, and threads that do not preempt.

    share_device()                   # before init_process_group
    dist.new_group([0, 1])           # uses the device that the world has opened, where torch opens one a group
    use_batch_scheduling()             # ranks on CPUs: before init_process_group, whose threads inherit it

A gloo device has a thread that serves its sockets and wakes a hundred times a second even if nothing was sent. By
default torch opens one device per group. A rank is in some ten to fifty groups, and all ranks of a host wake for each.
On 2 cores, these wake-ups took six sevenths of the time of attention over 32 ranks, and over 64 ranks all but one
seventieth. With a shared device, each pair of ranks still has its own sockets, and each group its own threads that run
collectives. Groups that torch makes without `init_process_group` and `new_group`, such as torch.distributed.rpc's, have
their own devices.

A sending thread holds the lock of its pair of ranks and wakes the receiver. Under Linux's usual policy the receiver
takes the core at once. Until the sender has the core again, the device's thread polls the socket, finds the lock taken,
and polls again, since there is still data to read. Under SCHED_BATCH a woken thread waits for the end of a time slice:
eight ranks on two cores need a third of the CPU time for a small all-reduce (`python -m benchmarks gloo_scheduling`).
"""

from __future__ import annotations

import contextlib
import os
from typing import Any

from torch.distributed import distributed_c10d

_devices: dict[tuple[int, str | None, str | None], list[Any]] = {}
"""Devices by process (threads do not survive a fork) and by the variables from which torch chooses them."""


def use_batch_scheduling() -> None:
    """Put this thread, and threads that it starts later, under SCHED_BATCH: they preempt no other when they wake.

    Linux only. It needs no privilege. If the system refuses it, nothing changes.
    """
    if not hasattr(os, "SCHED_BATCH"):
        return
    with contextlib.suppress(OSError):  # a container may forbid either call
        if os.sched_getscheduler(0) == os.SCHED_OTHER:
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def share_device() -> None:
    """Have gloo groups that torch makes from now on share one device. Repeated calls do nothing."""
    torchs: Any = getattr(distributed_c10d, "ProcessGroupGloo", None)
    # A torch build without gloo has no such class, and a torch without `options` does not expose its devices.
    if torchs is None or not hasattr(torchs, "options") or getattr(torchs, "shares_device", False):
        return

    class AsTorchs(type(torchs)):  # type: ignore[misc]
        """Makes isinstance checks in torch also accept groups that were made before this call."""

        def __instancecheck__(cls, group: object) -> bool:
            return isinstance(group, torchs) if cls is ProcessGroupGloo else super().__instancecheck__(group)

    class ProcessGroupGloo(torchs, metaclass=AsTorchs):  # type: ignore[misc]
        """torch's gloo group, on the device of this process's first group."""

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
