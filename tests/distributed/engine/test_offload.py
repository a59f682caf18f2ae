"""CPU offload: what a step waits for, its gradient norm, and where the optimizer states lie."""

from __future__ import annotations

import logging
import os
import warnings
from itertools import product
from typing import Any

import deepspeed
import pytest

from benchmarks.device_counter import Waits, count_waits
from dslpar.distributed import deepspeed_patches
from dslpar.distributed.groups import Groups
from dslpar.engine.build import build_engine
from dslpar.layout.resolve import Job
from dslpar.schema import sections
from tests.support.engines import batches, engine_of, job
from tests.support.fake_world import fake_world, in_forks
from tests.support.ranks import on_ranks
from tests.support.sampling import sampled

PIPE = {"pipeline": sections.PipelineParallel(size=2)}
ONE_D = {"tensor": sections.TensorParallel(size=2, mode="1d")}


def offloaded(
    world: int, stage: int, dtype: str = "fp32", *, offload: bool = True, pins: bool | None = None, **parallel: Any
) -> Job:
    section = {"device": "cpu"} | ({} if pins is None else {"pin_memory": pins})
    return job(
        world,
        parallel=sections.Parallel(**parallel),
        batch=sections.Batch(global_size=8, accumulation=2),
        zero=sections.Zero(stage=stage, extra={"offload_optimizer": section} if offload else {}),
        precision=sections.Precision(dtype=dtype, extra={"initial_scale_power": 6} if dtype == "fp16" else {}),
        optimizer=sections.SGD(lr=0.1),
    )


# ---- waits of a step ----

COUNTED = {
    "data 2, ZeRO 1, bf16": offloaded(2, 1, "bf16"),
    "data 2, ZeRO 2, fp32": offloaded(2, 2),
    "data 2, ZeRO 2, bf16": offloaded(2, 2, "bf16"),
    "1d 2, data 2, ZeRO 2, fp16": offloaded(4, 2, "fp16", **ONE_D),
    "data 2, ZeRO 3, bf16": offloaded(2, 3, "bf16"),
    "1d 2, data 2, ZeRO 3, fp16": offloaded(4, 3, "fp16", **ONE_D),
    "1d 2, data 2, ZeRO 3, fp16, not offloaded": offloaded(4, 3, "fp16", offload=False, **ONE_D),
}


def _step_waits(made: Job) -> Waits:
    """Return the waits of the second step, on a fake rank in a separate process."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    deepspeed_patches.skip_shm_op()
    rank = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": made.mesh.world_size, "MASTER_PORT": 29500}
    os.environ.update({name: str(value) for name, value in rank.items()}, MASTER_ADDR="127.0.0.1")
    with fake_world(0, made.mesh.world_size), count_waits() as waits:
        deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
        engine = build_engine(made, Groups(made.mesh), all_counted=True)
        for step in range(2):
            for places in (waits.reads, waits.copies, waits.synchronizations):
                places.clear()
            engine.train_batch(batches(made, 0, step))
        assert not engine.skipped, "a step that is skipped is another one"
    return waits


@pytest.mark.parametrize("name", sampled(COUNTED, {"1d 2, data 2, ZeRO 2, fp16", "data 2, ZeRO 3, bf16"}))
def test_a_step_waits_for_the_device_once(name: str) -> None:
    (waits,) = in_forks(_step_waits, [COUNTED[name]])
    assert isinstance(waits, Waits), waits
    assert len(waits.reads) == 1, waits.reads
    assert "host_reads.py" in waits.reads[0]
    assert (waits.copies, waits.synchronizations) == ([], [])


def _without_the_patch(made: Job) -> Waits:
    deepspeed_patches.read_norms_once = lambda *_: None
    return _step_waits(made)


def test_m12_deepspeed_still_reads_a_norm_for_each_parameter() -> None:
    (waits,) = in_forks(_without_the_patch, [COUNTED["data 2, ZeRO 2, bf16"]])
    assert sum("item()**2" in read for read in waits.reads) > 5, waits.reads


# ---- the norm ----

NORMS = {
    "data 2, ZeRO 1, bf16": offloaded(2, 1, "bf16"),
    "data 2, ZeRO 2, fp32": offloaded(2, 2),
    "1d 2, data 2, ZeRO 2, fp16": offloaded(4, 2, "fp16", **ONE_D),
    "pipe 2, data 2, ZeRO 1, fp32": offloaded(4, 1, **PIPE),
    "data 2, ZeRO 3, fp32": offloaded(2, 3),
    "1d 2, data 2, ZeRO 3, bf16": offloaded(4, 3, "bf16", **ONE_D),
}


def _norms(made: Job) -> list[tuple[float, float]]:
    """Return the norm of each group and step, and DeepSpeed's norm of the same gradients."""
    engine = engine_of(made)
    zero = engine.deepspeed.optimizer
    patched, found = zero.complete_grad_norm_calculation_for_cpu_offload, []

    def both(params: Any) -> Any:
        norm = patched(params)
        found.append((float(norm), float(type(zero).complete_grad_norm_calculation_for_cpu_offload(zero, params))))
        return norm

    zero.complete_grad_norm_calculation_for_cpu_offload = both
    for step in range(2):
        engine.train_batch(batches(made, engine.groups.coord["data"], step))
    return found


@pytest.mark.parametrize("name", sampled(NORMS, {"1d 2, data 2, ZeRO 2, fp16", "data 2, ZeRO 3, fp32"}))
def test_the_norm_is_deepspeed_s(name: str) -> None:
    """Both sum in float64. DeepSpeed rounds the sum to fp32 (6e-8) before it sums over the ranks of ZeRO 3."""
    made = NORMS[name]
    for found in on_ranks(made.mesh.world_size, _norms, made, init="deepspeed"):
        assert len(found) >= 2
        for norm, expected in found:
            assert norm > 0
            assert norm == (pytest.approx(expected, rel=2e-7) if "ZeRO 3" in name else expected)


# ---- pinned memory ----


def _pinned(made: Job) -> list[bool]:
    """Return whether each buffer that a step copies between host and device was pinned."""
    from deepspeed.accelerator import get_accelerator

    places: set[int] = set()

    def pin_memory(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        places.add(tensor.untyped_storage().data_ptr())
        return tensor  # as on a CPU, whose memory is pageable

    get_accelerator().pin_memory = pin_memory
    engine = engine_of(made)
    zero = engine.deepspeed.optimizer
    engine.train_batch(batches(made, engine.groups.coord["data"]))
    if hasattr(zero, "single_partition_of_fp32_groups"):  # gradients on their way there, weights on their way back
        buffers = [*zero.param_buffer_of_bit16_for_cpu_offload_groups, zero.temp_grad_buffer_for_cpu_offload]
        buffers += [group.grad for group in zero.single_partition_of_fp32_groups]
    else:
        buffers = [group.grad for group in zero.fp32_partitioned_groups_flat]
    assert all(buffer.device.type == "cpu" for buffer in buffers)
    return [buffer.untyped_storage().data_ptr() in places for buffer in buffers]


PINS = {"default": None, "switched off": False}


@pytest.mark.parametrize(
    ("stage", "name"), sampled(product((1, 2, 3), PINS), {(1, "default"), (2, "switched off"), (3, "default")})
)
def test_what_a_step_copies_is_pinned_unless_the_config_says_otherwise(stage: int, name: str) -> None:
    pins = PINS[name]
    made = offloaded(2, stage, "bf16", pins=pins)
    for found in on_ranks(2, _pinned, made, init="deepspeed"):
        assert found
        assert set(found) == {pins is None}
