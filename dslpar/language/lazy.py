"""`LazyCall` for programs: describe a call now, make it later, as in detectron2 and LiBai.

    >>> model = LazyCall("collections.Counter")(red=4, blue=2)
    >>> model.red = 5
    >>> instantiate(model)
    Counter({'red': 5, 'blue': 2})

A description is a `Settings`: a dict with attribute access whose `_target_` is a `Reference`. Config files use the same
names without running this module. `instantiate` takes a `Node` of a config, its `plain()`, or a `Settings`. It makes
every call that a program describes with `LazyCall`. Calls of a config must be trusted (`dslpar.core.trust`).
"""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from dslpar.core.errors import DslparError, Finding, Location
from dslpar.core.project import trusted_packages
from dslpar.core.trust import is_standard_library, why_name_refused, why_object_refused
from dslpar.language.errors import ConfigError, finding
from dslpar.language.finder import find_config
from dslpar.language.load import load
from dslpar.language.tree import TARGET, Node, Reference

PROGRAM = Location("<program>")


class Settings(dict[str, Any]):
    """A dict with attribute access to its items."""

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


class ProgramReference(Reference):
    """A reference made by a program, and trusted because its user chose to run the program."""

    __slots__ = ()


class LazyCall:
    """`LazyCall(target)(**arguments)` describes the call `target(**arguments)`; containers are copied."""

    def __init__(self, target: Callable[..., Any] | Reference | str) -> None:
        self.target = ProgramReference(as_reference(target).name)

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
    return Reference(f"{public_module(target)}.{name}")


def public_module(target: Any) -> str:
    """Return the public module of a class or function: in Python 3.13, `Path.__module__` is 'pathlib._local'."""
    parts = target.__module__.split(".")
    while parts[-1].startswith("_") and len(parts) > 1:
        parent = sys.modules.get(".".join(parts[:-1]))
        if getattr(parent, target.__qualname__, None) is not target:
            break
        parts.pop()
    return ".".join(parts)


def settings(value: Any) -> Any:
    """Copy a value; every dict of the copy has attribute access."""
    if isinstance(value, Mapping):
        return Settings({key: settings(item) for key, item in value.items()})
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        return type(value)(settings(item) for item in value)
    return value


def instantiate(description: Any, _trusted_: Iterable[str] = (), **extra: Any) -> Any:
    """Make the described call, after the calls within its arguments; `extra` adds arguments to the outermost call.

    Calls are also found inside lists, tuples and dicts. Any other value is returned unchanged. A call with the argument
    `_recursive_=False` receives its other arguments unchanged. `_trusted_` lists packages whose classes a config may
    call, besides those trusted in the working folder's pyproject.toml and the known kinds (`dslpar.core.trust`).

    Raises:
        DslparError: a target may not be called (then no target is imported), or cannot be imported. Its location is
            the target's in the config, if there is one.
    """
    calls = [*_calls(description)]
    trusted = trusted_packages(tuple(_trusted_)) if calls else ()
    if refused := [found for found in (_refusal(*call, trusted) for call in calls) if found is not None]:
        raise DslparError(refused)
    return _make(description, trusted, extra)


def _calls(description: Any) -> Iterator[tuple[Any, Location]]:
    """Yield the target and the location of each described call."""
    target, location, value = _target_of(description)
    if target is not None:
        yield target, location
    items = value.values() if isinstance(value, Mapping) else value if type(value) in (list, tuple) else ()
    for item in items:
        yield from _calls(item)


def _target_of(description: Any) -> tuple[Any, Location, Any]:
    """Return the target of a description (or None), its location, and the description's value."""
    if isinstance(description, Node):
        return description.target, description.target_location or description.location, description.value
    return (description.get(TARGET) if isinstance(description, Mapping) else None), PROGRAM, description


