"""The mpu in DeepSpeed: each engine has one, and the process has the one of the engine that was built last."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any

from dslpar.distributed.deepspeed_patches.replacement import replaced

if TYPE_CHECKING:
    from deepspeed.runtime.engine import DeepSpeedEngine


@contextmanager
def restore_mpu() -> Iterator[None]:
    """M22. Restore, at the end of the context, the mpu that the process had at its beginning.

    `deepspeed.initialize` stores an engine's mpu in `deepspeed.utils.groups`. An engine that is built later without an
    mpu takes its groups from there: it averages its gradients over too few ranks, or raises if weights are divided.
    """
    groups: Any = import_module("deepspeed.utils.groups")
    with replaced(groups, "mpu", groups.mpu):
        yield


def reduce_over_own_mpu(ds_engine: DeepSpeedEngine) -> None:
    """M23. Have an engine without ZeRO average gradients over the data ranks of its own mpu.

    DeepSpeed reads the process's mpu in each reduction: that of the engine that was built last, or none. In a pipeline
    it does so for gradients of experts alone, which it then divides by another number of data ranks.
    """
    groups: Any = import_module("deepspeed.utils.groups")
    reduce = ds_engine.buffered_allreduce_fallback

    def reduce_over_own(*args: object, **kwargs: object) -> None:
        with replaced(groups, "mpu", ds_engine.mpu):
            reduce(*args, **kwargs)

    ds_engine.buffered_allreduce_fallback = reduce_over_own
