"""dslpar: one Python file says how a model is spread over a cluster; DeepSpeed runs it.

The names below are loaded at first use, so that `import dslpar` costs nothing and `dslpar lint` imports no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from dslpar.config.lazy import L, LazyCall, get_config, instantiate
    from dslpar.errors import DslparError, Finding, Location
    from dslpar.flow import job_of as resolve
    from dslpar.flow import lint, load

_HOMES = {
    "load": ("dslpar.flow", "load"),
    "lint": ("dslpar.flow", "lint"),
    "resolve": ("dslpar.flow", "job_of"),
    "LazyCall": ("dslpar.config.lazy", "LazyCall"),
    "L": ("dslpar.config.lazy", "L"),
    "get_config": ("dslpar.config.lazy", "get_config"),
    "instantiate": ("dslpar.config.lazy", "instantiate"),
    "DslparError": ("dslpar.errors", "DslparError"),
    "Finding": ("dslpar.errors", "Finding"),
    "Location": ("dslpar.errors", "Location"),
}

__all__ = [
    "DslparError", "Finding", "L", "LazyCall", "Location", "get_config", "instantiate", "lint", "load", "resolve",
]  # fmt: skip


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'dslpar' has no attribute {name!r}")
    module, attribute = _HOMES[name]
    return getattr(import_module(module), attribute)
