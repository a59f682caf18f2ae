"""Run configs of other frameworks in CPython, with stand-ins for the frameworks, as a reference for the evaluator.

    python -m tests.support.python_configs ROOT FILE...      # one JSON object: file -> its values, or its error

Every module that is not below ROOT is a stand-in whose attributes are names. Calling one fails, as without the package.
Only the building blocks of configs work: LazyCall, get_config and relative imports as in LiBai's LazyConfig (evaluated
anew each time, dicts with attributes), DictConfig and OmegaConf.create (which copy).
"""

from __future__ import annotations

import builtins
import importlib.abc
import importlib.machinery
import json
import os.path
import sys
import types
from collections.abc import Mapping, Sequence
from typing import Any

ROOT = ""


class Name:
    """A class or function of a missing package."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Name:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        return Name(f"{self._name}.{attribute}")


class StandIn(types.ModuleType):
    """A missing package."""

    def __getattr__(self, attribute: str) -> Name:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        return Name(f"{self.__name__}.{attribute}")


class Packages(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds a stand-in for every module outside of Python's standard library and the tree."""

    def find_spec(self, fullname: str, path: object, target: object = None) -> importlib.machinery.ModuleSpec | None:
        below = os.path.join(ROOT, *fullname.split("."))
        if (
            fullname.partition(".")[0] in sys.stdlib_module_names
            or os.path.exists(f"{below}.py")
            or os.path.isdir(below)
        ):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        known = {"libai.config": {"LazyCall": LazyCall, "get_config": get_config}, "omegaconf": OMEGACONF}
        vars(module).update(known.get(module.__name__, {}))


class DictConfig(dict[str, Any]):
    """OmegaConf's DictConfig: attributes, and copies of the containers that it is given."""

    def __init__(self, content: Mapping[str, Any] | None = None) -> None:
        super().__init__({key: as_config(value) for key, value in (content or {}).items()})

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(name)
        return self[name]

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = as_config(value)

    def __delattr__(self, name: str) -> None:
        del self[name]

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, as_config(value))

    def update(self, *others: Any, **values: Any) -> None:
        for key, value in dict(*others, **values).items():
            self[key] = value


class ListConfig(list[Any]):
    """OmegaConf's ListConfig."""

    def append(self, item: Any) -> None:
        super().append(as_config(item))


def as_config(value: Any) -> Any:
    if isinstance(value, dict):
        return DictConfig(value)
    return ListConfig(map(as_config, value)) if type(value) in (list, ListConfig) else value


class OmegaConf:
    @staticmethod
    def create(content: Any = None) -> Any:
        return as_config({} if content is None else content)


OMEGACONF = {"DictConfig": DictConfig, "OmegaConf": OmegaConf}


class LazyCall:
    def __init__(self, target: Any) -> None:
        self.target = target

    def __call__(self, **arguments: Any) -> DictConfig:
        return DictConfig({"_target_": self.target, **arguments})


def get_config(name: str) -> DictConfig:
    found = run(os.path.join(ROOT, "configs", name))
    return DictConfig({key: value for key, value in found.items() if is_value(value)})


def run(path: str) -> dict[str, Any]:
    """Run a config as LazyConfig does: relative imports find files by their location, and run them anew."""

    def relative(name: str, globals: Any = None, locals: Any = None, names: Sequence[str] = (), level: int = 0) -> Any:
        if not level or (globals or {}).get("__file__") != path:
            return real(name, globals, locals, names, level)
        steps = [".."] * (level - 1) + (name.split(".") if name else [])
        found = run(os.path.normpath(os.path.join(os.path.dirname(path), *steps)) + ".py")
        return types.SimpleNamespace(**{key: as_config(value) for key, value in found.items()})

    real = builtins.__import__
    values: dict[str, Any] = {"__file__": path, "__name__": "a_config"}
    with open(path, encoding="utf-8") as file:
        code = compile(file.read(), path, "exec")
    builtins.__import__ = relative
    try:
        exec(code, values)
    finally:
        builtins.__import__ = real
    return {key: value for key, value in values.items() if not key.startswith("_")}


def plain(value: Any) -> Any:
    """Return a value as JSON can hold it; other values are marked."""
    if isinstance(value, Name):
        return {"$name": value._name}
    if isinstance(value, dict):
        return {"$dict": [[plain(key), plain(item)] for key, item in value.items()]}
    if isinstance(value, list):
        return [plain(item) for item in value]
    if isinstance(value, tuple):
        return {"$tuple": [plain(item) for item in value]}
    if isinstance(value, str | int | float | bool | None):
        return value
    raise TypeError(f"{type(value).__name__} is no value of a config")


def is_value(value: Any) -> bool:
    return not isinstance(value, types.ModuleType | Name | type | types.FunctionType | staticmethod)


def main(root: str, files: Sequence[str]) -> None:
    global ROOT
    ROOT = root
    sys.path.insert(0, root)
    sys.meta_path.insert(0, Packages())
    found: dict[str, Any] = {}
    for file in files:
        before = set(sys.modules)
        try:
            found[file] = {key: plain(value) for key, value in run(file).items() if is_value(value)}
        except Exception as error:  # noqa: BLE001 - whatever a config raises, it does not evaluate
            found[file] = f"{type(error).__name__}: {error}"
        for name in set(sys.modules) - before:
            del sys.modules[name]  # each file behaves as in a process of its own
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
