"""LiBai-compatible import path for LazyCall, instantiate and get_config; `dslpar.load` loads a config.

Programs import from here as from LiBai's `libai.config`: `from dslpar.config import LazyCall`. In a config such an
import only makes a reference and runs nothing. The config language itself is dslpar.language.
"""

from __future__ import annotations

from dslpar.language.lazy import L, LazyCall, get_config, instantiate

__all__ = ["L", "LazyCall", "get_config", "instantiate"]
