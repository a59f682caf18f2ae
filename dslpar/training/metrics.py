"""Run metrics for metrics.jsonl and the log: sizes, parameters, memory, throughput, MFU, loss scale, time left.

The log has one line per step with the remaining time, as in detectron2 and LiBai. Parameters and memory come before it,
as in torchtitan.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import psutil
import torch
from deepspeed.accelerator import get_accelerator

from dslpar.costs import flops
from dslpar.costs.family_interface import costs_of
from dslpar.distributed import collectives
from dslpar.engine.engine import Engine
from dslpar.layout.resolve import Job
from dslpar.reporting.logging import log
from dslpar.schema import sections
from dslpar.schema.datasets import is_images


def throughput(job: Job, device: str, tokens_per_s: float) -> dict[str, float]:
    """Return `tflops_per_s` per device, with FLOPs counted as for `mfu_causal`, and the MFUs.

    For a model whose FLOPs are unknown the result is empty. For a device whose peak is unknown it has no MFUs.
    """
    model = job.spec.model
    if not isinstance(model, sections.Model):
        return {}
    flops_per_token = costs_of(model).flops_per_token(model, job.seq_len)._asdict()
    per_device = {name: count * tokens_per_s / job.mesh.world_size for name, count in flops_per_token.items()}
    peak = flops.peak_flops_per_s(device, job.spec.precision.dtype)
    mfus = {name: rate / peak for name, rate in per_device.items()} if peak else {}
    return {"tflops_per_s": per_device["mfu_causal"] / 1e12, **mfus}


def unit_of(job: Job) -> str:
    """Return the unit of a job's data: "images", "tokens", or "samples" if the config has no sequence length."""
    if is_images(job.spec.data):
        return "images"
    return "tokens" if job.seq_len else "samples"


def sample_size(job: Job) -> int:
    """Return the number of units per sample."""
    return job.seq_len if unit_of(job) == "tokens" else 1


def progress(job: Job, consumed_samples: int, step_s: float) -> dict[str, float]:
    """Return progress and speed: `tokens`, `step_s` and `tokens_per_s`, or the same for images or samples."""
    unit, size = unit_of(job), sample_size(job)
    done, in_step = consumed_samples * size, job.batch.global_size * size
    return {unit: done, "step_s": step_s, f"{unit}_per_s": in_step / step_s}


class ParameterCounts(NamedTuple):
    """Numbers of parameters, including padding."""

    total: int
    """Distinct parameters of the whole model."""
    trained: int
    """Distinct parameters that are not frozen."""
    local: int
    """Parameters on this rank."""


def num_parameters(engine: Engine) -> ParameterCounts:
    """Count the parameters of the whole model and of this rank. All ranks must call it together."""
    parameters: list[Any] = list(engine.module.parameters())
    sizes = [getattr(p, "ds_numel", None) or p.numel() for p in parameters]  # ZeRO 3 leaves an empty tensor
    owned = [(size, p) for size, p in zip(sizes, parameters, strict=True) if p.tensor_model_parallel]
    counts = [sum(size for size, _ in owned), sum(size for size, p in owned if p.requires_grad)]
    # Summed over the ranks that hold one copy of the weights. Other ranks hold copies of the same parameters.
    summed = collectives.all_reduce(torch.tensor(counts, device=engine.deepspeed.device), engine.groups.weight_axis)
    total, trained = summed.tolist()
    return ParameterCounts(total, trained, sum(sizes))


def device_name(engine: Engine) -> str:
    """Return the driver's name of this rank's CUDA device; the device type, such as "cpu", for other devices."""
    device = engine.deepspeed.device
    # DeepSpeed's accelerators do not report a name, and neither do all of torch's modules for other devices.
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def loss_scale(job: Job, engine: Engine) -> dict[str, float]:
    """Return the loss scale of the next step; empty unless the dtype is fp16."""
    return {"loss_scale": float(engine.deepspeed.optimizer.loss_scale)} if job.spec.precision.dtype == "fp16" else {}


