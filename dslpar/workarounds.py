"""Where DeepSpeed 0.19 is wrong for us, and what keeps DESIGN's promise 1 all the same: all in this one file.

Each function says what it mends and where that is written down (FACTS, section 7, by number; the upstream issue where
one is known). tests/test_engine.py holds, for each, a test that fails when DeepSpeed no longer needs it.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from dslpar import comm
from dslpar.comm import Axis


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
    return math.sqrt(comm.all_reduce(total, model).item())


def let_ranks_count_nothing() -> None:
    """B3: BF16_Optimizer's norm raises on a rank that owns no parameter (a replica, a stage with a tied copy alone),
    while its peers wait for it. Such a rank now counts one zero.
    """
    from deepspeed.runtime import bf16_optimizer

    original = bf16_optimizer.get_global_norm_of_tensors
    if getattr(original, "counts_nothing", False):
        return

    def patched(input_tensors: Any, **kwargs: Any) -> Any:
        return original(input_tensors=input_tensors or [torch.zeros(1)], **kwargs)

    patched.counts_nothing = True  # type: ignore[attr-defined]
    bf16_optimizer.get_global_norm_of_tensors = patched
