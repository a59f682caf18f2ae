"""Build the engine of a job: the model, its optimizer and its LR scheduler, run by DeepSpeed.

engine = build_engine(job, Groups(job.mesh))
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from torch import nn

from dslpar.core.catalog import raise_finding
from dslpar.distributed import deepspeed_patches, symmetric_memory
from dslpar.distributed.groups import Groups, Mpu
from dslpar.engine import deepspeed_patch_table, gradient_handlers, optimizers, partition
from dslpar.engine.compiled_layers import compile_layers, refuse_lossy_compiler
from dslpar.engine.engine import Engine
from dslpar.engine.expert_parallelism import register_experts, split_experts
from dslpar.engine.host_reads import HostReads
from dslpar.engine.loss_by_chunks import LossByChunks, loss_by_chunks
from dslpar.engine.model import model_from_job
from dslpar.engine.offloaded_adam import choose_adam
from dslpar.engine.pipeline_module import Pipeline, pipeline_module
from dslpar.engine.user_optimizer import OptimizerOrFactory, resolve_user_optimizer
from dslpar.engine.vector_reduction import defer_vectors
from dslpar.engine.whole_gradients import share_whole_gradients
from dslpar.layers.block import Block
from dslpar.layers.gradient_accumulation_fusion import enable_accumulation_fusion
from dslpar.layers.operand_shardings import prefetch_weights
from dslpar.layout.deepspeed_config import ds_config, overlaps_param_gather
from dslpar.layout.resolve import Job, offloads
from dslpar.models import LayeredModel, LayerSpec, assemble
from dslpar.models.layered import Finish, LayeredModule, Loss


def build_engine(
    job: Job,
    groups: Groups,
    *,
    model: LayeredModel | None = None,
    optimizer: OptimizerOrFactory | None = None,
    lr_scheduler: Any = None,
    all_counted: bool = False,
    engine_class: Callable[..., Engine] = Engine,
) -> Engine:
    """Build the engine of a job. All ranks must call it together.

    torch.distributed must be initialized, even for one process. A program's `model`, `optimizer` and `lr_scheduler`
    replace those of the job; `engine.job` is the job after that. `engine_class` takes the same arguments as Engine.

    Raises:
        DslparError: the model's class does not exist or is not a model, the model cannot be partitioned as the job
            asks, or the device does not compute in `precision`.
    """
    with deepspeed_patch_table.during_initialize():
        _check_device(job, groups)
        handlers = gradient_handlers.handler_classes(job)
        parts = _assemble(job, groups, model or model_from_job(job))
        job, module = parts.job, parts.module
        _choose_kernels(job, groups, module)
        job, ds_engine = _initialize(job, groups, module, optimizer, lr_scheduler)
    if getattr(ds_engine.optimizer, "use_grad_accum_attribute", False) and job.batch.accumulation > 1:
        enable_accumulation_fusion(module)
    late = defer_vectors(module, groups, job.spec)
    host_reads = HostReads(groups, ds_engine.device)
    deepspeed_patch_table.apply_after(deepspeed_patch_table.Built(job, groups, module, ds_engine, late, host_reads))
    gradient_handlers.install(ds_engine, handlers)  # last: handlers run first in a step, and norms see their result
    return engine_class(job, groups, ds_engine, parts.model, all_counted, host_reads, parts.by_chunks)


class _Parts(NamedTuple):
    """A model's layers on this rank, before they are passed to DeepSpeed."""

    job: Job
    """The job, with the layers' partition."""
    model: LayeredModel
    module: LayeredModule | Pipeline
    by_chunks: LossByChunks | None
    """The loss of `train.loss_chunks`, if the job uses it."""


def _check_device(job: Job, groups: Groups) -> None:
    """Refuse settings that this machine's accelerator does not support, which the linter cannot know."""
    dtype, accelerator = job.spec.precision.dtype, get_accelerator()
    supported = {"fp16": accelerator.is_fp16_supported, "bf16": accelerator.is_bf16_supported}
    if dtype in supported and not supported[dtype]():
        message = f"DeepSpeed has no {dtype} on this device ({accelerator.device_name()})"
        hint = "choose another precision: 'fp32', 'bf16' or 'fp16'"
        raise_finding("PRE201", message, hint, job.path, "precision")
    if job.mesh.tensor.symmetric_memory and not job.spec.train.compiles_layers:
        symmetric_memory.require(groups, torch.device(accelerator.current_device_name()))


def _assemble(job: Job, groups: Groups, model: LayeredModel) -> _Parts:
    """Partition the model's layers over stages, and build this rank's layers."""
    job, layers = partition.partition_layers(job, model, groups)
    by_chunks, layers = loss_by_chunks(job, model, groups, layers)
    module = _build_module(job, layers, model.loss(groups), groups)
    if (checkpointing := job.spec.activation_checkpoint) is not None:
        module.offloads_inputs = checkpointing.offload
        for block in (each for each in module.modules() if isinstance(each, Block)):
            block.mlp_chunks = checkpointing.mlp_chunks
    # Checked before DeepSpeed receives the module: in DeepSpeed, a stage without parameters raises only on its own
    # ranks, and the other ranks wait for them (DeepSpeed's issue 1522).
    partition.check_module(job, module, groups)
    return _Parts(job, model, module, by_chunks)


