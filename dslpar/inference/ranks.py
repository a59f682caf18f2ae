"""Run a command that uses a trained model on all its ranks: start them, check that they agree, run, end together.

    status = run_on_ranks(lambda world_size: open_run(path, world_size), act, request)

A single process without a launcher creates no process group. Under a launcher the ranks create their process groups as
for training. If one rank ends early, all end.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import torch

from dslpar.distributed import bootstrap, symmetric_memory
from dslpar.distributed.groups import Groups
from dslpar.distributed.rank_session import RankSession
from dslpar.inference.trained import Trained
from dslpar.inference.weights import verify
from dslpar.reporting import logging

Open = Callable[[int], Trained]
"""Function that opens the trained run; its argument is the world size."""
Act = Callable[[Trained, Groups, torch.device], None]
"""Function that uses the trained run; all ranks call it together."""


def run_on_ranks(open_trained: Open, act: Act, request: str) -> int:
    """Open a trained run on these ranks and call `act`; print findings, and return the exit status.

    `request`: text of the command's arguments, which must be equal on all ranks.
    """
    with RankSession(os.environ) as rank:
        trained = rank.prepare(lambda dist_env: open_trained(dist_env.world_size))
        rank.config = trained.config
        with logging.prints_to_log(None):  # DeepSpeed's prints do not belong in the output
            rank.meet(trained.job)
            rank.agree(trained.job, {"command line": request, "checkpoint": repr(trained.checkpoint)})
            groups = Groups(trained.job.mesh)
            verify(trained.checkpoint, groups.axis("pipe", "data", "tensor"))
        device = bootstrap.current_device()
        if trained.job.mesh.tensor.symmetric_memory:
            symmetric_memory.require(groups, device)
        act(trained, groups, device)
    return rank.status
