"""Overlap in DeepSpeed: reduce gradients during a backward, and gather weights during a forward."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

from torch import nn

from dslpar.distributed.collectives import Axis
from dslpar.distributed.deepspeed_patches.replacement import replaced
from dslpar.distributed.gradient_buffer import GradientBuffer
from dslpar.distributed.gradient_reduction import GradientReduction
from dslpar.distributed.group_axes import GroupAxes
from dslpar.distributed.parameter_gather import ParameterGather
from dslpar.distributed.per_stage_gradient_reduction import StageReduction

if TYPE_CHECKING:
    from deepspeed.runtime.engine import DeepSpeedEngine


def overlap_reduction(
    ds_engine: DeepSpeedEngine, data_axis: Axis, expert_axis: Axis, late: Collection[int] = ()
) -> None:
    """M14. Have ZeRO 1 and 2 reduce each bucket of gradients while the backward computes the next ones.

    DeepSpeed waits for each reduction, and ZeRO 1 begins the first one after the last backward. With DeepSpeed's own
    `overlap_comm`, ZeRO 1 still does so in a pipeline. Without a pipeline, `overlap_comm` synchronizes the device for
    each data rank's part of a bucket (stage_1_and_2.py, `allreduce_and_copy`). Call this function if
    `layout.deepspeed_config.overlaps_reduction` returns True. Between the last backward and the step, DeepSpeed's
    `safe_get_full_grad` has nothing to read.

    late: ids of parameters whose gradients are not complete after ZeRO 1's last backward. Tied weights need not be
        listed.
    """
    zero = ds_engine.optimizer
    tied: list[tuple[Any, Any]] = getattr(ds_engine.module, "get_tied_weights_and_groups", list)()
    not_complete = {id(p) for p, _ in tied} | set(late)
    axes = GroupAxes(zero, data_axis, expert_axis)
    zero.overlap_comm = False  # replaced by the reduction below
    # Makes fp32 models use one flat gradient tensor, too. The step reads it.
    zero._use_compact_grad_partition_buffer = lambda group: True
    reduction: GradientBuffer | GradientReduction
    if zero.partition_gradients:
        reduction = GradientReduction(zero, axes)
        zero.reduce_ipg_grads = reduction.reduce_bucket
        zero.process_gradients = reduction.on_gradient
    else:
        order = {id(p): index for index, p in enumerate(ds_engine.module.parameters())}
        accumulates = ds_engine.gradient_accumulation_steps() > 1
        is_last = ds_engine.is_gradient_accumulation_boundary
        reduction = GradientBuffer(zero, axes, is_last, accumulates=accumulates, order=order, late=not_complete)
        zero.reduce_gradients = reduction.reduce_rest
        _replace_gradient_hooks(ds_engine, reduction.accumulate, reduction.on_gradient)
    step = zero.step

    def after_reduction(*args: object) -> object:
        reduction.finish()
        # After each step DeepSpeed makes all weights views of the flat tensor again, "just to be safe". They already
        # are.
        with replaced(zero, "_update_model_bit16_weights", lambda group: None):
            return step(*args)

    zero.step = after_reduction


def _replace_gradient_hooks(
    ds_engine: DeepSpeedEngine, accumulate: Callable[[Any], None], on_gradient: Callable[[Any], None]
) -> None:
    """Replace DeepSpeed's gradient hooks with `on_gradient` alone.

    DeepSpeed's hooks count the gradients of a backward, so that `loss.backward()` ends a micro-batch like
    engine.backward. Counting takes half as long as summing the gradients. Also, if a criterion itself calls autograd,
    that call would end the step before the step's gradients are computed.
    """
    zero = ds_engine.optimizer
    for hook in zero._grad_acc_hooks:
        hook.remove()
    params = [p for group in zero.bit16_groups for p in group if p.requires_grad]
    zero._grad_acc_hooks = [p.register_post_accumulate_grad_hook(on_gradient) for p in params]
    zero.unregister_grad_acc_post_hooks()
    zero.register_grad_acc_post_hook(lambda: None if ds_engine._running_engine_backward else zero.exit_backward())
    zero._fill_param_grad_accum_attribute = accumulate
    zero.fill_grad_accum_attribute = lambda: None  # for all parameters after each backward: done by their hooks


def accumulate_without_copies(ds_engine: DeepSpeedEngine) -> None:
    """M15. Have ZeRO 1 in half precision add a micro-batch's gradients to the fp32 sums without copying them first.

    DeepSpeed first copies each gradient to fp32: 18 bytes are read and written per parameter, where 10 suffice. bf16
    and fp16 numbers are exact in fp32, so the results are equal. If a matrix product has added to the sum itself
    (`layers.gradient_accumulation_fusion`), there is no gradient and nothing to do.
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


