"""ColossalAI's documented interface on top of dslpar: only the import lines of a ColossalAI program change.

    from dslpar.compat import colossalai                        # for: import colossalai
    import dslpar.compat.colossalai.nn as col_nn                # for: import colossalai.nn as col_nn
    from dslpar.compat.colossalai.core import global_context as gpc
    from dslpar.compat.colossalai.trainer import Trainer, hooks

    colossalai.launch_from_torch(config="config.py")            # or a dict; under any launcher
    model = colossalai.build_pipeline_model_from_cfg(dict(type="MyModel"), num_chunks=1)
    optimizer = torch.optim.Adam(model.parameters())
    engine, train_dataloader, _, _ = colossalai.initialize(model, optimizer, criterion, train_dataloader)

Modules have ColossalAI's names (`core`, `context`, `logging`, `nn`, `trainer`, `utils`, ...), and so do the modules in
them (`nn.lr_scheduler`, `utils.timer`). A name of ColossalAI that is not here raises an error that tells what to write.

As in ColossalAI, `launch` stores the run in a global context, where the other functions find it. The underlying
`dslpar.start` and `dslpar.initialize` have no global state: they pass a Run explicitly.
"""

from __future__ import annotations

from dslpar.core.requirements import explain_missing

if _MISSING := explain_missing("dslpar.compat.colossalai", "torch", "deepspeed"):
    raise ImportError(_MISSING, name="torch")

from dslpar.compat import missing
from dslpar.compat.builders import build_pipeline_model, build_pipeline_model_from_cfg
from dslpar.compat.colossalai import (
    amp,
    builder,
    context,
    core,
    engine,
    gemini,
    global_variables,
    logging,
    nn,
    pipeline,
    registry,
    tensor,
    trainer,
    utils,
    zero,
)
from dslpar.compat.context import ParallelMode, global_context
from dslpar.compat.initialize import initialize
from dslpar.compat.launch import get_default_parser, launch, launch_from_openmpi, launch_from_slurm, launch_from_torch
from dslpar.compat.schedules import InterleavedPipelineSchedule, NonPipelineSchedule, PipelineSchedule
from dslpar.distributed.stage_manager import PipelineStageManager
from dslpar.engine.gradient_handlers import BaseGradientHandler
from dslpar.layout.stages import distribute_layers
from dslpar.models.sequential import ModelFromConfig
from dslpar.schema.class_registry import GRADIENT_HANDLER, LAYERS, MODELS

__all__ = [
    "GRADIENT_HANDLER", "LAYERS", "MODELS", "BaseGradientHandler", "InterleavedPipelineSchedule", "ModelFromConfig",
    "NonPipelineSchedule", "ParallelMode", "PipelineSchedule", "PipelineStageManager", "amp", "build_pipeline_model",
    "build_pipeline_model_from_cfg", "builder", "context", "core", "distribute_layers", "engine", "gemini",
    "get_default_parser", "global_context", "global_variables", "initialize", "launch", "launch_from_openmpi",
    "launch_from_slurm", "launch_from_torch", "logging", "nn", "pipeline", "registry", "tensor", "trainer", "utils",
    "zero",
]  # fmt: skip

__version__ = "0.1.12"
"""Version of ColossalAI whose interface this is; programs compare it."""

missing.install()
__getattr__ = missing.names_of(__name__)
