"""How ranks meet: torch's store, and the guards that connect through it before any process group waits.

store = meet(dist_env, environ, monitor)               # waits for no rank but rank 0
announce_failure(dist_env, environ, monitor)           # of a rank that cannot run: the others need not wait for it
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING

from dslpar.cluster.command import LOCALHOST
from dslpar.distributed.distributed_env import DistributedEnv
from dslpar.watchdog.rank_monitor import RankMonitor

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store


_GUARD_KEY = "dslpar/guard"
"""Key in torch.distributed's store: where rank 0's guard listens."""
_MET_KEY = "dslpar/met"
"""The number of ranks that have come so far."""
_ANNOUNCE_S = 10.0
"""How long a rank that cannot run tries to tell the others."""
_GUARDS_MEET_S = 4.0
"""In which a guard has connected to rank 0's, and ended its own rank where rank 0 has failed."""


def meet(
    dist_env: DistributedEnv,
    environ: Mapping[str, str],
    monitor: RankMonitor | None,
    timeout: timedelta | None = None,
) -> Store:
    """Join torch's store and connect the guards, without waiting for any rank but rank 0.

    torch's own rendezvous waits until all ranks are there, for half an hour: one that fails on its way would keep the
    others there, wherever no launcher ends them (on other hosts; under `srun` without --kill-on-bad-exit). So guards
    meet first, one by one, and torch's process group waits under their eyes.
    """
    import torch.distributed as dist

    serves = dist_env.rank == 0 and environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"  # torchrun's agent serves it
    store: Store = dist.TCPStore(  # type: ignore[attr-defined]
        *(dist_env.master_addr, dist_env.master_port, dist_env.world_size, serves),
        timeout=timeout or dist.distributed_c10d.default_pg_timeout,
        wait_for_workers=False,
        multi_tenant=True,
    )
    if monitor is not None:
        _connect_guards(dist_env, monitor, store)
    store.add(_MET_KEY, 1)
    return store


def announce_failure(dist_env: DistributedEnv, environ: Mapping[str, str], monitor: RankMonitor) -> bool:
    """Bring the guard of a rank that cannot run to the others' guards, unless a launcher ends all that wait for it.

    Rank 0 then waits a while for the others, since they meet at its host. Any other rank is ended meanwhile if rank 0
    has failed as well. Returns whether a mark that this rank leaves now ends the others.
    """
    ended_by_launcher = dist_env.local_size == dist_env.world_size and "SLURM_PROCID" not in environ
    if dist_env.world_size == 1 or ended_by_launcher:
        return False
    try:
        store = meet(dist_env, environ, monitor, timedelta(seconds=_ANNOUNCE_S))
    except RuntimeError:  # an error of torch's of the network: rank 0 is not there
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
    """Tell the other ranks' guards where rank 0's listens."""
    if dist_env.rank == 0:
        address = LOCALHOST if dist_env.is_one_host else dist_env.master_addr
        # Whoever reaches the port of torch's store may read all of it: a secret that ranks have already stays out.
        secret = "" if monitor.shares_secret else monitor.secret
        store.set(_GUARD_KEY, f"{address}:{monitor.guard_port()}:{secret}")
    else:
        monitor.page.hub = store.get(_GUARD_KEY).decode()