# ---- the log ----


def log_job(job: Job, engine: Engine) -> None:
    """Log the run's layout, batch, ZeRO stage, precision, parameters and memory. All ranks must call it together."""
    mesh, cuboid, batch = job.mesh, job.mesh.tensor, job.batch
    mode = f" ({cuboid.mode})" if cuboid.mode else ""
    each = f" ({job.chunks.num} stages each)" if job.chunks.num > 1 else ""
    log.info(
        "%s: world of %d = pipeline %d%s * data %d * tensor %d%s, on %s; written to %s",
        *(job.path, mesh.world_size, mesh.pipe, each, mesh.data, cuboid.size, mode),
        *(engine.deepspeed.device, job.output_dir),
    )
    unit = unit_of(job)
    log.info(
        "%d %s a step = micro %d * accumulation %d * data %d; ZeRO %d, %s",
        *(batch.global_size, f"samples of {job.seq_len} tokens" if unit == "tokens" else unit),
        *(batch.micro_size, batch.accumulation, mesh.data, job.spec.zero.stage, job.spec.precision.dtype),
    )
    counts = num_parameters(engine)
    trained = f", and {counts.trained:,} are trained" if counts.trained < counts.total else ""
    message = "built on all ranks: %s parameters in all, of which rank 0 holds %s%s"
    log.info(message, f"{counts.total:,}", f"{counts.local:,}", trained)
    log_memory(engine, "of the model, built")


def log_memory(engine: Engine, when: str) -> None:
    """Log the memory of rank 0 and the maximum over ranks. All ranks must call it together."""
    found = collectives.gather_objects(_memory_bytes(engine), engine.groups.axis("pipe", "data", "tensor"))
    most = max(found)
    elsewhere = f"; the most is {most / 2**30:.2f} GiB, on rank {found.index(most)}" if most > found[0] else ""
    kind = "resident" if engine.deepspeed.device.type == "cpu" else "at most, on its device"
    log.info("memory %s: rank 0 has %.2f GiB %s%s", when, found[0] / 2**30, kind, elsewhere)


def _memory_bytes(engine: Engine) -> int:
    """Return this rank's peak allocation on its device; on a CPU, its process's resident set size."""
    device = engine.deepspeed.device
    if device.type == "cpu":
        return int(psutil.Process().memory_info().rss)
    return int(get_accelerator().max_memory_allocated(device.index))


def log_step(job: Job, record: Mapping[str, float], left_s: float) -> None:
    """Log a step's line of metrics.jsonl and the remaining time."""
    train, unit = job.spec.train, unit_of(job)
    held_out = f"  held-out {record['eval_loss']:.4f}" if "eval_loss" in record else ""
    held_out += f"  training {record['train_eval_loss']:.4f}" if "train_eval_loss" in record else ""
    log.info(
        "step %d/%d  loss %.4f  norm %.3f  lr %.3g  %.0f %s/s%s%s",
        *(record["step"], train.steps, record["loss"], record["grad_norm"], record["lr"]),
        *(record[f"{unit}_per_s"], unit, f"  eta {duration(left_s)}" if round(left_s) else "", held_out),
    )


def seconds_left(job: Job, record: Mapping[str, float], elapsed_s: float, first_step: int) -> float:
    """Return the remaining time of the run, at the mean pace of the steps since this start, without the first step.

    elapsed_s: seconds since the first step ended, including evaluations, checkpoints and hooks, which the remaining
        steps have, too.
    """
    step = int(record["step"])
    pace_s = elapsed_s / (step - first_step) if step > first_step else record["step_s"]
    return pace_s * (job.spec.train.steps - step)


def duration(seconds: float) -> str:
    """Format a duration like a clock.

    >>> duration(59.6), duration(4000), duration(200_000)
    ('0:01:00', '1:06:40', '2d 7:33:20')
    """
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    return (f"{days}d " if days else "") + f"{hour}:{minute:02}:{second:02}"
