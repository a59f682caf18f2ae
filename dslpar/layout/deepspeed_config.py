"""From a Job to DeepSpeed's dict: the only file that knows DeepSpeed's keys; no torch, no DeepSpeed.

What DeepSpeed would default to without a word is written out where its default is not what the config says, as clipping
(on, at 1.0), or is not what is right here: see `CHOICES`, which has the reasons that `dslpar config --explain` tells.

    >>> from dslpar.layout.resolve import resolve
    >>> spec = schema_sections.Spec(model=schema_sections.OtherModel(target="Sequential"))
    >>> ds_config(resolve(spec, world_size=4))["train_batch_size"]
    4
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from dslpar.layout.decision import Decision
from dslpar.layout.resolve import Job, offloads, run_name
from dslpar.schema import sections as schema_sections

Section = dict[str, Any]

CHOICES: Mapping[str, Decision] = {
    "steps_per_print": Decision(
        None, "one more than the steps: dslpar reports them, DeepSpeed does not", ("train.steps",)
    ),
    "optimizer.params.torch_adam": Decision(
        True, "torch's own Adam: DeepSpeed's fused one is compiled at the first start", ("optimizer.type",)
    ),
    "optimizer.params.adam_w_mode": Decision(
        False, "what DeepSpeed calls Adam is AdamW otherwise", ("optimizer.type",)
    ),
    "zero_optimization.use_multi_rank_bucket_allreduce": Decision(
        False, "DeepSpeed's default, True, sends half as much again", ("zero.stage",)
    ),
    "data_types.grad_accum_dtype": Decision(
        "fp32",
        "micro-batches add up in fp32, not in the 8 or 11 bits of the model's type",
        ("precision.dtype", "zero.stage"),
    ),
    "zero_allow_untested_optimizer": Decision(
        True, "this optimizer acts elementwise, so ZeRO's shards of it are right", ("optimizer.type", "zero.stage")
    ),
    "zero_force_ds_cpu_optimizer": Decision(
        False,
        "dslpar makes this optimizer; DeepSpeed would refuse it",
        ("optimizer.type", "zero.offload_optimizer.device"),
    ),
    "pipeline.pipe_partitioned": Decision(
        False,
        "True would take activations for copies of each other on the whole tensor group",
        ("parallel.pipeline.size",),
    ),
    "pipeline.grad_partitioned": Decision(
        False,
        "True would take gradients for copies of each other on the whole tensor group",
        ("parallel.pipeline.size",),
    ),
}
"""Keys that follow from no single key of the config, by their dotted path: the value, why, and where it applies."""


def _chosen(*paths: str) -> Section:
    return {path.rpartition(".")[2]: CHOICES[path].value for path in paths}


def ds_config(job: Job) -> Section:
    """DeepSpeed's configuration of this job: plain JSON values, the raw `deepspeed` section merged last."""
    config = {
        "train_batch_size": job.batch.global_size,
        "train_micro_batch_size_per_gpu": job.batch.micro_size,
        "gradient_accumulation_steps": job.batch.accumulation,
        "gradient_clipping": job.spec.train.clip_grad_norm or 0.0,
        # Not None, by which DeepSpeed's wall_clock_breakdown would divide.
        "steps_per_print": job.spec.train.steps + 1,
        **_optimizer(job),
        "zero_optimization": _zero(job.spec.zero),
        **_precision(job.spec),
        **_monitors(job),
    }
    if job.spec.zero.stage and isinstance(job.spec.optimizer, schema_sections.SGD | schema_sections.OtherOptimizer):
        config |= _chosen("zero_allow_untested_optimizer")  # those that do not act elementwise, lint refuses
    if job.mesh.pipe > 1:
        config["pipeline"] = _chosen("pipeline.pipe_partitioned", "pipeline.grad_partitioned")
    return merged(config, job.spec.deepspeed)


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> Section:
    """`base` with `over` laid on it, mapping by mapping; neither is changed, and tuples come out as lists."""
    result = {key: _plain(value) for key, value in base.items()}
    for key, value in over.items():
        below = result.get(key)
        both = isinstance(below, Mapping) and isinstance(value, Mapping)
        result[key] = merged(below, value) if both else _plain(value)  # type: ignore[arg-type]
    return result


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, tuple | list) else value


def _adam_params(optimizer: Any) -> Section:
    betas = [float(beta) for beta in optimizer.betas]  # torch takes no mix of 0 and 0.9
    # DeepSpeed's fused Adam is compiled at the first start, for minutes where there is no GPU.
    own = _chosen("optimizer.params.torch_adam")
    return {"betas": betas, "eps": optimizer.eps, **_if_set(optimizer, "amsgrad"), **own}


def _if_set(optimizer: Any, name: str) -> Section:
    return {name: True} if getattr(optimizer, name) else {}


_OWN_PARAMS: Mapping[type, Callable[[Any], Section]] = {
    schema_sections.AdamW: _adam_params,
    schema_sections.Adam: lambda adam: _adam_params(adam) | _chosen("optimizer.params.adam_w_mode"),
    schema_sections.SGD: lambda sgd: {"momentum": sgd.momentum, **_if_set(sgd, "nesterov")},
}


def _optimizer(job: Job) -> Section:
    optimizer = job.spec.optimizer
    if isinstance(optimizer, schema_sections.OtherOptimizer):
        # dslpar.engine.optimizers makes it; torch's are offloaded only where this is off.
        return _chosen("zero_force_ds_cpu_optimizer") if offloads(job.spec, "optimizer") else {}
    own = _OWN_PARAMS[type(optimizer)](optimizer)
    params = {"lr": optimizer.lr, "weight_decay": optimizer.weight_decay, **own}
    return {"optimizer": {"type": type(optimizer).__name__, "params": params}}


def _zero(zero: schema_sections.Zero) -> Section:
    # True, the default, sends 3 (N-1)/N parameters a step where 2 (N-1)/N do.
    own = _chosen("zero_optimization.use_multi_rank_bucket_allreduce") if zero.stage in (1, 2) else {}
    return {"stage": zero.stage, **own, **zero.extra}


def _precision(spec_: schema_sections.Spec) -> Section:
    dtype = spec_.precision.dtype
    if dtype == "fp32":
        return {}
    section: Section = {dtype: {"enabled": True, **spec_.precision.extra}}
    if spec_.zero.stage:
        section["data_types"] = _chosen("data_types.grad_accum_dtype")
    return section


def _monitors(job: Job) -> Section:
    """DeepSpeed's sections of the monitors that are on."""
    monitor, name = job.spec.monitor, run_name(job.path)
    files = {"csv_monitor": (monitor.csv, "csv"), "tensorboard": (monitor.tensorboard, "tensorboard")}
    sections: Section = {
        key: {
            "enabled": True,
            "output_path": asked.output_path or os.path.join(job.output_dir, folder),
            "job_name": asked.job_name or name,
        }
        for key, (asked, folder) in files.items()
        if asked is not None and asked.enabled
    }
    if monitor.wandb is not None and monitor.wandb.enabled:
        given = {"group": monitor.wandb.group, "team": monitor.wandb.team}
        given = {key: value for key, value in given.items() if value is not None}
        sections["wandb"] = {"enabled": True, "project": monitor.wandb.project or name, **given}
    return sections