def _choose_kernels(job: Job, groups: Groups, module: LayeredModule | Pipeline) -> None:
    """Set how layers compute: compiled or not, with or without prefetching; scale whole gradients for ZeRO's sums."""
    if job.spec.train.compile:
        refuse_lossy_compiler()
    if job.spec.train.compiles_layers:
        compile_layers(module, job.spec.train.compile_backend)
    share_whole_gradients(module, groups)
    register_experts(module, groups)
    # Also set if False: a program may have run the same modules at another ZeRO stage before.
    prefetches = job.spec.zero.stage < 3 and not job.spec.train.compiles_layers
    # If weights are gathered during the forward, a layer's weights are complete only when the layer begins. A layer
    # then prefetches its own weights only.
    within = [layer for _, layer in module.built_layers()] if overlaps_param_gather(job.spec) else ()
    prefetch_weights(module, prefetches, dict.fromkeys(within))


def _initialize(
    job: Job,
    groups: Groups,
    module: LayeredModule | Pipeline,
    optimizer: OptimizerOrFactory | None,
    lr_scheduler: Any,
) -> tuple[Job, Any]:
    """Build DeepSpeed's engine; return it with the job, which a program's optimizer changes."""
    parameters = parameter_groups(module)
    if optimizer is not None:
        job, optimizer = resolve_user_optimizer(job, optimizer, module, parameters)
        optimizer = deepspeed_patches.without_eager_state(optimizer)
    config = _config_on_device(job)
    choose_adam(config, job, groups, module)
    ds_engine, *_ = deepspeed.initialize(
        model=module,
        model_parameters=parameters,
        mpu=None if job.mesh.pipe > 1 else Mpu(groups),  # a PipelineModule brings its own grid
        optimizer=optimizer or optimizers.optimizer_factory(job),
        lr_scheduler=lr_scheduler or optimizers.lr_scheduler_factory(job),
        config=config,
        dist_init_required=False,
    )
    return job, ds_engine


def parameter_groups(module: nn.Module) -> list[dict[str, Any]]:
    """Return two parameter groups: matrices, with weight decay, and biases and gains, without it.

    Experts that are divided over data ranks have two groups of their own. A group without parameters is left out.
    """
    parameters = [p for p in module.parameters() if p.requires_grad]
    decay: dict[str, Any] = {"params": [p for p in parameters if _num_dims(p) >= 2]}
    no_decay = {"params": [p for p in parameters if _num_dims(p) < 2], "weight_decay": 0.0}
    return split_experts(group for group in (decay, no_decay) if group["params"])


def _num_dims(p: nn.Parameter) -> int:
    """Return the number of dims of the whole parameter, which ZeRO 3 replaces by an empty vector between its uses."""
    return len(getattr(p, "ds_shape", p.shape))


def _config_on_device(job: Job) -> dict[str, Any]:
    """Return a copy of the config dict for DeepSpeed, which writes into it."""
    config = copy.deepcopy(ds_config(job))
    on_cpu = get_accelerator().device_name() == "cpu" or offloads(job.spec, "optimizer")
    if on_cpu and job.mesh.pipe > 1 and job.spec.zero.stage:
        # torch's fused CPU kernel rounds the end of a tensor, which does not fill a vector register, differently from
        # the rest. A tied weight has another offset in each stage's shard, so its copies would drift apart.
        config.get("optimizer", {"params": {}})["params"].pop("fused", None)
    return config


def _build_module(job: Job, layers: list[LayerSpec], loss_fn: Loss, groups: Groups) -> LayeredModule | Pipeline:
    seed, checkpointing = job.spec.train.seed, job.spec.activation_checkpoint
    interval = checkpointing.interval if checkpointing else 0
    if job.mesh.pipe == 1:
        finish = _zero3_sharding(job, groups) if job.spec.zero.stage == 3 else lambda layer: layer
        return assemble(layers, groups, seed, interval, finish)
    assert job.stages.counts is not None, "partition.partition_layers has set it"
    return pipeline_module(layers, job.stages.counts, job.chunks, groups, seed, loss_fn, interval)


def _zero3_sharding(job: Job, groups: Groups) -> Finish:
    """Return a function that shards a layer before the next one is built, so that no rank holds the whole model.

    It first converts the layer to the dtype in which it computes.
    """
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[job.spec.precision.dtype]

    def shard(layer: nn.Module) -> nn.Module:
        if all(p.dim() for p in layer.parameters()):  # else partition.check_module refuses the unsharded layer
            for p in layer.parameters():
                p.data = p.data.to(dtype if p.is_floating_point() else p.dtype)
            # Buffers, such as a batch norm's statistics, keep their dtype, as at other ZeRO stages. They move to the
            # device here, since zero.Init moves parameters only, and DeepSpeed does not move a module that it sharded.
            for part in layer.modules():
                for name, buffer in part._buffers.items():  # named_buffers skips a buffer's second name
                    if buffer is not None:
                        part._buffers[name] = buffer.to(get_accelerator().current_device_name())
            deepspeed.zero.Init(
                module=layer,
                dtype=dtype,
                data_parallel_group=groups.zero_axis.group,
                config_dict_or_path=ds_config(job),
                mpu=Mpu(groups),
                # The first Init creates the group of zero_hpz_partition_size; each later one would create it again.
                zero_param_parallel_group=deepspeed.utils.groups._get_zero_param_intra_parallel_group(),
            )
        return layer

    return shard
