"""Names for classes, as ColossalAI has them: what a config calls 'MyNet' is what a program registered under that name.

    @MODELS.register_module
    class MyNet(ModelFromConfig): ...                # model = dict(type='MyNet', ...)

    @LAYERS.register_module(name="Gelu2")            # layers_cfg=[dict(type='Gelu2', ...), ...]
    class QuickGelu(nn.Module): ...

A registry is a table that a program fills by import; nothing of dslpar registers anything. Names must be known where a
config is linted: `dslpar.initialize` tells the linter those of its own process; a name with dots needs no registry.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable
from importlib import import_module
from typing import Any, TypeVar, overload

from dslpar.core.catalog import raise_finding
from dslpar.core.errors import Location

Class = TypeVar("Class", bound=type)


class Registry:
    """Classes by name; a class, since programs fill it. `fallback` is a module whose classes are found by name too."""

    def __init__(self, name: str, fallback: str | None = None) -> None:
        self.name, self._fallback = name, fallback
        self._classes: dict[str, type] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """What is registered, in order; without the fallback's."""
        return tuple(self._classes)

    @overload
    def register_module(self, module: Class) -> Class: ...

    @overload
    def register_module(self, module: str | None = None, *, name: str | None = None) -> Callable[[Class], Class]: ...

    def register_module(self, module: Any = None, *, name: str | None = None) -> Any:
        """A decorator of classes: `@R.register_module`, `@R.register_module()` or `@R.register_module("Name")`.

        Raises:
            DslparError: the name is another class's.
        """
        if isinstance(module, type):
            return self._add(name or module.__name__, module)
        chosen: str | None = name or module
        return lambda cls: self._add(chosen or cls.__name__, cls)

    def get(self, name: str, place: Location | None = None) -> type:
        """The class of that name. Raises DslparError, at `place`, where there is none."""
        found = self.find(name)
        if found is None:
            close = difflib.get_close_matches(name, [*self._classes, *self._fallback_names()], n=1)
            hint = f"register the class with dslpar.{self.name}, or give its full name, 'my_package.my_module.MyClass'"
            hint = f"did you mean {close[0]!r}?" if close else hint
            raise_finding("CFG221", f"{self.name} has no {name!r}", hint, place or "<program>")
        return found

    get_module = get

    def find(self, name: str) -> type | None:
        """The class of that name, or None."""
        if name in self._classes:
            return self._classes[name]
        found = getattr(import_module(self._fallback), name, None) if self._fallback else None
        return found if isinstance(found, type) else None

    def has(self, name: str) -> bool:
        """Whether there is a class of that name."""
        return self.find(name) is not None

    def remove(self, name: str) -> None:
        """Forget a name, so that it may be given anew (in a notebook, a test)."""
        del self._classes[name]

    def _add(self, name: str, cls: Class) -> Class:
        other = self._classes.get(name)
        if other is not None and other is not cls:
            message = f"{self.name} has a {name!r} already: {_place(other)}"
            hint = f"register {cls.__module__}.{cls.__qualname__} under another name: register_module(name=...)"
            raise_finding("CFG222", message, hint, _place(cls))
        self._classes[name] = cls
        return cls

    def _fallback_names(self) -> list[str]:
        module = import_module(self._fallback) if self._fallback else None
        return [name for name, value in vars(module).items() if isinstance(value, type)] if module else []


def _place(cls: type) -> Location:
    """Where a class was written."""
    try:
        return Location(inspect.getsourcefile(cls) or cls.__module__, inspect.getsourcelines(cls)[1])
    except (OSError, TypeError):  # written at a prompt
        return Location(f"<{cls.__module__}.{cls.__qualname__}>")


MODELS = Registry("MODELS")
"""Models: classes of dslpar.ModelFromConfig, dslpar.models.LayeredModel or torch.nn.Module."""
LAYERS = Registry("LAYERS", fallback="torch.nn")
"""Layers of a layers_cfg; torch.nn's need no registering."""
GRADIENT_HANDLER = Registry("GRADIENT_HANDLER")
"""Classes of dslpar.BaseGradientHandler."""


def registered() -> dict[str, tuple[str, ...]]:
    """All names that this process registered, for the linter."""
    return {"models": MODELS.names, "layers": LAYERS.names, "gradient_handlers": GRADIENT_HANDLER.names}