def _refusal(target: Any, location: Location, trusted: tuple[str, ...]) -> Finding | None:
    """Return a finding if a target may not be called."""
    if isinstance(target, ProgramReference) or callable(target):
        return None
    refused = why_name_refused(as_reference(target).name, trusted)
    return refused and finding("CFG122", location, *refused)


def _make(description: Any, trusted: tuple[str, ...], extra: Mapping[str, Any]) -> Any:
    target, location, value = _target_of(description)
    if target is not None:
        return _call(target, value, location, trusted, extra)
    assert not extra, "extra arguments for what is no call"
    if isinstance(value, Mapping):
        return Settings({key: _make(item, trusted, {}) for key, item in value.items()})
    if type(value) in (list, tuple):
        return type(value)(_make(item, trusted, {}) for item in value)
    return value


def _call(
    target: Any, arguments: Mapping[str, Any], location: Location, trusted: tuple[str, ...], extra: Mapping[str, Any]
) -> Any:
    function = target if callable(target) else _locate_call(as_reference(target), location, trusted)
    given = {name: value for name, value in arguments.items() if name not in (TARGET, "_recursive_")}
    recursive = arguments.get("_recursive_", True)
    if recursive.value if isinstance(recursive, Node) else recursive:
        made = {name: _make(value, trusted, {}) for name, value in given.items()}
    else:
        made = {name: value.plain() if isinstance(value, Node) else value for name, value in given.items()}
    return function(**(made | dict(extra)))


def _locate_call(reference: Reference, location: Location, trusted: tuple[str, ...]) -> Any:
    """Import the target of a call, and check the object found: a trusted name may lead to an object from elsewhere."""
    *owners, found = _walk(reference, location)
    if isinstance(reference, ProgramReference):
        return found
    if why := why_object_refused(found, reference.name, trusted, owners):
        hint = "name the class itself; or trust the full name of what is to be called"
        raise DslparError([finding("CFG122", location, f"a config may not call {reference.name!r}: {why}", hint)])
    return found


def locate(reference: Reference | str, location: Location = PROGRAM) -> Any:
    """Import the class that a section names. The caller must check its kind before it makes the arguments or calls it.

    Only for `build`, since importing runs the package's code. Logs the package.

    Raises:
        DslparError: the class is in the standard library, or cannot be imported. Its location is `location`.
    """
    if is_standard_library(str(reference)):
        message = f"{str(reference)!r} is in Python's standard library, which has no model, layer or optimizer"
        raise DslparError([finding("CFG122", location, message)])
    *_, found = _walk(reference, location)
    return found


def _walk(reference: Reference | str, location: Location) -> Iterator[Any]:
    """Import the module of a dotted name. Yields the module, then each attribute down to the named object."""
    name = str(reference)
    parts = name.split(".")
    if len(parts) < 2 or not all(part.isidentifier() and not part.startswith("__") for part in parts):
        raise _not_found(f"{name!r} is not the full name of a class or function", location)
    value, rest = _import_longest(parts, location)
    yield value
    for index, part in enumerate(rest):
        if not hasattr(value, part):
            owner = ".".join(parts[: len(parts) - len(rest) + index])
            raise _not_found(f"{owner!r} has no {part!r}", location)
        value = getattr(value, part)
        yield value


def _import_longest(parts: list[str], location: Location) -> tuple[object, list[str]]:
    """Import the deepest module of a dotted name; return it and the remaining attribute names."""
    for end in range(len(parts) - 1, 0, -1):
        module = ".".join(parts[:end])
        try:
            found = importlib.import_module(module)
        except ModuleNotFoundError as error:
            # If the module itself is missing, the rest of the name may be attributes of a shorter one.
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
    """Load a config file, searched in the working directory, its parents, and the shipped configs."""
    try:
        config = load(find_config(name, "here.py"))
    except ConfigError as error:
        raise DslparError([finding(error.code, PROGRAM, error.message, error.hint)]) from None
    if config.findings:
        raise DslparError(config.findings)
    made: Settings = settings(config.root.plain())
    return made
