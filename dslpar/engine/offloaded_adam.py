"""Choose Adam for an offloaded optimizer: DeepSpeedCPUAdam if its op is built or can be, torch's Adam otherwise.

    choose_adam(config, job, groups, module)     # all ranks together, on DeepSpeed's dict

DeepSpeed ships the op as C++ source with vector instructions. A host compiles it at its first start, in about a minute.
No linter can know whether that works, so ranks try at startup. All ranks use the op or none does, because it rounds
differently from torch. `optimizer.type` 'DeepSpeedCPUAdam' or 'torch.optim.AdamW' fixes the choice.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.ops.adam import DeepSpeedCPUAdam
from torch import nn

from dslpar.distributed import collectives
from dslpar.distributed.groups import Groups
from dslpar.layout.resolve import Job, offloads

log = logging.getLogger("dslpar")


def choose_adam(config: dict[str, Any], job: Job, groups: Groups, module: nn.Module) -> None:
    """Replace torch's Adam with DeepSpeedCPUAdam in DeepSpeed's dict if every rank can use it.

    A `torch_adam` key in the config's own `deepspeed` section is kept. All ranks must call it together.
    """
    params = config.get("optimizer", {}).get("params", {})
    own = job.spec.deepspeed.get("optimizer", {}).get("params", {})
    is_offloaded = job.spec.zero.stage and offloads(job.spec, "optimizer")
    if not is_offloaded or "torch_adam" not in params or "torch_adam" in own:
        return
    reason = _first_of_all_ranks(_unfit(params, module), groups)
    reason = reason or _first_of_all_ranks(_load_error(), groups)
    if reason:
        log.info("the offloaded optimizer is torch's Adam, not DeepSpeedCPUAdam: %s", reason)
        return
    log.info("the offloaded optimizer is DeepSpeedCPUAdam")
    for name in ("torch_adam", "fused"):
        params.pop(name, None)


def _first_of_all_ranks(reason: str, groups: Groups) -> str:
    return next(filter(None, collectives.gather_objects(reason, groups.axis("pipe", "data", "tensor"))), "")


def _unfit(params: dict[str, Any], module: nn.Module) -> str:
    """Return the reason why this rank must not use DeepSpeedCPUAdam, or "" if it may."""
    if not _computes_on_device():
        return "the model computes on the CPU too, where a start does not wait for a compiler"
    if params.get("amsgrad"):
        return "it has no amsgrad"
    if getattr(module, "get_tied_weights_and_groups", list)():
        return "it rounds the end of a tensor differently from the rest, so copies of tied weights would drift apart"
    return ""


def _computes_on_device() -> bool:
    return bool(get_accelerator().device_name() != "cpu")


def _load_error() -> str:
    """Load the op, which may compile it; return why that failed, or "" if it loaded."""
    try:
        DeepSpeedCPUAdam([torch.zeros(1)])
    except (RuntimeError, OSError) as error:  # its constructor wraps any compiler failure in a RuntimeError
        return f"its op does not load: {_first_line(error.__cause__ or error)}"
    return ""


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
