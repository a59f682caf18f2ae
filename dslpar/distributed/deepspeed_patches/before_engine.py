"""Patches of DeepSpeed before or while an engine is built: collectives, precision, compiled ops.

docs/architecture.md explains their numbers, such as M1.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from dslpar.distributed.deepspeed_patches.build_lock import building_alone
from dslpar.distributed.deepspeed_patches.replacement import replaced

if TYPE_CHECKING:
    from deepspeed.runtime.engine import DeepSpeedEngine


def skip_shm_op() -> None:
    """M1. Keep DeepSpeed from compiling its shared-memory op on a CPU: 30 s, for an all-reduce that ignores its group.

    No environment variable turns the op off. Setting its entry in `deepspeed.ops.__compatible_ops__` would first probe
    every op, which takes 0.15 s and a call of the C compiler per rank.
    """
    backend: Any = import_module("deepspeed.comm.torch")  # as an attribute of deepspeed.comm it is torch itself
    backend.build_shm_op = lambda: None


def ignore_deprecated_names() -> None:
    """M2. Silence torch 2.13's warnings about two collectives that DeepSpeed calls by their old names."""
    for name in ("all_gather_into_tensor", "reduce_scatter_tensor"):
        warnings.filterwarnings("ignore", f"`torch.distributed.{name}` is deprecated", FutureWarning)


@contextmanager
def allow_fp16_on_cpus() -> Iterator[None]:
    """M3. Have DeepSpeed accept fp16 on every CPU on which torch computes it, fast or slow, so that it can be tested.

    DeepSpeed accepts it only if oneDNN has fast instructions for it.
    """
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    if accelerator.device_name() == "cpu" and not accelerator.is_fp16_supported() and _cpu_computes(torch.float16):
        with replaced(accelerator, "is_fp16_supported", lambda: True):
            yield
    else:
        yield


def reduce_fp16_on_cpus(ds_engine: DeepSpeedEngine) -> None:
    """M24. Have an engine without ZeRO reduce gradients in fp16 on every CPU on which M3 allows fp16.

    DeepSpeed compares their dtype with the dtypes that it accepts, in each reduction, when M3 is undone already.
    """
    reduce = ds_engine.buffered_allreduce_fallback

    def reduce_fp16(*args: object, **kwargs: object) -> None:
        with allow_fp16_on_cpus():
            reduce(*args, **kwargs)

    ds_engine.buffered_allreduce_fallback = reduce_fp16


def _cpu_computes(dtype: torch.dtype) -> bool:
    """Return whether this torch computes matrix products, norms and gradients in a dtype on the CPU."""
    x = torch.ones(2, 2, dtype=dtype, requires_grad=True)
    try:
        torch.autograd.grad(nn.functional.softmax(nn.functional.layer_norm(x @ x, (2,)), -1).sum(), x)
    except RuntimeError:  # '"addmm_impl_cpu_" not implemented for 'Half''
        return False
    return True


def build_ops_alone() -> None:
    """M19. Have DeepSpeed compile its ops on one rank per host at a time; remove the lock that a killed start left.

    torch's own lock is a file that its owner removes. If the owner is killed while it compiles, the file stays, and
    every later start silently waits for it. The lock of a living process stays (build_lock.py).
    """
    from deepspeed.ops.op_builder.builder import OpBuilder

    jit_load = OpBuilder.jit_load
    if getattr(jit_load, "builds_alone", False):
        return

    def alone(self: Any, verbose: bool = True) -> object:
        from torch.utils import cpp_extension  # brings setuptools: 0.2 s for each rank, and few runs build an op

        with building_alone(Path(cpp_extension._get_build_directory(self.name, verbose=False))):
            return jit_load(self, verbose)

    alone.builds_alone = True  # type: ignore[attr-defined]
    OpBuilder.jit_load = alone
