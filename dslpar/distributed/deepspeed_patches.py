"""Where DeepSpeed 0.19 does other than a layout-independent run needs, and how we mend it: all of it in this file.

Each mend has a number. Without it happens what stands under "symptom"; its test fails as soon as DeepSpeed no longer
does that, and the mend can then go (M9: when its test passes without the mend).

===  ==============================  =================================================  =========================
M    function                        symptom                                            test
===  ==============================  =================================================  =========================
1    `skip_shm_op`                   on a CPU, 30 s of compiling an op that ignores its  engine/test_engine.py
                                     group; issue #7625 asks for a way around it
2    `ignore_deprecated_names`       a FutureWarning a rank: collectives by old names   engine/test_engine.py
3    `allow_fp16_on_cpus`            fp16 is refused on CPUs where torch computes it    engine/test_precision.py
4    `disown_tied_copies`            without ZeRO, norms count tied weights twice       engine/test_engine.py
5    `tied_gradients`                ZeRO 1 in half precision: tied weights go apart    engine/test_precision.py
6    `shard_gradients_of_bf16`       ZeRO 1 in bf16 all-reduces whole gradients, and    engine/test_precision.py
                                     raises on a rank that owns no parameter
7    `reduce_norms_of_all_groups`    ZeRO 1 hangs where a stage has fewer groups        models/test_sequential.py
8    `drop_overflowed_gradients`     offloaded ZeRO 1 and 2: after one overflow every   engine/test_precision.py
                                     later step is skipped
9    `register_external_parameters`  ZeRO 3: another module's parameter is empty after    checkpoint/test_resume.py
                                     a checkpoint was loaded
10   `without_eager_state`           ZeRO makes Adagrad anew in one group of defaults   engine/test_optimizers.py
11   `compute_norm_without_zero`     without ZeRO in fp32 the gradient norm is None     engine/test_engine.py
12   `read_norms_once`               the host waits for the device five times a step,   engine/test_host_reads.py,
                                     with offload once a parameter, and begins kernels  engine/test_offload.py
                                     for each of a norm's gradients
14   `overlap_reduction`             ZeRO 1 and 2 reduce gradients while nothing else   engine/test_reduction.py
                                     is computed
15   `accumulate_without_copies`     ZeRO 1 in half precision copies each gradient in   engine/test_reduction.py
                                     fp32 before it adds it
16   `overlap_param_gather`          ZeRO 1 and 2 gather weights while nothing else is  engine/test_gather.py
                                     computed
17   `reduce_by_stages`              without ZeRO too, gradients of all of a rank's     engine/test_schedules.py
                                     stages are reduced after the last backward
18   `call_before_reduction`         a layer can sum its vectors' gradients over        engine/test_vector_reduction.py
                                     tensor ranks in each backward alone
19   `build_ops_alone`               after a start that was killed while it compiled    engine/test_offloaded_adam.py
                                     an op, every later one waits for ever
20   `correct_bias_exactly`          DeepSpeedCPUAdam: a run that goes on after a       engine/test_offloaded_adam.py
                                     checkpoint takes other bits
===  ==============================  =================================================  =========================

Tests are below tests/distributed, named test_m<number>_.... The issue is of github.com/deepspeedai/DeepSpeed; of the
other symptoms no upstream issue is known.
"""

from __future__ import annotations

import fcntl
import math
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dslpar.distributed import collectives
from dslpar.distributed.collectives import Axis
from dslpar.distributed.gradient_buffer import GradientBuffer
from dslpar.distributed.gradient_reduction import GradientReduction
from dslpar.distributed.parameter_gather import ParameterGather
from dslpar.distributed.stage_reduction import StageReduction

if TYPE_CHECKING:
    from deepspeed.runtime.engine import DeepSpeedEngine

ReadNorms = Callable[[Sequence[Tensor]], list[Tensor]]
"""Copies scalars to the host, in one wait for the device."""


def skip_shm_op() -> None:
    """M1. Keep DeepSpeed from compiling its shared-memory op on a CPU: 30 s, for an all-reduce that ignores its group.

    No environment variable turns it off. To set its entry of `deepspeed.ops.__compatible_ops__` would have every op
    probed first: 0.15 s and a run of the C compiler for each rank.
    """
    backend: Any = import_module("deepspeed.comm.torch")  # as an attribute of deepspeed.comm it is torch itself
    backend.build_shm_op = lambda: None


