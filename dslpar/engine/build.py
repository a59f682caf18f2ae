"""From a Job to an Engine: the model, its optimizer and its schedule, in DeepSpeed's hands.

engine = build(job, Groups(job.mesh))
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from torch import nn

from dslpar.core.catalog import raise_finding
from dslpar.distributed import deepspeed_patches
from dslpar.distributed.groups import Groups, Mpu
from dslpar.engine import gradient_handlers, optimizers, partition
from dslpar.engine import pipeline_module as engine_pipeline_module
from dslpar.engine.engine import Engine
from dslpar.engine.user_optimizer import MakesOptimizer, optimizer_here
from dslpar.layers.parameter import Layer
from dslpar.layout.deepspeed_config import ds_config
from dslpar.layout.resolve import Job
from dslpar.models import LayeredModel, LayerSpec, module_of
from dslpar.models.build import model_of
from dslpar.models.layered import Finish, Loss


def build(
    job: Job,
    groups: Groups,
    *,
    model: LayeredModel | None = None,
    optimizer: MakesOptimizer | None = None,
    lr_scheduler: Any = None,
    all_counted: bool = False,
) -> Engine:
    """The model, its optimizer and its schedule, in DeepSpeed's hands. All ranks must call it together.

    torch.distributed must run, also where one process trains by itself. What a program gives itself takes the place of
    the job's: `engine.job` says what runs.

    Raises:
        DslparError: the model's class is not there or no model, it cannot be cut as the job asks, or the device does
            not compute in `precision`.
    """
    deepspeed_patches.let_cpus_compute_fp16()
    _check_precision(job)
    deepspeed_patches.avoid_compiling()
    deepspeed_patches.forgive_old_names()
    deepspeed_patches.shard_gradients_of_bf16()
    model = model or model_of(job)
    handlers = gradient_handlers.handler_classes(job)
    job, layers = partition.decided(job, model, groups)
    loss = model.loss(groups)
    module = _module(job, layers, loss, groups)
    partition.check_module(job, module, groups)
    parameters = parameter_groups(module)
    if optimizer is not None:
        job, optimizer = optimizer_here(job, optimizer, module, parameters)
        optimizer = deepspeed_patches.with_lazy_state(optimizer)
    runner, *_ = deepspeed.initialize(
        model=module,
        model_parameters=parameters,
        mpu=None if job.mesh.pipe > 1 else Mpu(groups),
        optimizer=optimizer or optimizers.optimizer_of(job),
        lr_scheduler=lr_scheduler or optimizers.schedule_of(job),
        config=copy.deepcopy(ds_config(job)),  # DeepSpeed writes into it
        dist_init_required=False,
    )
    deepspeed_patches.forget_what_overflowed(runner)
    deepspeed_patches.norms_of_all_groups(runner, groups.axis("model"))
    if job.spec.zero.stage == 0 and job.spec.precision.dtype == "fp32":
        deepspeed_patches.compute_norm_without_zero(runner, groups.axis("model"))
    if job.spec.zero.stage == 3:
        deepspeed_patches.fetch_what_is_borrowed(_borrowed(module))
    gradient_handlers.install(runner, handlers)
    return Engine(job, groups, runner, loss, all_counted)


def parameter_groups(module: nn.Module) -> list[dict[str, Any]]:
    """Matrices, which decay, and the rest, which does not: biases and gains are no weights to shrink.

    Both on every rank, since ZeRO reduces the norm of each group by itself.
    """
    parameters = [p for p in module.parameters() if p.requires_grad]
    decay: dict[str, Any] = {"params": [p for p in parameters if _num_dims(p) >= 2]}
    rest = {"params": [p for p in parameters if _num_dims(p) < 2], "weight_decay": 0.0}
    return [group for group in (decay, rest) if group["params"]]


def _borrowed(module: nn.Module) -> Iterator[tuple[nn.Module, nn.Parameter]]:
    """(layer, a parameter of a layer within it that its forward reads)."""
    for layer in module.modules():
        if isinstance(layer, Layer):
            yield from ((layer, p) for p in layer.external_parameters())


def _num_dims(p: nn.Parameter) -> int:
    """Dims of the whole parameter: one that ZeRO 3 has sharded is an empty vector until it is used."""
    return len(getattr(p, "ds_shape", p.shape))


def _check_precision(job: Job) -> None:
    """What no linter can know: what this machine's accelerator computes in."""
    dtype, accelerator = job.spec.precision.dtype, get_accelerator()
    supported = {"fp16": accelerator.is_fp16_supported, "bf16": accelerator.is_bf16_supported}
    if dtype in supported and not supported[dtype]():
        message = f"DeepSpeed has no {dtype} on this device ({accelerator.device_name()})"
        hint = "choose another precision: 'fp32', 'bf16' or 'fp16'"
        raise_finding("PRE201", message, hint, job.path, "precision")


def _module(job: Job, layers: list[LayerSpec], loss: Loss, groups: Groups) -> nn.Module:
    seed, checkpointing = job.spec.train.seed, job.spec.activation_checkpoint
    interval = checkpointing.interval if checkpointing else 0
    if job.mesh.pipe == 1:
        return module_of(layers, groups, seed, interval, _sharded(job, groups) if job.spec.zero.stage == 3 else _whole)
    assert job.stages.counts is not None, "cut.decided has said"
    return engine_pipeline_module.pipeline_module(layers, job.stages.counts, groups, seed, loss, interval)


def _whole(layer: nn.Module) -> nn.Module:
    return layer


def _sharded(job: Job, groups: Groups) -> Finish:
    """ZeRO 3 shards each layer before the next one is built, in the type it computes in: no rank holds the model."""
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[job.spec.precision.dtype]
    how = {"data_parallel_group": groups.axis("data").group, "config_dict_or_path": ds_config(job), "mpu": Mpu(groups)}

    def shard(layer: nn.Module) -> nn.Module:
        if all(p.dim() for p in layer.parameters()):  # else cut.check_module refuses the layer, as it stands
            # DeepSpeed's first Init makes the group of zero_hpz_partition_size, and every other would make it again.
            made = deepspeed.utils.groups._get_zero_param_intra_parallel_group()
            deepspeed.zero.Init(module=layer.to(dtype), dtype=dtype, zero_param_parallel_group=made, **how)
        return layer

    return shard
