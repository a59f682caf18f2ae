"""Numbers of a run for metrics.jsonl and the log: sizes, parameters, throughput, MFU, loss scale."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from deepspeed.accelerator import get_accelerator

from dslpar.distributed import collectives
from dslpar.engine.engine import Engine
from dslpar.forecast import flops
from dslpar.forecast.family import costs_of
from dslpar.layout.resolve import Job
from dslpar.reporting.logging import log
from dslpar.schema import sections
from dslpar.schema.datasets import ImageData


def throughput(job: Job, device: str, tokens_per_s: float) -> dict[str, float]:
    """Return each device's `tflops_per_s`, by the count of `mfu_causal`, and the MFUs; unknown ones are left out."""
    model = job.spec.model
    if not isinstance(model, sections.Model):
        return {}
    flops_per_token = costs_of(model).flops_per_token(model, job.seq_len)._asdict()
    per_device = {name: count * tokens_per_s / job.mesh.world_size for name, count in flops_per_token.items()}
    peak = flops.peak_flops_per_s(device, job.spec.precision.dtype)
    mfus = {name: rate / peak for name, rate in per_device.items()} if peak else {}
    return {"tflops_per_s": per_device["mfu_causal"] / 1e12, **mfus}


def unit_of(job: Job) -> str:
    """Return what is counted of a job's data."""
    return "images" if isinstance(job.spec.data, ImageData) else "tokens"


def sample_size(job: Job) -> int:
    """Return how many of these a sample is."""
    return 1 if unit_of(job) == "images" else job.seq_len


def progress(job: Job, consumed_samples: int, step_s: float) -> dict[str, float]:
    """Return how far the run is, and how fast: `tokens`, `step_s` and `tokens_per_s`; of images, `images_per_s`."""
    unit, size = unit_of(job), sample_size(job)
    done, in_step = consumed_samples * size, job.batch.global_size * size
    return {unit: done, "step_s": step_s, f"{unit}_per_s": in_step / step_s}


class ParameterCounts(NamedTuple):
    """How many parameters there are, padding included."""

    total: int
    """Distinct ones of the whole model."""
    trained: int
    """Those of them that are not frozen."""
    local: int
    """On this rank."""


def num_parameters(engine: Engine) -> ParameterCounts:
    """Count the parameters of the whole model, and of this rank. All ranks together."""
    parameters: list[Any] = list(engine.module.parameters())
    sizes = [getattr(p, "ds_numel", None) or p.numel() for p in parameters]  # ZeRO 3 leaves an empty tensor
    owned = [(size, p) for size, p in zip(sizes, parameters, strict=True) if p.tensor_model_parallel]
    counts = [sum(size for size, _ in owned), sum(size for size, p in owned if p.requires_grad)]
    # Over one replica: data ranks hold copies of the same parameters.
    summed = collectives.all_reduce(torch.tensor(counts, device=engine.deepspeed.device), engine.groups.axis("model"))
    total, trained = summed.tolist()
    return ParameterCounts(total, trained, sum(sizes))


def device_name(engine: Engine) -> str:
    """Return the name by which the driver knows this rank's device; "cpu" for a CPU."""
    device = engine.deepspeed.device
    if device.type == "cpu":
        return "cpu"
    return str(get_accelerator().get_device_properties(device.index).name)


def loss_scale(job: Job, engine: Engine) -> dict[str, float]:
    """Return the scale that the next step's loss is multiplied by, with fp16 alone."""
    return {"loss_scale": float(engine.deepspeed.optimizer.loss_scale)} if job.spec.precision.dtype == "fp16" else {}


def log_job(job: Job, engine: Engine) -> None:
    """Log what runs: its layout, batch, ZeRO stage and precision."""
    mesh, cuboid, batch = job.mesh, job.mesh.tensor, job.batch
    mode = f" ({cuboid.mode})" if cuboid.mode else ""
    log.info(
        "%s: world of %d = pipeline %d * data %d * tensor %d%s, on %s; written to %s",
        *(job.path, mesh.world_size, mesh.pipe, mesh.data, cuboid.size, mode, engine.deepspeed.device, job.output_dir),
    )
    samples = "images" if unit_of(job) == "images" else f"samples of {job.seq_len} tokens"
    log.info(
        "%d %s a step = micro %d * accumulation %d * data %d; ZeRO %d, %s",
        *(batch.global_size, samples, batch.micro_size, batch.accumulation, mesh.data),
        *(job.spec.zero.stage, job.spec.precision.dtype),
    )


def log_parameters(engine: Engine) -> None:
    """Log the number of parameters. All ranks together."""
    counts = num_parameters(engine)
    trained = f", and {counts.trained:,} are trained" if counts.trained < counts.total else ""
    message = "built on all ranks: %s parameters in all, of which rank 0 holds %s%s"
    log.info(message, f"{counts.total:,}", f"{counts.local:,}", trained)
