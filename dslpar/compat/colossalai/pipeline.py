"""ColossalAI's `colossalai.pipeline`."""

from __future__ import annotations

from dslpar.compat.missing import names_of
from dslpar.compat.pipelinable import PipelinableContext
from dslpar.distributed.stage_manager import PipelineStageManager

__all__ = ["PipelinableContext", "PipelineStageManager"]

__path__: list[str] = []
__getattr__ = names_of(__name__)
