"""ColossalAI's documented interface on top of dslpar: only the import lines of a ColossalAI program change.

    from dslpar.compat import colossalai                        # for: import colossalai
    from dslpar.compat.colossalai import MODELS, ModelFromConfig, ParallelMode, PipelineSchedule, global_context as gpc

    colossalai.launch_from_torch(config="config.py")            # or a dict; under any launcher
    model = colossalai.build_pipeline_model_from_cfg(dict(type="MyModel"), num_chunks=1)
    optimizer = torch.optim.Adam(model.parameters())
    engine, train_dataloader, _, _ = colossalai.initialize(model, optimizer, criterion, train_dataloader)

As in ColossalAI, `launch` stores the run in a global context, where the other functions find it. The underlying
`dslpar.start` and `dslpar.initialize` have no global state: they pass a Run explicitly.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from dslpar import api
from dslpar import layers as nn  # used as colossalai.nn.Linear2D; torch.nn keeps its full name here
from dslpar.api import Batches, Initialized, Run
from dslpar.compat.context import ParallelMode, global_context
from dslpar.compat.pipeline_part import PipelinePart
from dslpar.compat.schedules import InterleavedPipelineSchedule, NonPipelineSchedule, PipelineSchedule
from dslpar.distributed.stage_manager import PipelineStageManager
from dslpar.engine import model as build
from dslpar.engine.gradient_handlers import BaseGradientHandler
from dslpar.engine.user_optimizer import OptimizerOrFactory
from dslpar.layout.stages import distribute_layers
from dslpar.linter.check import Source
from dslpar.models import LayeredModel
from dslpar.models.sequential import ModelFromConfig, Stage
from dslpar.schema.class_registry import GRADIENT_HANDLER, LAYERS, MODELS

__all__ = [
    "GRADIENT_HANDLER", "LAYERS", "MODELS", "BaseGradientHandler", "InterleavedPipelineSchedule", "ModelFromConfig",
    "NonPipelineSchedule", "ParallelMode", "PipelineSchedule", "PipelineStageManager", "build_pipeline_model",
    "build_pipeline_model_from_cfg", "distribute_layers", "get_default_parser", "global_context", "initialize",
    "launch", "launch_from_openmpi", "launch_from_slurm", "launch_from_torch", "nn",
]  # fmt: skip


# ---- launch ----


def launch(
    config: Source,
    rank: int,
    world_size: int,
    host: str,
    port: int,
    backend: str | None = None,
    local_rank: int | None = None,
    seed: int | None = None,
) -> Run:
    """Start the run as rank `rank`; see `launch_from_torch`. Without `local_rank` all ranks are on one host."""
    place = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": rank if local_rank is None else local_rank}
    os.environ.update({name: str(value) for name, value in place.items()})
    return _launch_at(host, port, config, backend, seed)


def launch_from_torch(config: Source, backend: str | None = None, seed: int | None = None) -> Run:
    """Start the run, with this rank's place from the environment of torchrun or any other launcher.

    config: the path of a config file, or a dict of its sections; the section `model` may be missing.
    backend: if given, it must be the backend that dslpar uses on this device.
    seed: overrides the config's `train.seed`, with which torch is seeded, as in ColossalAI's `launch`.

    Raises:
        DslparError: the config has errors for this world, or is not the same on all ranks.
        ValueError: the device has another backend.
    """
    run = api.start(config, [] if seed is None else [f"train.seed={seed}"])
    if backend not in (None, dist.get_backend()):
        raise ValueError(f"backend is {backend!r}, but this device uses {dist.get_backend()!r}: leave backend out")
    global_context.set_run(run)
    return run


def launch_from_slurm(config: Source, host: str, port: int, backend: str | None = None, seed: int | None = None) -> Run:
    """Start the run under srun; see `launch_from_torch`."""
    return _launch_at(host, port, config, backend, seed)


def launch_from_openmpi(
    config: Source, host: str, port: int, backend: str | None = None, seed: int | None = None
) -> Run:
    """Start the run under mpirun; see `launch_from_torch`."""
    return _launch_at(host, port, config, backend, seed)


def _launch_at(host: str, port: int, config: Source, backend: str | None, seed: int | None) -> Run:
    os.environ.update(MASTER_ADDR=host, MASTER_PORT=str(port))
    return launch_from_torch(config, backend, seed)


def get_default_parser() -> argparse.ArgumentParser:
    """Return a parser for a program's command line, with the arguments that `launch` takes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", help="the config file")
    for name in ("rank", "local_rank", "world_size", "port"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--host", help="the host of rank 0")
    parser.add_argument("--backend", help="must be the device's own backend, the default")
    return parser


# ---- models ----


def build_pipeline_model_from_cfg(
    config: Mapping[str, object], num_chunks: int = 1, partition_method: str | None = None, verbose: bool = False
) -> PipelinePart:
    """Return this rank's part of the model that dict(type=..., ...) describes.

    See `dslpar.build_pipeline_model_from_cfg`.
    """
    model = build.build_pipeline_model_from_cfg(config, num_chunks, partition_method, verbose)
    return PipelinePart(model, global_context.run)


def build_pipeline_model(
    layers: torch.nn.Sequential, num_chunks: int = 1, partition_method: str | None = None, verbose: bool = False
) -> PipelinePart:
    """Return this rank's part of a list of modules that already exist; see `dslpar.build_pipeline_model`."""
    model = build.build_pipeline_model(layers, num_chunks, partition_method, verbose)
    return PipelinePart(model, global_context.run)


# ---- training ----


def initialize(
    model: torch.nn.Module | LayeredModel,
    optimizer: OptimizerOrFactory | None = None,
    criterion: Callable[[Any, Any], torch.Tensor] | None = None,
    train_dataloader: Batches | None = None,
    test_dataloader: Batches | None = None,
    lr_scheduler: Any = None,
) -> Initialized:
    """Return the launched run's engine, both data loaders and the LR scheduler; see `dslpar.initialize`.

    As in ColossalAI, `model` is this rank's stage if there is a pipeline, and the whole model otherwise. If a rank has
    several chunks, `model` is an nn.ModuleList of them.
    """
    run = global_context.run
    if isinstance(model, PipelinePart):
        model = model.model
    elif isinstance(model, torch.nn.Module) and run.num_stages > 1:
        model = Stage(*model) if isinstance(model, torch.nn.ModuleList) else Stage(model)
    return api.initialize(
        run,
        model=model,
        optimizer=optimizer,
        criterion=criterion,
        train_data=train_dataloader,
        eval_data=test_dataloader,
        lr_scheduler=lr_scheduler,
    )
