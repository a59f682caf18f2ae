"""DeepSpeed's configuration of a Job. This is the only module that writes DeepSpeed's keys.

A key is written explicitly in two cases. Either DeepSpeed's default differs from the config's value (clipping is on by
default, at 1.0), or DeepSpeed's default is wrong for dslpar. `CHOICES` lists the keys of the second case, with the
reasons that `dslpar config --explain` prints.

    >>> from dslpar.layout.resolve import resolve
    >>> spec = sections.Spec(model=sections.OtherModel(target="Sequential"))
    >>> ds_config(resolve(spec, world_size=4))["train_batch_size"]
    4
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from dslpar.layout.inferred_value import InferredValue
from dslpar.layout.resolve import Job, offloads, run_name
from dslpar.schema import sections

Config = dict[str, Any]

CHOICES: Mapping[str, InferredValue] = {
    "steps_per_print": InferredValue(
        None, "one more than the steps: dslpar reports them, DeepSpeed does not", ("train.steps",)
    ),
    "timers.throughput.enabled": InferredValue(
        False, "dslpar measures throughput; DeepSpeed's timer waits for the device twice per micro-batch", how="default"
    ),
    "optimizer.params.torch_adam": InferredValue(
        True,
        "torch's own Adam, since DeepSpeed's fused Adam is compiled at the first start; if the optimizer is offloaded "
        "from a device, DeepSpeedCPUAdam replaces it if its op can be built, and the log names the one used",
        ("optimizer.type",),
    ),
    "optimizer.params.fused": InferredValue(
        True,
        "one kernel per step, on CPUs and for offloaded states too, where only a pipeline with ZeRO runs without it; "
        "torch's default passes over all states a dozen times",
        ("optimizer.type",),
    ),
    "optimizer.params.adam_w_mode": InferredValue(
        False, "with True, DeepSpeed's default, its Adam is AdamW", ("optimizer.type",)
    ),
    "zero_optimization.use_multi_rank_bucket_allreduce": InferredValue(
        False, "DeepSpeed's default, True, sends 50 % more", ("zero.stage",)
    ),
    "zero_optimization.reduce_bucket_size": InferredValue(
        40_000_000,
        "elements: a bucket is reduced while the next one fills; DeepSpeed's default, 500 million, makes one bucket of "
        "all",
        ("zero.stage",),
    ),
    "zero_optimization.allgather_bucket_size": InferredValue(
        40_000_000,
        "elements: a bucket of weights is gathered while the layers before it run; DeepSpeed's default, 500 million, "
        "makes one bucket of all",
        ("zero.overlap_param_gather",),
    ),
    "data_types.grad_accum_dtype": InferredValue(
        "fp32",
        "gradients of micro-batches are summed in fp32, not in the model's type with its 8 or 11 bits",
        ("precision.dtype", "zero.stage"),
    ),
    "communication_data_type": InferredValue(
        "fp32",
        "replicas' gradients are summed in fp32 too: in bf16, each hop of a ring all-reduce would round the sum",
        ("precision.dtype", "zero.stage"),
    ),
    "seq_parallel_communication_data_type": InferredValue(
        "fp32",
        "the same as communication_data_type: DeepSpeed has a second key for ranks with equal weights and different "
        "tokens; what DeepSpeed itself reduces at ZeRO 1 and 2 is then sent in fp32",
        ("precision.dtype", "zero.stage", "parallel.context.size", "parallel.tensor.depth"),
    ),
    "zero_allow_untested_optimizer": InferredValue(
        True, "this optimizer works elementwise, so ZeRO may shard its states", ("optimizer.type", "zero.stage")
    ),
    "zero_force_ds_cpu_optimizer": InferredValue(
        False,
        "dslpar builds this optimizer; with True, DeepSpeed would refuse it",
        ("optimizer.type", "zero.offload_optimizer.device"),
    ),
    "pipeline.pipe_partitioned": InferredValue(
        False,
        "True assumes that all ranks of a tensor group hold equal activations",
        ("parallel.pipeline.size",),
    ),
    "pipeline.grad_partitioned": InferredValue(
        False,
        "True assumes that all ranks of a tensor group hold equal gradients",
        ("parallel.pipeline.size",),
    ),
}
"""DeepSpeed keys that dslpar chooses, by dotted path: the value, the reason, and the config keys that it depends on."""


def ds_config(job: Job) -> Config:
    """Return DeepSpeed's configuration of this job as plain JSON values; the raw `deepspeed` section is merged last."""
    spec, zero = job.spec, job.spec.zero
    # DeepSpeed's default of use_multi_rank_bucket_allreduce, True, sends 3 (N-1)/N parameters per step instead of
    # 2 (N-1)/N. Buckets have Megatron-LM's minimum size: a bucket takes some ms on a network, and a model of billions
    # of parameters has many.
    names = ["use_multi_rank_bucket_allreduce", "reduce_bucket_size"]
    names += ["allgather_bucket_size"] if overlaps_param_gather(spec) else []
    buckets = _choices(*(f"zero_optimization.{name}" for name in names)) if zero.stage in (1, 2) else {}
    config = {
        "train_batch_size": job.batch.global_size,
        "train_micro_batch_size_per_gpu": job.batch.micro_size,
        "gradient_accumulation_steps": job.batch.accumulation,
        # 0.0 turns clipping off, which must be written: DeepSpeed's default is 1.0.
        "gradient_clipping": spec.train.clip_grad_norm or 0.0,
        # Not None: DeepSpeed's wall_clock_breakdown divides by it.
        "steps_per_print": spec.train.steps + 1,
        "timers": {"throughput": _choices("timers.throughput.enabled")},
        **_optimizer(spec),
        "zero_optimization": {"stage": zero.stage, **buckets, **zero.extra},
        **_precision(spec),
        **_monitors(job),
    }
    if zero.stage and isinstance(spec.optimizer, sections.SGD | sections.OtherOptimizer):
        config |= _choices("zero_allow_untested_optimizer")  # lint refuses optimizers that are not elementwise
    if job.mesh.pipe > 1:
        config["pipeline"] = _choices("pipeline.pipe_partitioned", "pipeline.grad_partitioned")
    merged = merge(config, spec.deepspeed)
    if job.mesh.tensor.zero_over_d:  # DeepSpeed has a separate key for sequence parallelism
        merged["seq_parallel_communication_data_type"] = merged.get("communication_data_type", spec.precision.dtype)
    return merged


