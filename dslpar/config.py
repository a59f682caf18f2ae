"""LiBai-compatible import path for LazyCall, instantiate and get_config; `dslpar.load` loads a config.

Programs import from here as from LiBai's `libai.config`: `from dslpar.config import LazyCall`. In a config such an
import only makes a reference and runs nothing. The config language itself is dslpar.language.

The names of sections are TypedDicts, for type checkers and editors: `parallel = Parallel(pipeline=2)` is a dict.
"""

from __future__ import annotations

from dslpar import config_types
from dslpar.config_types import *  # noqa: F403 - as listed in its __all__
from dslpar.language.lazy import L, LazyCall, get_config, instantiate

__all__ = ["L", "LazyCall", "get_config", "instantiate", *config_types.__all__]
