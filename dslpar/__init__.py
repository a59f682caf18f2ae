"""dslpar: data, tensor and pipeline parallel training on DeepSpeed from one Python config file.

The names below are imported lazily, so that `import dslpar` costs nothing and `dslpar lint` imports no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from dslpar.core import requirements
from dslpar.core.version import VERSION

__version__ = VERSION

if TYPE_CHECKING:
    from dslpar.api import Run, initialize, prove, start
    from dslpar.compat.schedules import InterleavedPipelineSchedule, NonPipelineSchedule, PipelineSchedule
    from dslpar.core.errors import DslparError, Finding, Location
    from dslpar.distributed.stage_manager import PipelineStageManager
    from dslpar.engine.gradient_handlers import BaseGradientHandler
    from dslpar.engine.model import build_pipeline_model, build_pipeline_model_from_cfg
    from dslpar.language.lazy import L, LazyCall, get_config, instantiate
    from dslpar.layout.stages import distribute_layers
    from dslpar.linter.check import lint, load, resolve
    from dslpar.models.sequential import ModelFromConfig, Stage
    from dslpar.schema.class_registry import GRADIENT_HANDLER, LAYERS, MODELS
    from dslpar.training.arguments import arguments
    from dslpar.training.events import Event
    from dslpar.training.fit import fit

_HOMES = {
    "load": ("dslpar.linter.check", "load"),
    "lint": ("dslpar.linter.check", "lint"),
    "resolve": ("dslpar.linter.check", "resolve"),
    "LazyCall": ("dslpar.language.lazy", "LazyCall"),
    "L": ("dslpar.language.lazy", "L"),
    "get_config": ("dslpar.language.lazy", "get_config"),
    "instantiate": ("dslpar.language.lazy", "instantiate"),
    "DslparError": ("dslpar.core.errors", "DslparError"),
    "Finding": ("dslpar.core.errors", "Finding"),
    "Location": ("dslpar.core.errors", "Location"),
    "start": ("dslpar.api", "start"),
    "Run": ("dslpar.api", "Run"),
    "initialize": ("dslpar.api", "initialize"),
    "prove": ("dslpar.api", "prove"),
    "arguments": ("dslpar.training.arguments", "arguments"),
    "fit": ("dslpar.training.fit", "fit"),
    "Event": ("dslpar.training.events", "Event"),
    "Stage": ("dslpar.models.sequential", "Stage"),
    "ModelFromConfig": ("dslpar.models.sequential", "ModelFromConfig"),
    "build_pipeline_model": ("dslpar.engine.model", "build_pipeline_model"),
    "build_pipeline_model_from_cfg": ("dslpar.engine.model", "build_pipeline_model_from_cfg"),
    "MODELS": ("dslpar.schema.class_registry", "MODELS"),
    "LAYERS": ("dslpar.schema.class_registry", "LAYERS"),
    "GRADIENT_HANDLER": ("dslpar.schema.class_registry", "GRADIENT_HANDLER"),
    "BaseGradientHandler": ("dslpar.engine.gradient_handlers", "BaseGradientHandler"),
    "PipelineStageManager": ("dslpar.distributed.stage_manager", "PipelineStageManager"),
    "distribute_layers": ("dslpar.layout.stages", "distribute_layers"),
    "InterleavedPipelineSchedule": ("dslpar.compat.schedules", "InterleavedPipelineSchedule"),
    "PipelineSchedule": ("dslpar.compat.schedules", "PipelineSchedule"),
    "NonPipelineSchedule": ("dslpar.compat.schedules", "NonPipelineSchedule"),
}

__all__ = [
    "GRADIENT_HANDLER", "LAYERS", "MODELS", "BaseGradientHandler", "DslparError", "Event", "Finding",
    "InterleavedPipelineSchedule", "L", "LazyCall", "Location", "ModelFromConfig", "NonPipelineSchedule",
    "PipelineSchedule", "PipelineStageManager", "Run", "Stage", "arguments", "build_pipeline_model",
    "build_pipeline_model_from_cfg", "distribute_layers", "fit", "get_config", "initialize", "instantiate", "lint",
    "load", "prove", "resolve", "start",
]  # fmt: skip


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'dslpar' has no attribute {name!r}")
    module, attribute = _HOMES[name]
    try:
        return getattr(import_module(module), attribute)
    except ModuleNotFoundError as error:
        raise requirements.reraise(error, f"dslpar.{name}") from None
