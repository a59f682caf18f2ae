"""ColossalAI's `colossalai.core`."""

from __future__ import annotations

from dslpar.compat.context import global_context
from dslpar.compat.missing import names_of

__all__ = ["global_context"]

__path__: list[str] = []
__getattr__ = names_of(__name__)
