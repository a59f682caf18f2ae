"""Rendezvous of ranks: join torch's store, and connect the guards through it before any process group waits.

store = meet(dist_env, environ, monitor)               # waits for no rank but rank 0
announce_failure(dist_env, environ, monitor)           # of a rank that cannot run: the others need not wait for it
"""

from __future__ import annotations

import errno
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING

from dslpar.cluster import network
from dslpar.cluster.command import LOCALHOST
from dslpar.core.catalog import finding
from dslpar.core.errors import DslparError, Finding
from dslpar.distributed.distributed_env import DistributedEnv
from dslpar.watchdog.rank_monitor import RankMonitor

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store


_GUARD_KEY = "dslpar/guard"
"""Key in torch.distributed's store for the address of rank 0's guard."""
_MET_KEY = "dslpar/met"
"""Key for the number of ranks that have joined so far."""
_ANNOUNCE_S = 10.0
"""Seconds that a rank that cannot run tries to inform the others."""
_GUARDS_MEET_S = 4.0
"""Seconds within which a guard connects to rank 0's guard, and ends its own rank if rank 0 has failed."""


def meet(
    dist_env: DistributedEnv,
    environ: Mapping[str, str],
    monitor: RankMonitor | None,
    timeout: timedelta | None = None,
) -> Store:
    """Join torch's store and connect the guards, without waiting for any rank but rank 0.

    torch's own rendezvous waits up to half an hour until all ranks are there. If a rank fails before its rendezvous,
    the other ranks keep waiting unless a launcher ends them (none does on other hosts, or under `srun` without
    --kill-on-bad-exit). So guards, each rank's watching process (dslpar/watchdog), connect first, one by one, and watch
    while torch's process group waits.

    Raises:
        DslparError: on rank 0, if another process listens at its port.
    """
    import torch.distributed as dist

    serves = dist_env.rank == 0 and environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"  # torchrun's agent serves it
    try:
        store: Store = dist.TCPStore(  # type: ignore[attr-defined]
            *(dist_env.master_addr, dist_env.master_port, dist_env.world_size, serves),
            timeout=timeout or dist.distributed_c10d.default_pg_timeout,
            wait_for_workers=False,
            multi_tenant=True,
        )
    except dist.DistNetworkError as error:
        if not (serves and errno.errorcode[errno.EADDRINUSE] in str(error)):
            raise
        raise DslparError([_port_taken(dist_env.master_port)]) from None
    if monitor is not None:
        _connect_guards(dist_env, monitor, store)
    store.add(_MET_KEY, 1)
    return store


def _port_taken(port: int) -> Finding:
    free = network.free_port()
    hint = f"deepspeed --master_port {free}, or MASTER_PORT={free} for other launchers; dslpar launch finds a free port"
    return finding("HST216", f"port {port} of this host is in use, perhaps by another job", hint)


def announce_failure(dist_env: DistributedEnv, environ: Mapping[str, str], monitor: RankMonitor) -> bool:
    """Connect the guard of a rank that cannot run to the others' guards, unless a launcher ends the waiting ranks.

    Rank 0 then waits a while for the other ranks, since they meet at its host. Any other rank ends in the meantime if
    rank 0 has failed, too. Returns True if the guards are connected, so that marking this rank as failed ends the
    others.
    """
    ended_by_launcher = dist_env.local_size == dist_env.world_size and "SLURM_PROCID" not in environ
    if dist_env.world_size == 1 or ended_by_launcher:
        return False
    try:
        store = meet(dist_env, environ, monitor, timedelta(seconds=_ANNOUNCE_S))
    except (RuntimeError, DslparError):  # torch's network error: rank 0 is not there; or its port is taken
        return False
    deadline = time.monotonic() + _ANNOUNCE_S
    while dist_env.rank == 0 and store.add(_MET_KEY, 0) < dist_env.world_size and time.monotonic() < deadline:
        time.sleep(0.05)
    deadline = time.monotonic() + (_GUARDS_MEET_S if dist_env.rank else _GUARDS_MEET_S / 4)
    while time.monotonic() < deadline:
        if monitor.page.ending:
            monitor.wait_for_end()
        time.sleep(0.02)
    return True


def _connect_guards(dist_env: DistributedEnv, monitor: RankMonitor, store: Store) -> None:
    """Publish the address of rank 0's guard, or read it on other ranks."""
    if dist_env.rank == 0:
        address = LOCALHOST if dist_env.is_one_host else dist_env.master_addr
        # Anyone who reaches the port of torch's store can read it all. A secret that ranks already share stays out.
        secret = "" if monitor.shares_secret else monitor.secret
        store.set(_GUARD_KEY, f"{address}:{monitor.guard_port()}:{secret}")
    else:
        monitor.page.hub = store.get(_GUARD_KEY).decode()
