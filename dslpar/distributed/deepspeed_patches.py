"""Where DeepSpeed 0.19 is wrong for us, and what keeps DESIGN's promise 1 all the same: all in this one file.

Each function says what it mends and where that is written down (FACTS, section 7, by number; the upstream issue where
one is known; from B14 on, the text here is all there is). For each there is a test that fails when DeepSpeed no longer
needs it: in tests/distributed/engine/test_engine.py, tests/distributed/engine/test_precision.py,
tests/distributed/engine/test_optimizers.py and tests/distributed/checkpoint/test_resume.py.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from dslpar.distributed import collectives
from dslpar.distributed.collectives import Axis


def avoid_compiling() -> None:
    """B6, FACTS 6: on a CPU, DeepSpeed compiles a shared-memory op for 30 s, whose all-reduce ignores its group."""
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def forgive_old_names() -> None:
    """FACTS 9.9: DeepSpeed calls two collectives by names that torch 2.13 warns of, once a rank."""
    for name in ("all_gather_into_tensor", "reduce_scatter_tensor"):
        warnings.filterwarnings("ignore", f"`torch.distributed.{name}` is deprecated", FutureWarning)


def own_nothing_of_tied_copies(module: nn.Module) -> None:
    """B1, FACTS 9.2: without ZeRO, DeepSpeed counts the tied copies of a pipeline in norms: `ds_pipe_replicated` is
    not read there. A copy owns nothing. Call after a PipelineModule is built, before `initialize`.
    """
    for p in module.parameters():
        if getattr(p, "ds_pipe_replicated", False):
            p.tensor_model_parallel = False  # type: ignore[attr-defined]


def let_cpus_compute_fp16() -> None:
    """DeepSpeed has fp16 on a CPU only where oneDNN computes it fast, and refuses the rest. torch computes it on others
    too, slower: so fp16 runs, and is tested, wherever torch does.
    """
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    if accelerator.device_name() == "cpu" and not accelerator.is_fp16_supported() and _computes(torch.float16):
        accelerator.is_fp16_supported = lambda: True


def _computes(dtype: torch.dtype) -> bool:
    """Whether this torch has the products, norms and gradients of that type on a CPU."""
    x = torch.ones(2, 2, dtype=dtype, requires_grad=True)
    try:
        torch.autograd.grad(nn.functional.softmax(nn.functional.layer_norm(x @ x, (2,)), -1).sum(), x)
    except RuntimeError:  # '"addmm_impl_cpu_" not implemented for 'Half''
        return False
    return True


def tied_gradients(weights: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """B14: before gradients are averaged over data, a pipeline sums the `.grad` of tied weights over their stages.
    Where ZeRO 1 adds half-precision gradients up in fp32, it has moved them to `.grad_accum`, and the copies would go
    apart in silence. There, a stand-in shows that sum as its `.grad`.
    """
    sums = [(getattr(weight, "grad_accum", None), weight, group) for weight, group in weights]
    return [(weight if summed is None else SimpleNamespace(grad=summed), group) for summed, weight, group in sums]


def shard_gradients_of_bf16() -> None:
    """B17: ZeRO 1 in bf16 with fp32 sums gets an optimizer of its own, BF16_Optimizer, which all-reduces whole
    gradients (3 (N-1)/N parameters a step, where 2 (N-1)/N do), and raises on a rank that owns no parameter (B3). It
    now gets the one that fp16 and ZeRO 2 get.
    """
    from deepspeed.runtime.engine import BFLOAT16, ZERO_OPTIMIZATION, DeepSpeedEngine

    original = DeepSpeedEngine._do_optimizer_sanity_check
    if getattr(original, "shards_bf16", False):
        return

    def patched(self: Any, basic_optimizer: Any) -> Any:
        chosen = original(self, basic_optimizer)
        return ZERO_OPTIMIZATION if chosen == BFLOAT16 and self.zero_optimization() else chosen

    patched.shards_bf16 = True  # type: ignore[attr-defined]
    DeepSpeedEngine._do_optimizer_sanity_check = patched


def norms_of_all_groups(engine: Any, model: Axis) -> None:
    """B18: ZeRO 1 reduces the norm of each parameter group by itself over the ranks of one replica (`model`): a stage
    that has fewer groups, such as matrices alone, leaves the others waiting. It now counts empty groups with them.
    """
    zero = engine.optimizer
    if model.size == 1 or not hasattr(zero, "scaled_global_norm") or not hasattr(zero, "params_in_partition"):
        return
    own = len(zero.bit16_groups)
    most = int(collectives.all_reduce(torch.tensor(own, device=engine.device), model, "max").item())
    if most == own:
        return
    scaled_global_norm = zero.scaled_global_norm

    def with_empty_groups(**kwargs: Any) -> Any:
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


def forget_what_overflowed(engine: Any) -> None:
    """B16: ZeRO 1 and 2 with the optimizer on the CPU add half-precision gradients up in fp32 buffers, and leave them
    as they are when a step overflows: infinite for ever, every later step is skipped. Lets go of them with the other
    buffers of a step.
    """
    zero = engine.optimizer
    if not getattr(zero, "cpu_offload", False) or not hasattr(zero, "reset_cpu_buffers"):
        return
    reset = zero.reset_cpu_buffers

    def reset_all() -> None:
        reset()
        zero.averaged_gradients = dict.fromkeys(zero.averaged_gradients)

    zero.reset_cpu_buffers = reset_all


def fetch_what_is_borrowed(borrowed: Iterable[tuple[nn.Module, nn.Parameter]]) -> None:
    """B19: ZeRO 3 notes that a module's forward reads a parameter of another module when that one is first found
    empty there. After a checkpoint was loaded, small parameters are not empty: they are never noted, are emptied all
    the same, and activation checkpointing reads nothing. So each is noted as soon as the engine is there.
    """
    from deepspeed.runtime.zero.partition_parameters import register_external_parameter

    for module, p in borrowed:
        register_external_parameter(module, p)


def with_lazy_state(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """B15: ZeRO makes an instance of torch's Adagrad anew over its shards, since its state is there from the beginning:
    in one group of default settings, of which the schedule knows nothing. This one, with the same groups, it leaves.
    """
    return _Adagrad(optimizer) if isinstance(optimizer, torch.optim.Adagrad) else optimizer


class _Adagrad(torch.optim.Optimizer):
    """torch's Adagrad without being its instance; state comes with the first step."""

    step = torch.optim.Adagrad.step

    def __init__(self, eager: torch.optim.Adagrad) -> None:
        super().__init__(eager.param_groups, eager.defaults)

    def _init_group(self, group: dict[str, Any], *lists: list[Any]) -> tuple[bool, bool]:
        for p in group["params"]:
            if p.grad is not None and not self.state[p]:
                step = torch.zeros((), device=p.device if group["fused"] else "cpu")
                self.state[p] = {"step": step, "sum": torch.full_like(p, group["initial_accumulator_value"])}
        kinds: tuple[bool, bool] = torch.optim.Adagrad._init_group(self, group, *lists)  # type: ignore
        return kinds


