"""How a rank ends that cannot run: it says why if rank 0 does not, and ends the ranks that wait for it elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import MutableMapping

from dslpar.core.visible import visible_lines
from dslpar.distributed import bootstrap, rendezvous
from dslpar.distributed.distributed_env import DistributedEnv
from dslpar.watchdog.rank_monitor import RankMonitor

_BEFORE_START_WAIT_S = 10
"""How long a rank other than 0 that cannot run waits to be ended by the launcher, before it says why itself."""
_AFTER_START_WAIT_S = 3
"""The same once all ranks have started, so that rank 0 is not late: on another host nobody may end this one."""


def end_before_start(
    dist_env: DistributedEnv, environ: MutableMapping[str, str], rank_monitor: RankMonitor, findings: str
) -> None:
    """Say why this rank cannot run, if rank 0 does not say the same, and end the ranks that wait for it elsewhere."""
    began = time.monotonic()
    met = rendezvous.announce_failure(dist_env, environ, rank_monitor)
    if dist_env.rank:
        if not met:  # rank 0 most often says the same, and the launcher ends this one
            time.sleep(max(0, began + _BEFORE_START_WAIT_S - time.monotonic()))
        sys.stderr.write(visible_lines(f"{rank_monitor.location} cannot run:\n{findings}"))
    if met:
        rank_monitor.mark_failed("cannot run", findings or "what it has said above\n")
        time.sleep(_AFTER_START_WAIT_S)  # until the guard has passed it on, and ends this rank as well


def end_after_rank_0(dist_env: DistributedEnv, rank_monitor: RankMonitor) -> int:
    """Return the exit status of an error that every rank has, and rank 0 reports.

    When the first rank ends, a launcher ends the others: rank 0 must come first, or its report may be lost.
    """
    bootstrap.teardown_distributed(together=False)
    if dist_env.rank:
        rank_monitor.wait_for_rank_0(_AFTER_START_WAIT_S)
    return 1