def overlap_param_gather(
    ds_engine: DeepSpeedEngine, data_axis: Axis, expert_axis: Axis, layers: Sequence[nn.Module]
) -> None:
    """M16. Have ZeRO 1 and 2 gather each bucket of weights while the forward computes the layers before it.

    DeepSpeed gathers whole parameter groups, and its step waits for them. `layers` are the modules, in order, that wait
    in the forward through `ds_engine.module.parameter_gather`. The docstring of the module `parameter_gather` lists all
    readers that wait. Any other reader may see the previous step's weights.
    """
    zero, module = ds_engine.optimizer, ds_engine.module
    axes = GroupAxes(zero, data_axis, expert_axis)
    gather = ParameterGather(zero, axes, layers, zero.allgather_bucket_size)
    stage_1_and_2 = import_module("deepspeed.runtime.zero.stage_1_and_2")
    step = zero.step

    def with_gather(*args: object) -> object:
        gather.finish()  # the step writes into tensors being sent; a layer that did not run has not waited
        with replaced(stage_1_and_2, "all_gather_dp_groups", gather.start):
            return step(*args)

    zero.step = with_gather
    moving = [(zero, name) for name in ("update_lp_params", "offload_states", "reload_states")]
    for owner, name in [*moving, (ds_engine, "load_checkpoint")]:
        setattr(owner, name, _after(gather.finish, getattr(owner, name)))
    for part in module.modules():
        part.register_state_dict_pre_hook(lambda *_: gather.finish())
    for layer in layers:
        if layer._compiled_call_impl is None:  # torch would trace a hook; programs rarely call layers
            layer.register_forward_pre_hook(lambda layer, _: gather.wait_for(layer))
    module.parameter_gather = gather


def reduce_by_stages(
    ds_engine: DeepSpeedEngine, data_axis: Axis, expert_axis: Axis, late: Collection[int] = ()
) -> StageReduction | None:
    """M17. Return a StageReduction, which reduces a stage's gradients while other stages run, without ZeRO.

    DeepSpeed's own reduction then skips gradients whose reduction has begun, and ends with a wait for them. The result
    is None if this is not possible: in bf16, whose gradients DeepSpeed keeps in one flat fp32 tensor over all stages,
    and if DeepSpeed scales gradients before it sums them. `late` is as in `overlap_reduction`.
    """
    scales = not ds_engine.postscale_gradients() or ds_engine.gradient_predivide_factor() != 1.0
    if ds_engine.zero_optimization() or ds_engine.using_bf16_optimizer or scales or data_axis.size == 1:
        return None
    tied = {id(p) for p, _ in ds_engine.module.get_tied_weights_and_groups()}
    reduction = StageReduction(ds_engine, data_axis, expert_axis, tied | set(late))
    reduce_all = ds_engine.buffered_allreduce_fallback

    def reduce_rest(grads: object = None, elements_per_buffer: int = 500_000_000) -> None:
        reduced = [p for p in ds_engine.module.parameters() if id(p) in reduction.begun]
        for p in reduced:
            p.requires_grad_(False)  # DeepSpeed skips frozen parameters
        try:
            reduce_all(grads, elements_per_buffer)
        finally:
            for p in reduced:
                p.requires_grad_(True)
        reduction.finish()

    ds_engine.buffered_allreduce_fallback = reduce_rest
    return reduction


def call_before_reduction(ds_engine: DeepSpeedEngine, first: Callable[[], None]) -> None:
    """M18. Call `first` once per step, between its last backward and the reduction of gradients over replicas.

    For ZeRO 0 and 1. Call this after `overlap_reduction`. DeepSpeed has hooks for single gradients, but none for this
    moment.
    """
    zero = ds_engine.zero_optimization()
    owner, name = (ds_engine.optimizer, "reduce_gradients") if zero else (ds_engine, "buffered_allreduce_fallback")
    setattr(owner, name, _after(first, getattr(owner, name)))


def _after(first: Callable[[], None], then: Callable[..., object]) -> Callable[..., object]:
    """Return a function that calls `first`, then `then`."""

    def both(*args: object, **kwargs: object) -> object:
        first()
        return then(*args, **kwargs)

    return both
