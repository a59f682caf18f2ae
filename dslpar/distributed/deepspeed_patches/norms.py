"""Gradient norm in DeepSpeed: on every rank of a replica, at every ZeRO stage, read by the host once per step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dslpar.distributed import collectives
from dslpar.distributed.collectives import Axis

if TYPE_CHECKING:
    from deepspeed.runtime.engine import DeepSpeedEngine


ReadNorms = Callable[[Sequence[Tensor]], list[Tensor]]
"""Copies scalars to the host, with a single wait for the device."""


def reduce_norms_of_all_groups(ds_engine: DeepSpeedEngine, model_axis: Axis) -> None:
    """M7. Have every rank of a replica (`model_axis`) reduce equally many norms, with empty groups for missing ones.

    ZeRO 1 reduces the norm of each parameter group separately over the replica. If a stage has fewer parameter groups
    than another, such as a stage of matrices only, the other stages hang.
    """
    zero = ds_engine.optimizer
    if model_axis.size == 1 or not hasattr(zero, "scaled_global_norm") or not hasattr(zero, "params_in_partition"):
        return
    own = len(zero.bit16_groups)
    most = int(collectives.all_reduce(torch.tensor(own, device=ds_engine.device), model_axis, "max").item())
    if most == own:
        return
    scaled_global_norm = zero.scaled_global_norm

    # DeepSpeed's step loops over the same lists, so empty groups may exist only while norms are computed.
    def with_empty_groups(**kwargs: object) -> object:
        for group in range(own, most):
            zero.bit16_groups.append([])
            zero.params_in_partition.append([])
            zero.averaged_gradients[group] = []
        try:
            return scaled_global_norm(**kwargs)
        finally:
            del zero.bit16_groups[own:], zero.params_in_partition[own:]
            for group in range(own, most):
                del zero.averaged_gradients[group]

    zero.scaled_global_norm = with_empty_groups


def compute_norm_without_zero(
    ds_engine: DeepSpeedEngine, model_axis: Axis, expert_axis: Axis | None, read: ReadNorms
) -> None:
    """M11. Compute the gradient norm over one replica (`model_axis`) in fp32 without ZeRO; DeepSpeed's is None.

    The norm is computed when `_take_model_step` begins: after gradients are averaged over data, before they are
    clipped. A step whose gradient is not finite is skipped, as in ZeRO, so that results do not depend on the ZeRO
    stage. The same norm clips the gradients, whereas DeepSpeed would reduce it again.
    """
    take_model_step = ds_engine._take_model_step

    def clip() -> None:
        coefficient = ds_engine.gradient_clipping() / (ds_engine._global_grad_norm + 1e-6)  # as in torch and ZeRO
        if coefficient < 1:
            torch._foreach_mul_([p.grad for p in ds_engine.module.parameters() if p.grad is not None], coefficient)

    def with_norm(lr_kwargs: object) -> None:
        (square,) = read([owned_square_norm(ds_engine.module, model_axis, expert_axis)])
        ds_engine._global_grad_norm = math.sqrt(square)
        ds_engine.optimizer.overflow = not math.isfinite(ds_engine._global_grad_norm)  # read by _take_model_step
        with _no_step(ds_engine.optimizer) if ds_engine.optimizer.overflow else nullcontext():
            take_model_step(lr_kwargs)

    ds_engine._take_model_step, ds_engine.clip_fp32_gradients = with_norm, clip


@contextmanager
def _no_step(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Disable the optimizer's step within the context."""
    step = optimizer.step
    optimizer.step = lambda *_: None  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        optimizer.step = step  # type: ignore[method-assign]


def owned_square_norm(module: nn.Module, model_axis: Axis, expert_axis: Axis | None = None) -> Tensor:
    """Return the squared 2-norm of a replica's gradients; the rank that owns an element counts it, once.

    `p.tensor_model_parallel` marks the parameters that this rank owns. `expert_axis` has the data ranks that hold
    different experts (marked `p.allreduce = False`). The sum is in float64, so that the order of summation has no
    visible effect.
    """
    device = next(module.parameters()).device
    owned: list[Any] = [p for p in module.parameters() if p.grad is not None and p.tensor_model_parallel]  # type: ignore[attr-defined]
    experts = [p.grad for p in owned if not getattr(p, "allreduce", True)]
    total = _square_norm([p.grad for p in owned if getattr(p, "allreduce", True)], device)
    if expert_axis is not None:  # also on a stage without experts, whose ranks of the axis agree
        total = total + collectives.all_reduce(_square_norm(experts, device), expert_axis)
    return collectives.all_reduce(total, model_axis)


def _square_norm(gradients: Sequence[Tensor], device: torch.device) -> Tensor:
    squares = [torch.linalg.vector_norm(grad, dtype=torch.float64).square() for grad in gradients]
    return torch.stack(squares).sum() if squares else torch.zeros((), dtype=torch.float64, device=device)


