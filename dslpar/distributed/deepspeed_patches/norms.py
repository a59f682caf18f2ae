"""The gradient's norm: of every rank of a replica, at every stage of ZeRO, read by the host once a step."""

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
"""Copies scalars to the host, in one wait for the device."""


def reduce_norms_of_all_groups(ds_engine: DeepSpeedEngine, model_axis: Axis) -> None:
    """M7. Have every rank of a replica (`model_axis`) reduce as many norms: of parameter groups it lacks, empty ones.

    ZeRO 1 reduces the norm of each parameter group by itself over the replica: a stage with fewer groups, such as one
    of matrices alone, leaves the others waiting.
    """
    zero = ds_engine.optimizer
    if model_axis.size == 1 or not hasattr(zero, "scaled_global_norm") or not hasattr(zero, "params_in_partition"):
        return
    own = len(zero.bit16_groups)
    most = int(collectives.all_reduce(torch.tensor(own, device=ds_engine.device), model_axis, "max").item())
    if most == own:
        return
    scaled_global_norm = zero.scaled_global_norm

    # DeepSpeed's step loops over the same lists: empty groups may be there only while norms are computed.
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


def compute_norm_without_zero(ds_engine: DeepSpeedEngine, model_axis: Axis, read: ReadNorms) -> None:
    """M11. Compute the gradient norm where DeepSpeed's is None: without ZeRO in fp32, over one replica (`model_axis`).

    It is computed when `_take_model_step` begins: after gradients are averaged over data, before they are clipped. A
    step whose gradient is not finite is skipped there too, as ZeRO skips it: else the stage would change the run. The
    same norm clips the gradients, where DeepSpeed would reduce it once more.
    """
    take_model_step = ds_engine._take_model_step

    def clip() -> None:
        coefficient = ds_engine.gradient_clipping() / (ds_engine._global_grad_norm + 1e-6)  # as torch and ZeRO have it
        if coefficient < 1:
            torch._foreach_mul_([p.grad for p in ds_engine.module.parameters() if p.grad is not None], coefficient)

    def with_norm(lr_kwargs: object) -> None:
        (square,) = read([owned_square_norm(ds_engine.module, model_axis)])
        ds_engine._global_grad_norm = math.sqrt(square)
        ds_engine.optimizer.overflow = not math.isfinite(ds_engine._global_grad_norm)  # which _take_model_step reads
        with _no_step(ds_engine.optimizer) if ds_engine.optimizer.overflow else nullcontext():
            take_model_step(lr_kwargs)

    ds_engine._take_model_step, ds_engine.clip_fp32_gradients = with_norm, clip


