"""ColossalAI's `colossalai.builder`."""

from __future__ import annotations

from dslpar.compat.builders import build_pipeline_model, build_pipeline_model_from_cfg
from dslpar.compat.missing import names_of

__all__ = ["build_pipeline_model", "build_pipeline_model_from_cfg"]

__path__: list[str] = []
__getattr__ = names_of(__name__)
