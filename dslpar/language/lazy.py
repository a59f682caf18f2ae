"""`LazyCall` for programs: describe a call now, make it later. The idea and the form are detectron2's and LiBai's.

    >>> model = LazyCall("collections.Counter")(red=4, blue=2)
    >>> model.red = 5
    >>> instantiate(model)
    Counter({'red': 5, 'blue': 2})

A description is a `Settings`: a dict with attribute access and a `_target_`, a `Reference`. Config files use the same
names without running any of this; `instantiate` takes what they give: a `Node`, its `plain()`, or a `Settings`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from dslpar.core.errors import DslparError, Location
from dslpar.language.errors import ConfigError, finding
from dslpar.language.tree import TARGET, Node, Reference

PROGRAM = Location("<program>")


class Settings(dict[str, Any]):
    """A dict whose items are attributes too."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"no key {name!r}; keys: {', '.join(map(str, self))}") from None

    def __setattr__(self, name: str, value: object) -> None:
        self[name] = value

    def __delattr__(self, name: str) -> None:
        try:
            del self[name]
        except KeyError:
            raise AttributeError(name) from None


class LazyCall:
    """`LazyCall(target)(**arguments)` describes the call `target(**arguments)`; containers are deep_copy."""

    def __init__(self, target: Callable[..., Any] | Reference | str) -> None:
        self.target = as_reference(target)

    def __call__(self, **arguments: Any) -> Settings:
        return Settings({TARGET: self.target, **{name: settings(value) for name, value in arguments.items()}})


L = LazyCall


def as_reference(target: object) -> Reference:
    """Refer to a class or function by its dotted name. Raises TypeError if it has none."""
    if isinstance(target, Reference):
        return target
    if isinstance(target, str):
        return Reference(target)
    name = getattr(target, "__qualname__", "<locals>")
    if not callable(target) or "<" in name:
        raise TypeError(f"LazyCall needs a class or function that a module holds, not {target!r}")
    return Reference(f"{target.__module__}.{name}")


def settings(value: Any) -> Any:
    """Copy a value; every dict of the copy has attribute access."""
    if isinstance(value, Mapping):
        return Settings({key: settings(item) for key, item in value.items()})
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        return type(value)(settings(item) for item in value)
    return value


def instantiate(description: Any, **extra: Any) -> Any:
    """Make the described call, the calls within its arguments first; `extra` adds to the outermost's arguments.

    Lists, tuples and dicts are walked; every other value is itself. `_recursive_=False` leaves the arguments alone.
    Raises DslparError, with the location in the config where there is one, if a target cannot be imported.
    """
    value, location = description, PROGRAM
    target = description.get(TARGET) if isinstance(description, Mapping) else None
    if isinstance(description, Node):
        value, target = description.value, description.target
        location = description.target_location or description.location
    if target is not None:
        return _call(target, value, location, extra)
    assert not extra, "extra arguments for what is no call"
    if isinstance(value, Mapping):
        return Settings({key: instantiate(item) for key, item in value.items()})
    if type(value) in (list, tuple):
        return type(value)(instantiate(item) for item in value)
    return value


def _call(target: Any, arguments: Mapping[str, Any], location: Location, extra: Mapping[str, Any]) -> Any:
    function = target if callable(target) else locate(as_reference(target), location)
    given = {name: value for name, value in arguments.items() if name not in (TARGET, "_recursive_")}
    recursive = arguments.get("_recursive_", True)
    if recursive.value if isinstance(recursive, Node) else recursive:
        made = {name: instantiate(value) for name, value in given.items()}
    else:
        made = {name: value.plain() if isinstance(value, Node) else value for name, value in given.items()}
    return function(**(made | dict(extra)))


def locate(reference: Reference | str, location: Location = PROGRAM) -> Any:
    """Import what a reference names. Raises DslparError, at `location`, if that fails.

    Only for `build`: importing runs the package's code. The package is logged.
    """
    name = str(reference)
    parts = name.split(".")
    if len(parts) < 2 or not all(part.isidentifier() and not part.startswith("__") for part in parts):
        raise _not_found(f"{name!r} is not the full name of a class or function", location)
    value, rest = _import_longest(parts, location)
    for index, part in enumerate(rest):
        if not hasattr(value, part):
            owner = ".".join(parts[: len(parts) - len(rest) + index])
            raise _not_found(f"{owner!r} has no {part!r}", location)
        value = getattr(value, part)
    return value


def _import_longest(parts: list[str], location: Location) -> tuple[object, list[str]]:
    """Import the deepest module of a dotted name; return it, and the attributes that are left."""
    import importlib
    import logging

    for end in range(len(parts) - 1, 0, -1):
        module = ".".join(parts[:end])
        try:
            found = importlib.import_module(module)
        except ModuleNotFoundError as error:
            # Is it missing itself? Then a shorter name may have the rest as attributes.
            missing = error.name or ""
            if module == missing or module.startswith(f"{missing}."):
                continue
            raise _not_found(f"{module!r} needs the package {missing!r}: it is not installed", location) from error
        except ImportError as error:
            raise _not_found(f"importing {module!r} failed: {error}", location) from error
        logging.getLogger("dslpar").info("imported package %s for %s", parts[0], ".".join(parts))
        return found, parts[end:]
    raise _not_found(f"there is no package {parts[0]!r}", location)


def _not_found(message: str, location: Location) -> DslparError:
    hint = "correct the name, or install the package where it runs"
    return DslparError([finding("CFG006", location, message, hint)])


def get_config(name: str) -> Settings:
    """Load a config file, found from the working directory, its parents, or among the shipped configs."""
    from dslpar.language.load import load
    from dslpar.language.session import find_config

    try:
        config = load(find_config(name, "here.py"))
    except ConfigError as error:
        raise DslparError([finding(error.code, PROGRAM, error.message, error.hint)]) from None
    if config.findings:
        raise DslparError(config.findings)
    made: Settings = settings(config.root.plain())
    return made
