"""ColossalAI's `colossalai.engine`, with its schedules and wrappers for gradient accumulation."""

from __future__ import annotations

from dslpar.compat.data_loader import GradAccumDataloader
from dslpar.compat.engine import ColossalaiEngine as Engine
from dslpar.compat.lr_schedulers import GradAccumLrSchedulerByStep
from dslpar.compat.missing import names_of
from dslpar.compat.schedules import InterleavedPipelineSchedule, NonPipelineSchedule, PipelineSchedule
from dslpar.engine.gradient_handlers import BaseGradientHandler

__all__ = [
    "BaseGradientHandler", "Engine", "GradAccumDataloader", "GradAccumLrSchedulerByStep",
    "InterleavedPipelineSchedule", "NonPipelineSchedule", "PipelineSchedule",
]  # fmt: skip

__path__: list[str] = []
__getattr__ = names_of(__name__)
