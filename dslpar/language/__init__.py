"""The config language: Python syntax, evaluated, never executed.

    >>> from dslpar.language.load import load
    >>> config = load("configs/gpt_3d.py", ["parallel.pipeline=4"])     # doctest: +SKIP
    >>> config.root.get("parallel.pipeline").value                      # doctest: +SKIP
    4

In: the path or text of a config, and overrides. Out: a `Config`, the tree of its values with their origins, and every
finding. `evaluator` dispatches to handlers of syntax (expressions, containers, calls, targets, imports, statements),
`session` reads the files of one load, `limits` bounds it; `lazy` is `LazyCall` for programs. Names are imported when
first used, so that a program that only describes calls does not load the evaluator. (`dslpar.language.load` is the
module; the function is `dslpar.load`.)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dslpar.language.lazy import L, LazyCall, get_config, instantiate
    from dslpar.language.load import Config, load_text
    from dslpar.language.tree import Node, Reference

__all__ = ["Config", "L", "LazyCall", "Node", "Reference", "get_config", "instantiate", "load_text"]

HOMES = {
    "Config": "load",
    "L": "lazy",
    "LazyCall": "lazy",
    "Node": "tree",
    "Reference": "tree",
    "get_config": "lazy",
    "instantiate": "lazy",
    "load_text": "load",
}


def __getattr__(name: str) -> Any:
    if name not in HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{HOMES[name]}"), name)
