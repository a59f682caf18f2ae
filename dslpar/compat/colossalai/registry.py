"""ColossalAI's `colossalai.registry`."""

from __future__ import annotations

from dslpar.compat.missing import names_of
from dslpar.schema.class_registry import GRADIENT_HANDLER, LAYERS, MODELS

__all__ = ["GRADIENT_HANDLER", "LAYERS", "MODELS"]

__path__: list[str] = []
__getattr__ = names_of(__name__)
