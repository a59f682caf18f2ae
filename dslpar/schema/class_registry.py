"""Registries of classes, as in ColossalAI: 'MyNet' in a config is the class that a program registered under that name.

    @MODELS.register_module
    class MyNet(ModelFromConfig): ...                # model = dict(type='MyNet', ...)

    @LAYERS.register_module(name="Gelu2")            # layers_cfg=[dict(type='Gelu2', ...), ...]
    class QuickGelu(nn.Module): ...

A program fills a registry when it imports its modules; dslpar itself registers nothing. The linter must know the
registered names: `dslpar.initialize` passes it the names of its own process. A name with dots needs no registry.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib import import_module
from typing import Any, TypeVar, overload

from dslpar.core.catalog import raise_finding
from dslpar.core.errors import Location
from dslpar.core.suggest import did_you_mean

Class = TypeVar("Class", bound=type)


class Registry:
    """Mutable map from name to class, which programs fill. Classes of the module `fallback` are found by name too."""

    def __init__(self, name: str, fallback: str | None = None) -> None:
        self.name, self._fallback = name, fallback
        self._classes: dict[str, type] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """The registered names, in the order of registration, without the names of the fallback."""
        return tuple(self._classes)

    @property
    def full_names(self) -> tuple[str, ...]:
        """The full names of the registered classes."""
        return tuple(f"{cls.__module__}.{cls.__qualname__}" for cls in self._classes.values())

    @overload
    def register_module(self, module: Class) -> Class: ...

    @overload
    def register_module(self, module: str | None = None, *, name: str | None = None) -> Callable[[Class], Class]: ...

    def register_module(self, module: Any = None, *, name: str | None = None) -> Any:
        """Register a class, as `@R.register_module`, `@R.register_module()` or `@R.register_module("Name")`.

        Raises:
            DslparError: the name belongs to another class.
        """
        if isinstance(module, type):
            return self._add(name or module.__name__, module)
        chosen: str | None = name or module
        return lambda cls: self._add(chosen or cls.__name__, cls)

    def get(self, name: str, location: Location | None = None) -> type:
        """Return the class with that name. Raises DslparError, at `location`, if there is none."""
        found = self.find(name)
        if found is None:
            fallback = vars(import_module(self._fallback)) if self._fallback else {}
            known = [*self._classes, *(key for key, value in fallback.items() if isinstance(value, type))]
            own = f"register the class with dslpar.{self.name}, or give its full name, 'my_package.my_module.MyClass'"
            hint = did_you_mean(name, known) or own
            raise_finding("CFG221", f"unknown name {name!r} in {self.name}", hint, location or "<program>")
        return found

    get_module = get

    def find(self, name: str) -> type | None:
        """Return the class with that name, or None."""
        if name in self._classes:
            return self._classes[name]
        found = getattr(import_module(self._fallback), name, None) if self._fallback else None
        return found if isinstance(found, type) else None

    def has(self, name: str) -> bool:
        """Return whether there is a class with that name."""
        return self.find(name) is not None

    def remove(self, name: str) -> None:
        """Remove a name, so that it can be registered again (in a notebook or a test)."""
        del self._classes[name]

    def _add(self, name: str, cls: Class) -> Class:
        other = self._classes.get(name)
        if other is not None and other is not cls:
            message = f"{self.name} already has a {name!r}: {_location(other)}"
            hint = f"register {cls.__module__}.{cls.__qualname__} under another name: register_module(name=...)"
            raise_finding("CFG222", message, hint, _location(cls))
        self._classes[name] = cls
        return cls


def _location(cls: type) -> Location:
    """Return where a class is defined."""
    try:
        return Location(inspect.getsourcefile(cls) or cls.__module__, inspect.getsourcelines(cls)[1])
    except (OSError, TypeError):  # written at a prompt
        return Location(f"<{cls.__module__}.{cls.__qualname__}>")


MODELS = Registry("MODELS")
"""Models: classes of dslpar.ModelFromConfig, dslpar.models.LayeredModel or torch.nn.Module."""
LAYERS = Registry("LAYERS", fallback="torch.nn")
"""Layers of a layers_cfg; torch.nn's are known without registration."""
GRADIENT_HANDLER = Registry("GRADIENT_HANDLER")
"""Classes of dslpar.BaseGradientHandler."""


def registered_classes() -> tuple[str, ...]:
    """Return the full names of all classes that this process registered; since the program did so, they are trusted."""
    return (*MODELS.full_names, *LAYERS.full_names, *GRADIENT_HANDLER.full_names)


def registered() -> dict[str, tuple[str, ...]]:
    """Return all names that this process registered, for the linter."""
    return {"models": MODELS.names, "layers": LAYERS.names, "gradient_handlers": GRADIENT_HANDLER.names}
