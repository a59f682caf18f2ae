"""ColossalAI's questions about a rank: is it the first of its replicas, is there a pipeline, ..."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from dslpar.compat.context import ParallelMode, global_context
from dslpar.distributed import collectives


def is_dp_rank_0() -> bool:
    """Return whether this rank is in the first replica."""
    return global_context.is_first_rank(ParallelMode.DATA)


def is_tp_rank_0() -> bool:
    """Return whether this rank is the first of its tensor group."""
    return global_context.is_first_rank(ParallelMode.TENSOR)


def is_no_pp_or_last_stage() -> bool:
    """Return whether this rank has the model's output."""
    return global_context.is_last_rank(ParallelMode.PIPELINE)


def is_using_ddp() -> bool:
    """Return whether there are several replicas."""
    return global_context.data_parallel_size > 1


def is_using_pp() -> bool:
    """Return whether there is a pipeline."""
    return global_context.pipeline_parallel_size > 1


def is_using_sequence() -> bool:
    """Return whether tensor ranks split sequences (mode 'sequence')."""
    return global_context.is_initialized(ParallelMode.SEQUENCE)


def print_rank_0(msg: object, logger: Any = None) -> None:
    """Print, or log, on rank 0 only."""
    if global_context.get_global_rank() == 0:
        print(msg, flush=True) if logger is None else logger.info(msg)


def sync_model_param(model: nn.Module, parallel_mode: ParallelMode) -> None:
    """Give all ranks of this rank's group the weights of its first rank."""
    axis = global_context.run.groups.axis(*parallel_mode.axes)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(collectives.broadcast(p, axis))