def ignore_deprecated_names() -> None:
    """M2. Silence the warnings of torch 2.13 about two collectives that DeepSpeed calls by their old names."""
    for name in ("all_gather_into_tensor", "reduce_scatter_tensor"):
        warnings.filterwarnings("ignore", f"`torch.distributed.{name}` is deprecated", FutureWarning)


def allow_fp16_on_cpus() -> None:
    """M3. Have DeepSpeed accept fp16 on every CPU where torch computes it, slowly or not: so it runs, and is tested.

    DeepSpeed accepts it only where oneDNN has fast instructions for it.
    """
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    if accelerator.device_name() == "cpu" and not accelerator.is_fp16_supported() and _cpu_computes(torch.float16):
        accelerator.is_fp16_supported = lambda: True


def _cpu_computes(dtype: torch.dtype) -> bool:
    """Return whether this torch has matrix products, norms and gradients of a dtype on a CPU."""
    x = torch.ones(2, 2, dtype=dtype, requires_grad=True)
    try:
        torch.autograd.grad(nn.functional.softmax(nn.functional.layer_norm(x @ x, (2,)), -1).sum(), x)
    except RuntimeError:  # '"addmm_impl_cpu_" not implemented for 'Half''
        return False
    return True


def disown_tied_copies(module: nn.Module) -> None:
    """M4. Mark the tied copies of a pipeline as owned by another stage, so that norms count each weight once.

    DeepSpeed marks them by `ds_pipe_replicated`, which it does not read without ZeRO. Call this after a PipelineModule
    is built, and before `deepspeed.initialize`.
    """
    for p in module.parameters():
        if getattr(p, "ds_pipe_replicated", False):
            p.tensor_model_parallel = False  # type: ignore[attr-defined]


