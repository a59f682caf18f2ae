"""Cost of ranks on few cores under SCHED_BATCH: CPU time of small all-reduces, against Linux's default policy.

    python -m benchmarks gloo_scheduling

Eight ranks, forked anew for each run, all-reduce 64 numbers a hundred times. The ratio includes the start of the ranks.
`dslpar.distributed.gloo_threads` explains why it is below one. With a core per thread there is no gain.
"""

from __future__ import annotations

import resource
from collections.abc import Iterator
from unittest.mock import patch

import torch
import torch.distributed as dist

from benchmarks.measure import Costs, Ratio, in_turns, ratio
from dslpar.distributed import forked_ranks

TARGET = 0.8
RANKS, TIMES = 8, 100


def ratios() -> Iterator[Ratio]:
    """Yield one line."""
    torch.set_num_threads(1)
    name = f"{RANKS} ranks, {TIMES} all-reduces: SCHED_BATCH"
    yield ratio(name, [cpu for (cpu,) in in_turns(run, _usual)], TARGET)


def run() -> Costs:
    """Return the CPU seconds of all ranks."""
    before = _used_s()
    forked_ranks.run_on_ranks(RANKS, reduce)
    return (_used_s() - before,)


def _usual() -> Costs:
    with patch.object(forked_ranks, "use_batch_scheduling"):
        return run()


def reduce() -> None:
    """Run on each rank."""
    x = torch.ones(64)
    for _ in range(TIMES):
        dist.all_reduce(x)  # noqa: TID251  # what torch makes of it is measured


def _used_s() -> float:
    of_ranks = resource.getrusage(resource.RUSAGE_CHILDREN)
    return of_ranks.ru_utime + of_ranks.ru_stime