@contextmanager
def _no_step(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Make the optimizer's step do nothing within the context."""
    step = optimizer.step
    optimizer.step = lambda *_: None  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        optimizer.step = step  # type: ignore[method-assign]


def owned_square_norm(module: nn.Module, model_axis: Axis) -> Tensor:
    """Return the squared 2-norm of all gradients of a replica, each element counted once, by the rank that owns it.

    `p.tensor_model_parallel` marks what this rank owns. In float64, so that the order of parts does not show.
    """
    owned = [p.grad for p in module.parameters() if p.grad is not None and p.tensor_model_parallel]  # type: ignore[attr-defined]
    device = next(module.parameters()).device
    squares = [torch.linalg.vector_norm(grad, dtype=torch.float64).square() for grad in owned]
    total = torch.stack(squares).sum() if squares else torch.zeros((), dtype=torch.float64, device=device)
    return collectives.all_reduce(total, model_axis)


def read_norms_once(ds_engine: DeepSpeedEngine, data_axis: Axis, model_axis: Axis, read: ReadNorms) -> None:
    """M12. Have ZeRO know its gradient's norms on the host by one call of `read`, and an overflow by them.

    It scans all gradients for what is not finite, waits for the answer, computes the norms, and waits for them each
    time it compares one: on an accelerator each wait leaves the device without work. With the optimizer on the CPU it
    also reads a norm for each parameter. A gradient that is not finite has no finite norm, and ZeRO skips a step for
    that as well wherever it looks for overflows: in fp16, in fp32, and in bf16 with `check_grad_overflow`. Copies that
    another rank of the replica counts, few and small, are looked at here.
    """
    zero = ds_engine.optimizer
    if hasattr(zero, "scaled_global_norm"):  # ZeRO 1 and 2
        axis = replace(data_axis, group=zero.dp_process_group)
        zero.get_grad_norm_direct = lambda gradients, params, norm_type=2: _norm_of_parts(zero, axis, gradients, params)
        scaled_global_norm = zero.scaled_global_norm
        zero.scaled_global_norm = lambda **kwargs: read([scaled_global_norm(**kwargs)])[0]
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
"""Stands for a parameter that this rank counts."""


def _norm_of_parts(zero: Any, axis: Axis, gradients: Iterable[Tensor], params: Iterable[Any]) -> Tensor:
    """Return ZeRO 1 and 2's norm of a group, to the bit as DeepSpeed's, which begins some kernels a parameter."""
    # Padding may follow the gradients of DeepSpeed's own reduction.
    total = _sum_of_squares(gradients, params, zero.model_parallel_rank == 0, zero.device, strict=False).float()
    total = collectives.all_reduce(total, axis)
    zero._model_parallel_all_reduce(tensor=total, op=torch.distributed.ReduceOp.SUM)
    norm = total.sqrt()
    # As DeepSpeed marks it, but without a constant that the host copies to the device, and waits for.
    return norm.masked_fill(~torch.isfinite(norm), -1.0)


def _norm_of_shards(gradients: Iterable[Tensor], params: Iterable[Any], axes: Sequence[Axis]) -> Tensor:
    """Return ZeRO 3's norm of a group, in float64 as DeepSpeed's, without the constant that it copies to the device.

    `axes`: of the ranks that have the other shards, and of a replica.
    """
    gradients = list(gradients)
    total = _sum_of_squares(gradients, params, axes[-1].index == 0, gradients[0].device, strict=True)
    for axis in axes:
        total = collectives.all_reduce(total, axis)
    return total.sqrt()


def _sum_of_squares(
    gradients: Iterable[Tensor], params: Iterable[Any], counts_copies: bool, device: torch.device, *, strict: bool
) -> Tensor:
    """Return the sum of squares of what this rank counts, in float64; nan where a gradient is not finite.

    That includes those that another rank of the replica counts: they are that rank's too, but where a kernel adds up in
    no fixed order, fp16 may overflow on one of them alone.
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
    """Return the norm of each tensor, in float64: on an accelerator by few kernels."""
    norms = torch._foreach_norm(tensors, 2, dtype=torch.float64)
    return torch.stack(norms)


def _sum_norms_on_device(zero: Any, device: torch.device) -> None:
    """Have the norms of an offloaded optimizer's gradients, one a parameter, add up where they were computed.

    DeepSpeed reads each one and adds them up in the host's float64. The norm of a norm is the norm, so here the
    function that adds up the others takes them too: in float64 as well, whose order of adding cannot show in fp32.
    """
    complete = zero.complete_grad_norm_calculation_for_cpu_offload
    nothing = torch.zeros((), dtype=torch.float64, device=device)

    def without_reads(params: Sequence[Any]) -> object:
        norms = [zero.norm_for_param_grads.get(zero.get_param_id(p)) for p in params]
        if None in norms and not getattr(zero, "ignore_unused_parameters", True):
            return complete(params)  # which says what is wrong
        # A rank may have no part of a group: the zero is on the device, DeepSpeed's own were not.
        return zero.get_grad_norm_direct(
            [nothing if norm is None else norm for norm in norms] or [nothing], params or [_COUNTED]
        )

    zero.complete_grad_norm_calculation_for_cpu_offload = without_reads
