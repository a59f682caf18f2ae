"""dslpar: one Python file says how a model is spread over a cluster; DeepSpeed runs it.

The names below are loaded at first use, so that `import dslpar` costs nothing and `dslpar lint` imports no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from dslpar.config.lazy import L, LazyCall, get_config, instantiate
    from dslpar.errors import DslparError, Finding, Location
    from dslpar.flow import job_of as resolve
    from dslpar.flow import lint, load
    from dslpar.foreign import build_pipeline_model, build_pipeline_model_from_cfg
    from dslpar.gradient import BaseGradientHandler
    from dslpar.models.sequential import ModelFromConfig, Stage
    from dslpar.program import Run, initialize, start
    from dslpar.registry import GRADIENT_HANDLER, LAYERS, MODELS
    from dslpar.schedules import NonPipelineSchedule, PipelineSchedule

_HOMES = {
    "load": ("dslpar.flow", "load"),
    "lint": ("dslpar.flow", "lint"),
    "resolve": ("dslpar.flow", "job_of"),
    "LazyCall": ("dslpar.config.lazy", "LazyCall"),
    "L": ("dslpar.config.lazy", "L"),
    "get_config": ("dslpar.config.lazy", "get_config"),
    "instantiate": ("dslpar.config.lazy", "instantiate"),
    "DslparError": ("dslpar.errors", "DslparError"),
    "Finding": ("dslpar.errors", "Finding"),
    "Location": ("dslpar.errors", "Location"),
    "start": ("dslpar.program", "start"),
    "Run": ("dslpar.program", "Run"),
    "initialize": ("dslpar.program", "initialize"),
    "Stage": ("dslpar.models.sequential", "Stage"),
    "ModelFromConfig": ("dslpar.models.sequential", "ModelFromConfig"),
    "build_pipeline_model": ("dslpar.foreign", "build_pipeline_model"),
    "build_pipeline_model_from_cfg": ("dslpar.foreign", "build_pipeline_model_from_cfg"),
    "MODELS": ("dslpar.registry", "MODELS"),
    "LAYERS": ("dslpar.registry", "LAYERS"),
    "GRADIENT_HANDLER": ("dslpar.registry", "GRADIENT_HANDLER"),
    "BaseGradientHandler": ("dslpar.gradient", "BaseGradientHandler"),
    "PipelineSchedule": ("dslpar.schedules", "PipelineSchedule"),
    "NonPipelineSchedule": ("dslpar.schedules", "NonPipelineSchedule"),
}

__all__ = [
    "GRADIENT_HANDLER", "LAYERS", "MODELS", "BaseGradientHandler", "DslparError", "Finding", "L", "LazyCall",
    "Location", "ModelFromConfig", "NonPipelineSchedule", "PipelineSchedule", "Run", "Stage", "build_pipeline_model",
    "build_pipeline_model_from_cfg", "get_config", "initialize", "instantiate", "lint", "load", "resolve", "start",
]  # fmt: skip


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'dslpar' has no attribute {name!r}")
    module, attribute = _HOMES[name]
    return getattr(import_module(module), attribute)
