"""ColossalAI's `colossalai.utils`."""

from __future__ import annotations

from dslpar.compat.checkpointing import load_checkpoint, save_checkpoint
from dslpar.compat.data_loader import DataParallelSampler, get_dataloader
from dslpar.compat.device import (
    colo_set_process_memory_fraction,
    conditional_context,
    empty_cache,
    ensure_path_exists,
    free_port,
    set_to_cuda,
)
from dslpar.compat.engine import current_device as get_current_device
from dslpar.compat.hooks import report_memory_usage
from dslpar.compat.missing import names_of
from dslpar.compat.ranks import (
    is_dp_rank_0,
    is_no_pp_or_last_stage,
    is_tp_rank_0,
    is_using_ddp,
    is_using_pp,
    is_using_sequence,
    print_rank_0,
    sync_model_param,
)
from dslpar.compat.timers import MultiTimer, Timer, synchronize

__all__ = [
    "DataParallelSampler", "MultiTimer", "Timer", "colo_set_process_memory_fraction", "conditional_context",
    "empty_cache", "ensure_path_exists", "free_port", "get_current_device", "get_dataloader", "is_dp_rank_0",
    "is_no_pp_or_last_stage", "is_tp_rank_0", "is_using_ddp", "is_using_pp", "is_using_sequence", "load_checkpoint",
    "print_rank_0", "report_memory_usage", "save_checkpoint", "set_to_cuda", "sync_model_param", "synchronize",
]  # fmt: skip

__path__: list[str] = []
__getattr__ = names_of(__name__)
