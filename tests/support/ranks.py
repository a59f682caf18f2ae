"""Start ranks for a test: `on_ranks(4, fn, *args)` returns `fn`'s values by rank.

    def rank_sum(groups_of: int) -> int: ...
    assert on_ranks(2, rank_sum, 2) == [2, 2]

`dslpar.distributed.forked_ranks` forks them and sets their time limits. This module imports in advance what ranks need.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dslpar.distributed.forked_ranks import Init, RankError, run_on_ranks
from tests.support import warm

__all__ = ["RankError", "on_ranks"]

torch.set_num_threads(1)


def on_ranks(
    n: int,
    fn: Callable[..., Any],
    *args: Any,
    init: Init = "torch",
    idle_s: float = 60,
    cpu_s: float = 900,
    env: dict[str, str] | None = None,
) -> list[Any]:
    """Call `run_on_ranks` from a process that has imported what ranks need."""
    warm.import_deepspeed() if init == "deepspeed" else warm.import_torch()
    return run_on_ranks(n, fn, *args, init=init, idle_s=idle_s, cpu_s=cpu_s, env=env)
