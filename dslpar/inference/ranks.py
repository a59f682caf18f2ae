"""Start the ranks of a command that uses a trained model, check that they agree, run it, and end them.

    status = run_on_ranks(lambda world_size: open_run(path, world_size), act)

A single process without a launcher starts no process group. Under a launcher the ranks meet as in train.py, and if one
of them ends early, all end.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
from deepspeed.accelerator import get_accelerator

from dslpar.core.errors import DslparError
from dslpar.distributed import bootstrap, symmetric_memory
from dslpar.distributed.consistency import check_consistency
from dslpar.distributed.distributed_env import DistributedEnv
from dslpar.distributed.failed_start import end_after_rank_0, end_before_start
from dslpar.distributed.groups import Groups
from dslpar.inference.trained import Trained
from dslpar.inference.weights import verify
from dslpar.reporting import logging
from dslpar.watchdog.rank_monitor import RankMonitor

Open = Callable[[int], Trained]
"""Function that opens the run for a world size."""
Act = Callable[[Trained, Groups, torch.device], None]
"""Function that uses the run, on all ranks together."""


def run_on_ranks(open_trained: Open, act: Act, request: str) -> int:
    """Open a run on these ranks and call `act`; print findings, and return the exit status.

    `request`: text of the command's arguments, which must be equal on all ranks.
    """
    try:
        dist_env = bootstrap.read_distributed_env(os.environ)
    except DslparError as error:
        logging.print_findings(error.findings)
        return 1
    monitor = bootstrap.monitor_rank(dist_env, os.environ) if dist_env.world_size > 1 else None
    with logging.muted_unless_rank_0(dist_env.rank) as muted:
        try:
            trained = open_trained(dist_env.world_size)
        except DslparError as error:
            logging.print_findings(error.findings)
            trained = None
    if trained is None:
        if monitor is not None:
            end_before_start(dist_env, os.environ, monitor, muted.getvalue())
        return 1
    return _run(dist_env, monitor, trained, act, request)


def _run(dist_env: DistributedEnv, monitor: RankMonitor | None, trained: Trained, act: Act, request: str) -> int:
    try:
        with logging.prints_to_log(None):  # DeepSpeed's prints are not part of the output
            if monitor is not None:
                monitor.page.enter("starting")
                bootstrap.setup_distributed(dist_env, os.environ, monitor)
            groups = Groups(trained.job.mesh)
            world = groups.axis("pipe", "data", "tensor")
            check_consistency(trained.job, world, {"command line": request, "checkpoint": repr(trained.checkpoint)})
            verify(trained.checkpoint, world)
        device = _device()
        if trained.job.mesh.tensor.symmetric_memory:
            symmetric_memory.require(groups, device)
        act(trained, groups, device)
    except DslparError as error:  # every rank has the same findings
        if dist_env.rank == 0:
            logging.print_findings(error.findings, trained.config.sources)
        return 1 if monitor is None else end_after_rank_0(dist_env, monitor)
    if monitor is not None:
        bootstrap.teardown_distributed()
    return 0


def _device() -> torch.device:
    accelerator = get_accelerator()
    return torch.device("cpu" if accelerator.device_name() == "cpu" else accelerator.current_device_name())
