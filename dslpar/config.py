"""The names that a config imports, for programs: `from dslpar.config import LazyCall`, as in LiBai's `libai.config`.

The config language itself is dslpar.language; there such an import is a reference, and nothing is imported.
"""

from __future__ import annotations

from dslpar.language.lazy import L, LazyCall, get_config, instantiate

__all__ = ["L", "LazyCall", "get_config", "instantiate"]