def overlaps_reduction(spec: sections.Spec) -> bool:
    """Return whether dslpar reduces gradients during the backward; if not, DeepSpeed acts as `overlap_comm` says.

    dslpar does so for ZeRO 1 and 2 only, since DeepSpeed's ZeRO 3 overlaps by itself. Offloading the optimizer turns
    the overlap off. So does False for `overlap_comm`, `reduce_scatter` or `contiguous_gradients`, and True for
    `use_multi_rank_bucket_allreduce`, all in the section `zero`.
    """
    zero = spec.zero.extra
    off = any(zero.get(name) is False for name in ("overlap_comm", "reduce_scatter", "contiguous_gradients"))
    all_reduces = bool(zero.get("use_multi_rank_bucket_allreduce"))
    return spec.zero.stage in (1, 2) and not (off or all_reduces or offloads(spec, "optimizer"))


def keeps_gradients(spec: sections.Spec) -> bool:
    """Return whether each rank keeps its whole gradient until the end of a step's last backward."""
    return spec.zero.stage == 0 or (spec.zero.stage == 1 and overlaps_reduction(spec))


def overlaps_param_gather(spec: sections.Spec) -> bool:
    """Return whether dslpar gathers weights during the next forward; else DeepSpeed does so before its step returns."""
    return spec.zero.overlap_param_gather and spec.zero.stage in (1, 2)


def merge(base: Mapping[str, object], override: Mapping[str, object]) -> Config:
    """Merge `override` recursively into a copy of `base`; tuples become lists."""
    result = {key: _plain(value) for key, value in base.items()}
    for key, value in override.items():
        below = result.get(key)
        both = isinstance(below, Mapping) and isinstance(value, Mapping)
        result[key] = merge(below, value) if both else _plain(value)  # type: ignore[arg-type]
    return result


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, tuple | list) else value


def _choices(*paths: str) -> Config:
    return {path.rpartition(".")[2]: CHOICES[path].value for path in paths}


def _optimizer(spec: sections.Spec) -> Config:
    optimizer = spec.optimizer
    if isinstance(optimizer, sections.OtherOptimizer):
        # dslpar.engine.optimizers makes the optimizer; DeepSpeed offloads torch's optimizers only if this key is off.
        return _choices("zero_force_ds_cpu_optimizer") if offloads(spec, "optimizer") else {}
    params: Config = {"lr": optimizer.lr, "weight_decay": optimizer.weight_decay}
    if isinstance(optimizer, sections.SGD):
        params |= {"momentum": optimizer.momentum} | ({"nesterov": True} if optimizer.nesterov else {})
    else:
        betas = [float(beta) for beta in optimizer.betas]  # torch refuses a mix of int and float
        params |= {"betas": betas, "eps": optimizer.eps}
        params |= {"amsgrad": True} if optimizer.amsgrad else {}
        # DeepSpeed's fused Adam is compiled at the first start, which takes minutes without a GPU. torch's is not.
        params |= _choices("optimizer.params.torch_adam", "optimizer.params.fused")
        params |= _choices("optimizer.params.adam_w_mode") if isinstance(optimizer, sections.Adam) else {}
    return {"optimizer": {"type": type(optimizer).__name__, "params": params}}


def _precision(spec: sections.Spec) -> Config:
    dtype = spec.precision.dtype
    if dtype == "fp32":
        return {}
    config: Config = {dtype: {"enabled": True, **spec.precision.extra}}
    if spec.zero.stage:
        config["data_types"] = _choices("data_types.grad_accum_dtype")
    if spec.zero.stage and dtype == "bf16":  # fp16 has more mantissa bits, and a loss scale for its range
        config |= _choices("communication_data_type")
    return config


def _monitors(job: Job) -> Config:
    """Return DeepSpeed's sections for the enabled monitors."""
    monitor, name = job.spec.monitor, run_name(job.path)
    config: Config = {
        key: {
            "enabled": True,
            "output_path": section.output_path or os.path.join(job.output_dir, folder),
            "job_name": section.job_name or name,
        }
        for key, section, folder in (
            ("csv_monitor", monitor.csv, "csv"),
            ("tensorboard", monitor.tensorboard, "tensorboard"),
        )
        if section is not None and section.enabled
    }
    if (wandb := monitor.wandb) is not None and wandb.enabled:
        accounts = {"group": wandb.group, "team": wandb.team}
        given = {key: value for key, value in accounts.items() if value is not None}
        config["wandb"] = {"enabled": True, "project": wandb.project or name, **given}
    return config