def read_norms_once(ds_engine: DeepSpeedEngine, data_axis: Axis, model_axis: Axis, read: ReadNorms) -> None:
    """M12. Have ZeRO read its gradient norms on the host in one call of `read`, and detect overflows from them.

    ZeRO scans all gradients for non-finite values, waits for the result, computes the norms, and waits again for each
    norm that it compares. On an accelerator, each wait leaves the device idle. With the optimizer on the CPU, ZeRO also
    reads one norm per parameter. The scan is not needed: a non-finite gradient has a non-finite norm, and ZeRO skips a
    step for that, too, wherever it checks for overflows (in fp16, in fp32, and in bf16 with `check_grad_overflow`). The
    norms here also check the few small gradients that another rank of the replica counts.
    """
    zero = ds_engine.optimizer
    if hasattr(zero, "scaled_global_norm"):  # ZeRO 1 and 2
        axis = replace(data_axis, group=zero.dp_process_group)
        zero.get_grad_norm_direct = lambda gradients, params, norm_type=2: _norm_of_parts(zero, axis, gradients, params)
        scaled_global_norm = zero.scaled_global_norm
        zero.scaled_global_norm = lambda **kwargs: read([scaled_global_norm(**kwargs)])[0]
        # The norm of a group of experts is complete: it is summed over all data ranks, whose shards are all different.
        zero._average_expert_grad_norms = lambda norms: None
    elif hasattr(zero, "_get_norm_groups"):  # ZeRO 3
        axes = replace(data_axis, group=zero.dp_process_group), model_axis
        zero.get_grad_norm_direct = lambda gradients, params, norm_type=2: _norm_of_shards(gradients, params, axes)
        norm_groups = zero._get_norm_groups
        zero._get_norm_groups = lambda: read(norm_groups())
    else:
        return
    zero.has_overflow = lambda *args, **kwargs: False
    if getattr(zero, "cpu_offload", False) or getattr(zero, "offload_optimizer", False):
        zero.update_offload_overflow_tracker = lambda grad: None
        _sum_norms_on_device(zero, ds_engine.device)


_COUNTED = SimpleNamespace(model_parallel=True)
"""Placeholder for a parameter that this rank counts."""


def _norm_of_parts(zero: Any, axis: Axis, gradients: Iterable[Tensor], params: Iterable[Any]) -> Tensor:
    """Return ZeRO 1 and 2's norm of a group, bit-identical to DeepSpeed's, without its kernels per parameter."""
    # Padding may follow the gradients of DeepSpeed's own reduction.
    total = _sum_of_squares(gradients, params, zero.model_parallel_rank == 0, zero.device, strict=False).float()
    total = collectives.all_reduce(total, axis)
    zero._model_parallel_all_reduce(tensor=total, op=torch.distributed.ReduceOp.SUM)
    norm = total.sqrt()
    # -1 is DeepSpeed's mark for a non-finite norm. DeepSpeed copies it from the host to the device, which blocks.
    return norm.masked_fill(~torch.isfinite(norm), -1.0)


def _norm_of_shards(gradients: Iterable[Tensor], params: Iterable[Any], axes: Sequence[Axis]) -> Tensor:
    """Return ZeRO 3's norm of a group, in float64 as in DeepSpeed, without DeepSpeed's blocking copy to the device.

    `axes`: the axis of the ranks with the other shards, and the axis of a replica.
    """
    gradients = list(gradients)
    total = _sum_of_squares(gradients, params, axes[-1].index == 0, gradients[0].device, strict=True)
    for axis in axes:
        total = collectives.all_reduce(total, axis)
    return total.sqrt()


def _sum_of_squares(
    gradients: Iterable[Tensor], params: Iterable[Any], counts_copies: bool, device: torch.device, *, strict: bool
) -> Tensor:
    """Return the sum of squares of the gradients that this rank counts, in float64; nan if a gradient is not finite.

    The check for non-finite values includes gradients that another rank of the replica counts. That rank has the same
    gradients, but if a kernel sums in no fixed order, fp16 may overflow on only one of the ranks.
    """
    from deepspeed.runtime.utils import is_model_parallel_parameter

    counted, copies = list[Tensor](), list[Tensor]()
    own = (gradient for gradient in gradients if not getattr(gradient, "_zero_padding", False))
    for gradient, p in zip(own, params, strict=strict):
        is_counted = is_model_parallel_parameter(p) or counts_copies
        (copies if getattr(p, "ds_pipe_replicated", False) or not is_counted else counted).append(gradient)
    total = torch.zeros((), dtype=torch.float64, device=device)
    if counted:
        total = _norms(counted).square().sum()
    return total + (_norms(copies) * 0).sum() if copies else total


def _norms(tensors: list[Tensor]) -> Tensor:
    """Return the norm of each tensor in float64, with few kernels on an accelerator."""
    norms = torch._foreach_norm(tensors, 2, dtype=torch.float64)
    return torch.stack(norms)


def _sum_norms_on_device(zero: Any, device: torch.device) -> None:
    """Sum an offloaded optimizer's gradient norms, one per parameter, on the device where they were computed.

    DeepSpeed reads each norm and sums the squares in float64 on the host. The norm of a norm is the norm itself, so
    here `get_grad_norm_direct` takes the norms in place of gradients. It also uses float64, so that the order of the
    sum has no visible effect in fp32.
    """
    complete = zero.complete_grad_norm_calculation_for_cpu_offload
    nothing = torch.zeros((), dtype=torch.float64, device=device)

    def without_reads(params: Sequence[Any]) -> object:
        norms = [zero.norm_for_param_grads.get(zero.get_param_id(p)) for p in params]
        if None in norms and not getattr(zero, "ignore_unused_parameters", True):
            return complete(params)  # which reports the error
        # A rank may have no part of a group. Its zero must be on the device, unlike DeepSpeed's own.
        return zero.get_grad_norm_direct(
            [nothing if norm is None else norm for norm in norms] or [nothing], params or [_COUNTED]
        )

    zero.complete_grad_norm_calculation_for_cpu_offload = without_reads
