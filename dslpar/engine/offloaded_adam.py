"""Adam of an offloaded optimizer: DeepSpeedCPUAdam where its op is there or can be built, torch's own elsewhere.

    choose_adam(config, job, groups, module)     # all ranks together, on DeepSpeed's dict

The op is C++ in vector instructions, which DeepSpeed brings as source: a host compiles it at its first start, in about
a minute. No linter can know whether that works, so ranks see when they start. They take it together or not at all:
it rounds otherwise than torch. `optimizer.type` 'DeepSpeedCPUAdam' or 'torch.optim.AdamW' leaves no choice.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from torch import nn

from dslpar.distributed import collectives
from dslpar.distributed.groups import Groups
from dslpar.layout.resolve import Job, offloads

log = logging.getLogger("dslpar")


def choose_adam(config: dict[str, Any], job: Job, groups: Groups, module: nn.Module) -> None:
    """Have DeepSpeed's dict name DeepSpeedCPUAdam in the place of torch's Adam, where every rank can take it.

    What a program's own `deepspeed` section says of it stays. All ranks must call it together.
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
    """Return why this rank does not ask for the op; empty: it does."""
    if not _computes_on_device():
        return "the model computes on the CPU too, where a start does not wait for a compiler"
    if params.get("amsgrad"):
        return "it has no amsgrad"
    if getattr(module, "get_tied_weights_and_groups", list)():
        return "it rounds the end of a tensor otherwise than the rest, and copies of tied weights would drift apart"
    return ""


def _computes_on_device() -> bool:
    return bool(get_accelerator().device_name() != "cpu")


def _load_error() -> str:
    """Load the op, which may compile it, and return why that failed; empty: it is there."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    try:
        DeepSpeedCPUAdam([torch.zeros(1)])
    except (RuntimeError, OSError) as error:  # its constructor makes a RuntimeError of whatever stopped the compiler
        return f"its op does not load: {_first_line(error.__cause__ or error)}"
    return ""


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
