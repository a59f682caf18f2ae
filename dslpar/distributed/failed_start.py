"""End a rank that cannot run: report why if rank 0 does not, and end the ranks that wait for it on other hosts."""

from __future__ import annotations

import sys
import time
from collections.abc import MutableMapping

from dslpar.core.visible import visible_lines
from dslpar.distributed import bootstrap, rendezvous
from dslpar.distributed.distributed_env import DistributedEnv
from dslpar.watchdog.rank_monitor import RankMonitor

_BEFORE_START_WAIT_S = 10
"""Seconds that a rank above 0 that cannot run waits for the launcher to end it, before it reports the reason."""
_AFTER_START_WAIT_S = 3
"""The wait once all ranks have started. It is short: on another host, no launcher may end this rank."""


def end_before_start(
    dist_env: DistributedEnv, environ: MutableMapping[str, str], rank_monitor: RankMonitor, findings: str
) -> None:
    """Report why this rank cannot run, unless rank 0 reports it; end the ranks that wait for it elsewhere."""
    began = time.monotonic()
    met = rendezvous.announce_failure(dist_env, environ, rank_monitor)
    if dist_env.rank:
        if not met:  # rank 0 usually reports the same, and the launcher ends this rank
            time.sleep(max(0, began + _BEFORE_START_WAIT_S - time.monotonic()))
        sys.stderr.write(visible_lines(f"{rank_monitor.location} cannot run:\n{findings}"))
    if met:
        rank_monitor.mark_failed("cannot run", findings or "what it has said above\n")
        time.sleep(_AFTER_START_WAIT_S)  # until the guard has passed it on and ends this rank, too


def end_after_rank_0(dist_env: DistributedEnv, rank_monitor: RankMonitor) -> int:
    """Return the exit status for an error that every rank has and rank 0 reports.

    A launcher ends all ranks when the first one ends, so rank 0 must end first, or its report may be lost.
    """
    bootstrap.teardown_distributed(together=False)
    if dist_env.rank:
        rank_monitor.wait_for_rank_0(_AFTER_START_WAIT_S)
    return 1