def compute_norm_without_zero(engine: Any, model: Axis) -> None:
    """FACTS 9.1: without ZeRO in fp32, DeepSpeed's global norm is None. Computes it, over the ranks of one replica
    (`model`), after gradients are averaged over data and before they are clipped: when `_take_model_step` begins.
    A step whose gradient is not finite is skipped there too, as ZeRO skips it: else the stage would change the run.
    """
    take_model_step = engine._take_model_step

    def with_norm(lr_kwargs: Any) -> None:
        engine._global_grad_norm = owned_norm(engine.module, model)
        engine.optimizer.overflow = not math.isfinite(engine._global_grad_norm)  # which _take_model_step reads
        with _resting(engine.optimizer) if engine.optimizer.overflow else nullcontext():
            take_model_step(lr_kwargs)

    engine._take_model_step = with_norm


@contextmanager
def _resting(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """While this lasts, the optimizer's step does nothing."""
    step = optimizer.step
    optimizer.step = lambda *_: None  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        optimizer.step = step  # type: ignore[method-assign]


def owned_norm(module: nn.Module, model: Axis) -> float:
    """The 2-norm of all gradients, each element counted once: by the rank that owns it (`p.tensor_model_parallel`)."""
    owned = [p.grad for p in module.parameters() if p.grad is not None and p.tensor_model_parallel]  # type: ignore[attr-defined]
    device = next(module.parameters()).device
    squares = [torch.linalg.vector_norm(grad, dtype=torch.float64).square() for grad in owned]
    total = torch.stack(squares).sum() if squares else torch.zeros((), dtype=torch.float64, device=device)
    return math.sqrt(collectives.all_reduce(total, model).item())
