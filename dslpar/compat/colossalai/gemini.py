"""ColossalAI's `colossalai.gemini`."""

from __future__ import annotations

from dslpar.compat.gemini import ChunkManager, GeminiManager, init_chunk_manager
from dslpar.compat.missing import names_of

__all__ = ["ChunkManager", "GeminiManager", "init_chunk_manager"]

__path__: list[str] = []
__getattr__ = names_of(__name__)
