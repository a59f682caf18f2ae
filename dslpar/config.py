"""Names that configs import, for use in programs: `from dslpar.config import LazyCall`, as in LiBai's `libai.config`.

The config language itself is dslpar.language. In a config such an import only makes a reference and runs nothing.
"""

from __future__ import annotations

from dslpar.language.lazy import L, LazyCall, get_config, instantiate

__all__ = ["L", "LazyCall", "get_config", "instantiate"]