def tied_gradients(weights: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """M5. Show DeepSpeed the accumulated gradients of tied weights: (weight, group) pairs, as it sums them over stages.

    A pipeline sums `.grad` of tied weights over their stages before gradients are averaged over data. Where ZeRO 1
    accumulates half-precision gradients in fp32, they are in `.grad_accum` by then and `.grad` is None: nothing would
    be summed, without an error. There, a stand-in shows the accumulated gradient as its `.grad`.
    """
    sums = [(getattr(weight, "grad_accum", None), weight, group) for weight, group in weights]
    return [(weight if summed is None else SimpleNamespace(grad=summed), group) for summed, weight, group in sums]


def shard_gradients_of_bf16() -> None:
    """M6. Give ZeRO 1 in bf16 with fp32 accumulation the optimizer that fp16 and ZeRO 2 get.

    DeepSpeed chooses BF16_Optimizer, which all-reduces whole gradients (3 (N-1)/N parameters a step, where 2 (N-1)/N
    do), and raises "stack expects a non-empty TensorList" on a rank that owns no parameter.
    """
    from deepspeed.runtime.engine import BFLOAT16, ZERO_OPTIMIZATION, DeepSpeedEngine

    original = DeepSpeedEngine._do_optimizer_sanity_check
    if getattr(original, "shards_bf16", False):
        return

    def patched(self: DeepSpeedEngine, basic_optimizer: object) -> object:
        chosen = original(self, basic_optimizer)
        return ZERO_OPTIMIZATION if chosen == BFLOAT16 and self.zero_optimization() else chosen

    patched.shards_bf16 = True  # type: ignore[attr-defined]
    DeepSpeedEngine._do_optimizer_sanity_check = patched


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


def drop_overflowed_gradients(ds_engine: DeepSpeedEngine) -> None:
    """M8. Reset the fp32 gradient buffers of an offloaded optimizer when a step overflows.

    With the optimizer on the CPU, ZeRO 1 and 2 accumulate half-precision gradients in these buffers, and leave them as
    they are after an overflow: infinite for ever, so that every later step is skipped too.
    """
    zero = ds_engine.optimizer
    if not getattr(zero, "cpu_offload", False) or not hasattr(zero, "reset_cpu_buffers"):
        return
    reset = zero.reset_cpu_buffers

    def reset_all() -> None:
        reset()
        zero.averaged_gradients = dict.fromkeys(zero.averaged_gradients)

    zero.reset_cpu_buffers = reset_all


def register_external_parameters(external: Iterable[tuple[nn.Module, nn.Parameter]]) -> None:
    """M9. Tell ZeRO 3 of each (module, parameter of another module that its forward reads), once the engine is built.

    ZeRO 3 finds such a parameter out when it is first empty in that forward. After a checkpoint was loaded, small
    parameters are not empty: they are never registered, are emptied all the same, and activation checkpointing then
    reads nothing.
    """
    from deepspeed.runtime.zero.partition_parameters import register_external_parameter

    for module, p in external:
        register_external_parameter(module, p)


def without_eager_state(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """M10. Return an Adagrad whose state is made at its first step; other optimizers as they are.

    ZeRO makes an instance of torch's Adagrad anew over its shards, since its state exists from the beginning: in one
    group of default settings, of which the learning-rate scheduler knows nothing. This one, with the same groups, it
    leaves alone.
    """
    return _LazyAdagrad(optimizer) if isinstance(optimizer, torch.optim.Adagrad) else optimizer


class _LazyAdagrad(torch.optim.Optimizer):
    """torch's Adagrad, but no instance of its class; state is made at the first step."""

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


def overlap_reduction(ds_engine: DeepSpeedEngine, data_axis: Axis, late: Collection[int] = ()) -> None:
    """M14. Have ZeRO 1 and 2 reduce each bucket of gradients while the backward computes the next ones.

    DeepSpeed waits for each reduction, and ZeRO 1 begins the first one when the last backward is over. Its own
    `overlap_comm` does so in a pipeline too, and else synchronizes the device for each data rank's part of a bucket
    (stage_1_and_2.py, `allreduce_and_copy`). Call this where `layout.deepspeed_config.overlaps_reduction` says so.
    `late`: ids of parameters whose gradients are not complete when ZeRO 1's last backward is over; tied weights' never
    are. Between that and the step, DeepSpeed's `safe_get_full_grad` has nothing to read.
    """
    zero = ds_engine.optimizer
    tied: list[tuple[Any, Any]] = getattr(ds_engine.module, "get_tied_weights_and_groups", list)()
    not_complete = {id(p) for p, _ in tied} | set(late)
    axis = replace(data_axis, group=zero.dp_process_group)
    zero.overlap_comm = False  # in place of its own
    # Gradients of fp32 models too are summed up in one flat tensor, which is what the step takes.
    zero._use_compact_grad_partition_buffer = lambda group: True
    reduction: GradientBuffer | GradientReduction
    if zero.partition_gradients:
        reduction = GradientReduction(zero, axis)
        zero.reduce_ipg_grads = reduction.reduce_bucket
        zero.process_gradients = reduction.on_gradient
    else:
        order = {id(p): index for index, p in enumerate(ds_engine.module.parameters())}
        accumulates = ds_engine.gradient_accumulation_steps() > 1
        is_last = ds_engine.is_gradient_accumulation_boundary
        reduction = GradientBuffer(zero, axis, is_last, accumulates=accumulates, order=order, late=not_complete)
        zero.reduce_gradients = reduction.reduce_rest
        _replace_gradient_hooks(ds_engine, reduction.accumulate, reduction.on_gradient)
    step = zero.step

    def after_reduction(*args: object) -> object:
        reduction.finish()
        # After each step DeepSpeed makes all weights views of their flat ones again, which they are: "just to be safe".
        with _replaced(zero, "_update_model_bit16_weights", lambda group: None):
            return step(*args)

    zero.step = after_reduction


def _replace_gradient_hooks(
    ds_engine: DeepSpeedEngine, accumulate: Callable[[Any], None], on_gradient: Callable[[Any], None]
) -> None:
    """Have a parameter's hook do what is ours alone.

    DeepSpeed's count how many gradients a backward makes, so that a call of `loss.backward()` ends a micro-batch as
    engine.backward does. It takes half as long as the gradients' sums; and a criterion's own call of autograd would end
    a step, whose gradients are not there yet.
    """
    zero = ds_engine.optimizer
    for hook in zero._grad_acc_hooks:
        hook.remove()
    params = [p for group in zero.bit16_groups for p in group if p.requires_grad]
    zero._grad_acc_hooks = [p.register_post_accumulate_grad_hook(on_gradient) for p in params]
    zero.unregister_grad_acc_post_hooks()
    zero.register_grad_acc_post_hook(lambda: None if ds_engine._running_engine_backward else zero.exit_backward())
    zero._fill_param_grad_accum_attribute = accumulate
    zero.fill_grad_accum_attribute = lambda: None  # of all parameters after each backward: their hooks have done it


def accumulate_without_copies(ds_engine: DeepSpeedEngine) -> None:
    """M15. Have ZeRO 1 in half precision add a micro-batch's gradients to those in fp32 as they are.

    DeepSpeed makes a copy of each in fp32 first: 18 bytes read and written for a parameter, where 10 do. A sum in fp32
    takes a bf16 or fp16 number without rounding, so both are one. Where a product has added to the sum itself
    (`layers.gradient_accumulation_fusion`) there is no gradient, and nothing to do.
    """
    zero = ds_engine.optimizer
    if not getattr(zero, "use_grad_accum_attribute", False):
        return

    def accumulate(p: Any) -> None:
        if p.grad is None:
            return
        if p.grad_accum is None:
            p.grad_accum = p.grad.to(zero.gradient_accumulation_dtype)
        else:
            p.grad_accum.add_(p.grad)
        p.grad = None

    zero._fill_param_grad_accum_attribute = accumulate


def overlap_param_gather(ds_engine: DeepSpeedEngine, data_axis: Axis, layers: Sequence[nn.Module]) -> None:
    """M16. Have ZeRO 1 and 2 gather each bucket of weights while the forward computes the layers before it.

    DeepSpeed gathers whole parameter groups, and its step waits for them. `layers` are the modules that the forward
    waits for by `ds_engine.module.parameter_gather`, in their order. Weights that anything else reads may be those of
    the step before: `parameter_gather` lists who waits.
    """
    zero, module = ds_engine.optimizer, ds_engine.module
    axis = replace(data_axis, group=zero.dp_process_group)
    gather = ParameterGather(zero, axis, layers, zero.allgather_bucket_size)
    stage_1_and_2 = import_module("deepspeed.runtime.zero.stage_1_and_2")
    step = zero.step

    def with_gather(*args: object) -> object:
        gather.finish()  # it writes into what this rank sends; a layer that no forward has run has not waited
        with _replaced(stage_1_and_2, "all_gather_dp_groups", gather.start):
            return step(*args)

    zero.step = with_gather
    moving = [(zero, name) for name in ("update_lp_params", "offload_states", "reload_states")]
    for owner, name in [*moving, (ds_engine, "load_checkpoint")]:
        setattr(owner, name, _after(gather.finish, getattr(owner, name)))
    for part in module.modules():
        part.register_state_dict_pre_hook(lambda *_: gather.finish())
    for layer in layers:
        if layer._compiled_call_impl is None:  # else torch would trace it; a program's own call of a layer is rare
            layer.register_forward_pre_hook(lambda layer, _: gather.wait_for(layer))
    module.parameter_gather = gather


def reduce_by_stages(ds_engine: DeepSpeedEngine, data_axis: Axis, late: Collection[int] = ()) -> StageReduction | None:
    """M17. Return what reduces a stage's gradients while a rank's other stages go on, without ZeRO; None: nothing can.

    DeepSpeed then leaves out what was begun, and its reduction ends with a wait for it. Nothing can in bf16, whose
    gradients DeepSpeed keeps in one flat fp32 tensor over all stages, nor where it scales gradients before it sums.
    `late` as in `overlap_reduction`.
    """
    scales = not ds_engine.postscale_gradients() or ds_engine.gradient_predivide_factor() != 1.0
    if ds_engine.zero_optimization() or ds_engine.using_bf16_optimizer or scales or data_axis.size == 1:
        return None
    tied = {id(p) for p, _ in ds_engine.module.get_tied_weights_and_groups()}
    reduction = StageReduction(ds_engine, data_axis, tied | set(late))
    reduce_all = ds_engine.buffered_allreduce_fallback

    def reduce_rest(grads: object = None, elements_per_buffer: int = 500_000_000) -> None:
        reduced = [p for p in ds_engine.module.parameters() if id(p) in reduction.begun]
        for p in reduced:
            p.requires_grad_(False)  # DeepSpeed passes by what is frozen
        try:
            reduce_all(grads, elements_per_buffer)
        finally:
            for p in reduced:
                p.requires_grad_(True)
        reduction.finish()

    ds_engine.buffered_allreduce_fallback = reduce_rest
    return reduction


def call_before_reduction(ds_engine: DeepSpeedEngine, first: Callable[[], None]) -> None:
    """M18. Call `first` once a step, between its last backward and the reduction of whole gradients over replicas.

    At ZeRO 0 and 1, and after `overlap_reduction`. DeepSpeed has no such place: only hooks of single gradients.
    """
    zero = ds_engine.zero_optimization()
    owner, name = (ds_engine.optimizer, "reduce_gradients") if zero else (ds_engine, "buffered_allreduce_fallback")
    setattr(owner, name, _after(first, getattr(owner, name)))


def build_ops_alone() -> None:
    """M19. Have DeepSpeed compile its ops one rank of a host after another; remove the lock of a start that was killed.

    torch's own lock is a file that its owner removes. Of one that was killed while it compiled the file stays, and
    every later start waits for it without a word. The kernel gives this lock back by itself.
    """
    from deepspeed.ops.op_builder.builder import OpBuilder

    jit_load = OpBuilder.jit_load
    if getattr(jit_load, "builds_alone", False):
        return

    def alone(self: Any, verbose: bool = True) -> object:
        with _building_alone(self.name):
            return jit_load(self, verbose)

    alone.builds_alone = True  # type: ignore[attr-defined]
    OpBuilder.jit_load = alone


@contextmanager
def _building_alone(op: str) -> Iterator[None]:
    from torch.utils import cpp_extension

    folder = Path(cpp_extension._get_build_directory(op, verbose=False))
    with (folder / "dslpar.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        (folder / "lock").unlink(missing_ok=True)
        yield


def correct_bias_exactly(ds_engine: DeepSpeedEngine) -> None:
    """M20. Have a step of DeepSpeedCPUAdam depend on its number, and not on those that came before it in this run.

    It multiplies the betas' powers in fp32 from step to step, and begins by `pow` in a run that goes on after a
    checkpoint. Here its own correction is off, and is in what it is given instead, computed in float64:
    p -= lr / c1 * m / (sqrt(v) / c2 + eps) is p -= (lr c2 / c1) * m / (sqrt(v) + c2 eps). AdamW's decay is lr's too.
    """
    optimizer: Any = ds_engine.basic_optimizer
    op = getattr(optimizer, "ds_opt_adam", None)
    if op is None:
        return

    def update(
        number: int, step: Any, lr: float, beta1: float, beta2: float, eps: float, decay: float, *rest: Any
    ) -> None:
        corrects, *tensors = rest
        # The betas as the op has them: 1 - 0.999 in fp32 is 1e-5 off, and must be so here.
        first, second = torch.tensor([beta1, beta2], dtype=torch.float32).tolist()
        c1, c2 = (1 - first ** int(step), math.sqrt(1 - second ** int(step))) if corrects else (1.0, 1.0)
        decay *= c1 / c2 if optimizer.adam_w_mode else 1.0
        op.adam_update(number, int(step), lr * c2 / c1, beta1, beta2, eps * c2, decay, False, *tensors)

    optimizer.ds_opt_adam = SimpleNamespace(
        adam_update=update, adam_rollback=op.adam_rollback, destroy_adam=op.destroy_adam
    )


@contextmanager
def _replaced(owner: object, name: str, value: object) -> Iterator[None]:
    """Set an attribute within the context."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _after(first: Callable[[], None], then: Callable[..., object]) -> Callable[..., object]:
    """Return a function that calls `first`, and is `then`."""

    def both(*args: object, **kwargs: object) -> object:
        first()
        return then(*args, **kwargs)

    return both
