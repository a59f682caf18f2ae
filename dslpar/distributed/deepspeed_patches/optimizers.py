"""Optimizers in DeepSpeed: the choice of the ZeRO optimizer, and its state."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from dslpar.distributed.deepspeed_patches.replacement import replaced

if TYPE_CHECKING:
    from deepspeed.runtime.engine import DeepSpeedEngine


@contextmanager
def shard_gradients_of_bf16() -> Iterator[None]:
    """M6. Give ZeRO 1 in bf16 with fp32 accumulation the optimizer that fp16 and ZeRO 2 get.

    DeepSpeed chooses BF16_Optimizer, which all-reduces whole gradients (3 (N-1)/N parameters per step, where 2 (N-1)/N
    suffice), and raises "stack expects a non-empty TensorList" on a rank that owns no parameter. Other engines in the
    process keep DeepSpeed's choice.
    """
    from deepspeed.runtime.engine import BFLOAT16, ZERO_OPTIMIZATION, DeepSpeedEngine

    original = DeepSpeedEngine._do_optimizer_sanity_check

    def patched(self: DeepSpeedEngine, basic_optimizer: object) -> object:
        chosen = original(self, basic_optimizer)
        return ZERO_OPTIMIZATION if chosen == BFLOAT16 and self.zero_optimization() else chosen

    with replaced(DeepSpeedEngine, "_do_optimizer_sanity_check", patched):
        yield


def drop_overflowed_gradients(ds_engine: DeepSpeedEngine) -> None:
    """M8. Reset the fp32 gradient buffers of an offloaded optimizer when a step overflows.

    With the optimizer on the CPU, ZeRO 1 and 2 accumulate half-precision gradients in these buffers and do not reset
    them after an overflow. The buffers then stay infinite, so that every later step is skipped, too.
    """
    zero = ds_engine.optimizer
    if not getattr(zero, "cpu_offload", False) or not hasattr(zero, "reset_cpu_buffers"):
        return
    reset = zero.reset_cpu_buffers

    def reset_all() -> None:
        reset()
        zero.averaged_gradients = dict.fromkeys(zero.averaged_gradients)

    zero.reset_cpu_buffers = reset_all


def without_eager_state(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """M10. Return an Adagrad whose state is made at its first step; return other optimizers unchanged.

    The state of torch's Adagrad exists from the beginning, so ZeRO recreates the optimizer over its shards. The new one
    has a single group of default settings, which the LR scheduler does not know. ZeRO leaves the returned optimizer,
    with its original groups, alone.
    """
    return _LazyAdagrad(optimizer) if isinstance(optimizer, torch.optim.Adagrad) else optimizer


class _LazyAdagrad(torch.optim.Optimizer):
    """torch's Adagrad, but not an instance of its class, with state that is made at the first step."""

    step = torch.optim.Adagrad.step

    def __init__(self, eager: torch.optim.Adagrad) -> None:
        super().__init__(eager.param_groups, eager.defaults)

    def _init_group(self, group: dict[str, Any], *lists: list[Any]) -> tuple[bool, bool]:
        for p in group["params"]:
            if p.grad is not None and not self.state[p]:
                step = torch.zeros((), device=p.device if group["fused"] else "cpu")
                self.state[p] = {"step": step, "sum": torch.full_like(p, group["initial_accumulator_value"])}
        flags: tuple[bool, bool] = torch.optim.Adagrad._init_group(self, group, *lists)  # type: ignore
        return flags


def sum_over_sequence(ds_engine: DeepSpeedEngine) -> None:
    """M21. Have ZeRO 3 sum gradients over DeepSpeed's sequence parallel ranks, and average them over data only.

    ZeRO 1 and 2 do so, and so does ZeRO 3 if it reduces in one buffer. If ZeRO 3 reduce-scatters, it averages over all
    ranks.
    """
    zero = ds_engine.optimizer
    ranks = getattr(zero, "sequence_parallel_size", 1)
    if ds_engine.zero_optimization_stage() != 3 or ranks == 1:
        return
    zero.sequence_parallel_size = 1  # the function below gives the divisor in both cases
    zero._gradient_averaging_world_size = lambda params, size: size // ranks


def correct_bias_exactly(ds_engine: DeepSpeedEngine) -> None:
    """M20. Make DeepSpeedCPUAdam's bias correction depend only on the step's number, so that a resume changes no bit.

    DeepSpeedCPUAdam multiplies the betas' powers in fp32 from step to step, but starts with `pow` after a resume. Here
    its own bias correction is off, and its arguments contain the correction instead, computed in float64:
    p -= lr / c1 * m / (sqrt(v) / c2 + eps) is p -= (lr c2 / c1) * m / (sqrt(v) + c2 eps). AdamW's decay is adjusted
    because the op multiplies it by lr, too.
    """
    optimizer: Any = ds_engine.basic_optimizer
    op = getattr(optimizer, "ds_opt_adam", None)
    if op is None:
        return

    def update(
        number: int, step: Any, lr: float, beta1: float, beta2: float, eps: float, decay: float, *rest: Any
    ) -> None:
        corrects, *tensors = rest
        # The betas as in the op: 1 - 0.999 in fp32 is off by 1e-5, and must be here, too.
        first, second = torch.tensor([beta1, beta2], dtype=torch.float32).tolist()
        c1, c2 = (1 - first ** int(step), math.sqrt(1 - second ** int(step))) if corrects else (1.0, 1.0)
        decay *= c1 / c2 if optimizer.adam_w_mode else 1.0
        op.adam_update(number, int(step), lr * c2 / c1, beta1, beta2, eps * c2, decay, False, *tensors)

    optimizer.ds_opt_adam = SimpleNamespace(
        adam_update=update, adam_rollback=op.adam_rollback, destroy_adam=op.destroy_adam
    )
