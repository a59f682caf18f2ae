"""Write dslpar/schema/data/deepspeed_keys.json: every key that the installed DeepSpeed reads, its type and default.

python tools/deepspeed_keys.py            # writes the file anew
python tools/deepspeed_keys.py --check    # compares; exits 1, with the difference, where they differ

DeepSpeed keeps no list of its keys. Sections that are pydantic models tell theirs; of all others the reading is
watched: DeepSpeed is handed a config that notes which keys it is asked for, and with which default. A key whose default
is no plain value is tried as a section, until nothing new is asked for. What is read outside of DeepSpeedConfig, and
what stands in a `*_DEFAULT` constant beside the key, comes from DeepSpeed's source by its syntax tree. No name is
written here by hand but those of DeepSpeed's modules.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import enum
import importlib
import inspect
import json
import logging
import os
import sys
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
from deepspeed.runtime import config as ds_config
from deepspeed.runtime.config_utils import DeepSpeedConfigModel

from dslpar.schema.torch_optimizers import OPTIMIZERS
from dslpar.schema.torch_schedulers import LR_SCHEDULERS

ROOT = Path(__file__).parents[1]
TARGET = ROOT / "dslpar" / "schema" / "data" / "deepspeed_keys.json"
PACKAGE = Path(deepspeed.__file__).parent

Path_ = tuple[str, ...]
Asked = dict[tuple[Path_, str], Any]
REMOVED: Mapping[str, str] = ds_config._REMOVED_TOP_LEVEL_CONFIG_KEYS
REMOVED_OF_ZERO: Mapping[str, str] = ds_config._REMOVED_ZERO_CONFIG_KEYS


class Row(NamedTuple):
    """One key: the words of its type, and its default."""

    type: str
    default: Any


class Found:
    """Keys, choices and bounds found so far, by dotted path."""

    def __init__(self) -> None:
        self.keys: dict[Path_, dict[str, Row]] = {}
        self.choices: dict[str, tuple[str, ...]] = {}
        self.bounds: dict[str, str] = {}
        self.deprecated: dict[str, str] = {}
        self.other_names: dict[str, str] = {}

    def add(self, path: Path_, name: str, row: Row) -> None:
        """Note a key; what is known of it already stays."""
        self.keys.setdefault(path, {}).setdefault(name, row)


# Watching what is read --------------------------------------------------------------------------------------------

_MARK = "watched section"
_REFUSALS = (ds_config.DeepSpeedConfigError, AssertionError, AttributeError, LookupError, TypeError, ValueError)
_ABSENT = object()


class Watched(dict):  # type: ignore[type-arg]
    """A section that notes which keys it is asked for: {(path, key): default, or _ABSENT if none was named}."""

    def __init__(self, path: Path_, asked: Asked, items: Mapping[str, Any]) -> None:
        super().__init__(items)
        self.path, self.asked = path, asked

    def _note(self, key: object, default: Any = _ABSENT) -> None:
        if isinstance(key, str) and key != _MARK and self.asked.get((self.path, key), _ABSENT) is _ABSENT:
            self.asked[self.path, key] = default

    def __contains__(self, key: object) -> bool:
        self._note(key)
        return super().__contains__(key)

    def __getitem__(self, key: str) -> Any:
        self._note(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self._note(key, default)
        return super().get(key, default)

    def keys(self) -> Any:
        """The section itself, which can be asked and walked as its keys can."""
        return self

    def __copy__(self) -> Watched:
        return self

    def __deepcopy__(self, memo: object) -> Watched:
        return self


class Watch:
    """One run of DeepSpeedConfig over a watched config: some sections are there, and maybe one value."""

    def __init__(self, sections: set[Path_], values: Mapping[Path_, Any]) -> None:
        self.asked: Asked = {}
        self.models: dict[Path_, type[DeepSpeedConfigModel]] = {}
        self.sections, self.values = sections, values
        self._run()

    def _made(self, path: Path_) -> Watched:
        below = {path_[-1]: self._made(path_) for path_ in self.sections if path_[:-1] == path and path_}
        values = {path_[-1]: value for path_, value in self.values.items() if path_[:-1] == path}
        batch = {"train_batch_size": 1} if not path else {_MARK: path}
        return Watched(path, self.asked, batch | below | values)

    def _run(self) -> None:
        init = DeepSpeedConfigModel.__init__

        def noting(model: DeepSpeedConfigModel, strict: bool = False, **data: Any) -> None:
            if _MARK in data:
                self.models[data.pop(_MARK)] = type(model)
            self._note_below(type(model), data)
            init(model, strict, **{name: value for name, value in data.items() if not isinstance(value, Watched)})

        scalar, places = _watched_scalar_param()
        for module in places:
            module.get_scalar_param = _asking
        DeepSpeedConfigModel.__init__ = noting  # type: ignore[method-assign]
        try:
            with suppress(*_REFUSALS):  # a section where DeepSpeed wants a plain value: what was asked before counts
                ds_config.DeepSpeedConfig(self._made(()))
        finally:
            DeepSpeedConfigModel.__init__ = init  # type: ignore[method-assign]
            for module in places:
                module.get_scalar_param = scalar

    def _note_below(self, model: type[DeepSpeedConfigModel], data: Mapping[str, Any]) -> None:
        for name, value in data.items():
            below = _model_of(model.model_fields[name].annotation) if name in model.model_fields else None
            if isinstance(value, Watched) and below is not None:
                self.models[value.path] = below


def _asking(section: Any, name: str, default: Any) -> Any:
    return section.get(name, default)


def _watched_scalar_param() -> tuple[Any, list[Any]]:
    """DeepSpeed's get_scalar_param, which would ask for keys as an ordinary dict has them, and who imports it."""
    scalar = ds_config.get_scalar_param
    return scalar, [module for module in _modules() if getattr(module, "get_scalar_param", None) is scalar]


def _modules() -> list[types.ModuleType]:
    return [module for name, module in list(sys.modules.items()) if name.startswith("deepspeed") and module]


class Seen:
    """Keys, models and sections that DeepSpeed asked for in all runs together."""

    def __init__(self) -> None:
        self.asked: Asked = {}
        self.models: dict[Path_, type[DeepSpeedConfigModel]] = {}
        self.sections: set[Path_] = set()
        self._tried: set[Path_] = set()
        self._run(())
        while trials := sorted(self._untried() - self._tried):
            for path in trials:
                self._tried.add(path)
                self._run(path)

    def _run(self, path: Path_) -> None:
        """Try a path as a section of its own, and where it is none, as a value."""
        above = {path[:length] for length in range(1, len(path))}
        trial = Watch(above | {path} - {()}, {})
        if path and not (path in trial.models or any(where == path for where, _ in trial.asked)):
            trial = Watch(above, {path: _other(self.asked[path[:-1], path[-1]])})
        elif path:
            self.sections.add(path)
        self.models |= trial.models
        for key, default in trial.asked.items():
            if self.asked.get(key, _ABSENT) is _ABSENT:
                self.asked[key] = default

    def _untried(self) -> set[Path_]:
        found = {(*path, name) for (path, name), default in self.asked.items() if default is not True}
        return {path for path in found if path[0] not in REMOVED and path[:-1] not in self.models}


def _other(default: Any) -> Any:
    """A value that may lead further than the default: what is off goes on."""
    return True if default is False else "text"


# Models -----------------------------------------------------------------------------------------------------------


def add_model(found: Found, path: Path_, model: type[DeepSpeedConfigModel]) -> None:
    """The fields of a pydantic model, and of the models in it."""
    found.keys.setdefault(path, {})
    for name, field in model.model_fields.items():
        key, dotted = field.alias or name, ".".join((*path, field.alias or name))
        if field.alias:
            found.other_names[".".join((*path, name))] = key
        extra = field.json_schema_extra
        if isinstance(extra, dict) and extra.get("deprecated"):
            new = str(extra.get("new_param", ""))
            found.deprecated[dotted] = model.model_fields[new].alias or new if new in model.model_fields else new
            continue
        below = _model_of(field.annotation)
        default = None if field.is_required() else field.get_default(call_default_factory=True)
        if below is not None:
            found.add(path, key, Row("section", None))
            add_model(found, (*path, key), below)
            continue
        found.add(path, key, Row(_words(field.annotation), _plain(default)))
        _add_limits(found, dotted, field)


def _add_limits(found: Found, dotted: str, field: Any) -> None:
    signs = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
    limits = [f"{sign} {getattr(item, word):g}" for item in field.metadata for word, sign in signs.items()
              if hasattr(item, word)]  # fmt: skip
    if limits:
        found.bounds[dotted] = ", ".join(limits)
    for part in _parts(field.annotation):
        if isinstance(part, type) and issubclass(part, enum.Enum) and issubclass(part, str):
            found.choices[dotted] = tuple(item.value for item in part)
        elif typing.get_origin(part) is typing.Literal:
            found.choices[dotted] = typing.get_args(part)


def _model_of(annotation: Any) -> type[DeepSpeedConfigModel] | None:
    models = (part for part in _parts(annotation) if isinstance(part, type) and issubclass(part, DeepSpeedConfigModel))
    return next(models, None)


def _parts(annotation: Any) -> Iterator[Any]:
    """An annotation and those within it."""
    yield annotation
    for part in typing.get_args(annotation):
        yield from _parts(part)


def _words(annotation: Any) -> str:
    """The words of a type: what stands for it in a config."""
    if isinstance(annotation, type) and not typing.get_args(annotation):
        if issubclass(annotation, enum.Enum):
            return "int" if issubclass(annotation, int) else "str"
        known = {Path: "str", type(None): "None"}
        return known.get(annotation, annotation.__name__)
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        return " | ".join(dict.fromkeys(_words(part) for part in args))
    if origin is typing.Literal:
        return "str"
    if origin is not None:
        inner = ", ".join(_words(part) for part in args if part is not ...)
        return f"{origin.__name__}[{inner}]" if inner else str(origin.__name__)
    return str(getattr(annotation, "__name__", annotation)).lower()


# What is read by constants ----------------------------------------------------------------------------------------


def add_watched(found: Found, seen: Seen) -> None:
    """Keys that were asked for by name."""
    sections = seen.sections | set(seen.models)
    removed = {((), name) for name in REMOVED} | {(("zero_optimization",), name) for name in REMOVED_OF_ZERO}
    for (path, name), default in seen.asked.items():
        if (path, name) in removed:
            continue
        if (*path, name) in sections:
            found.add(path, name, Row("section", None))
        else:
            value = _default_beside(path, name) if default is _ABSENT else default
            found.add(path, name, _row(value))


def _default_beside(path: Path_, name: str) -> Any:
    """The constant of its default, by the name that DeepSpeed gives such constants."""
    names = ["_".join((*path, name)).upper() + "_DEFAULT", name.upper() + "_DEFAULT"]
    values = (getattr(ds_config, key) for key in names if hasattr(ds_config, key))
    return next(values, None)


# What is read outside of DeepSpeedConfig --------------------------------------------------------------------------


def add_read_elsewhere(found: Found) -> None:
    """Keys of `pipeline`, whose defaults stand in a dict, and those that `initialize` looks for itself."""
    (defaults,) = (
        ast.literal_eval(node.value)
        for node in ast.walk(ast.parse(inspect.getsource(ds_config.get_pipeline_config)))
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict)
    )
    found.keys.setdefault((), {})["pipeline"] = Row("section", None)
    for name, default in defaults.items():
        found.add(("pipeline",), name, _row(default))
    for name, default in _read_of(PACKAGE / "runtime" / "pipe" / "engine.py", ("pipeline",)):
        found.add(("pipeline",), name, _row(default))
    for name, default in _read_of(PACKAGE / "__init__.py", ("config",)):
        found.add((), name, _row(default))


def _row(default: Any) -> Row:
    return Row(_words(type(default)) if default is not None else "", _plain(default))


def _read_of(file: Path, names: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    """Constant keys that a file takes of a variable or attribute of these names, by item, `get` or `in`."""
    for node in ast.walk(ast.parse(file.read_text())):
        match node:
            case ast.Subscript(value=of, slice=ast.Constant(value=str(key))) if _called(of) in names:
                yield key, None
            case ast.Call(func=ast.Attribute(value=of, attr="get"), args=[ast.Constant(value=str(key)), *rest]) if (
                _called(of) in names
            ):
                yield key, ast.literal_eval(rest[0]) if rest else None
            case ast.Compare(left=ast.Constant(value=str(key)), ops=[ast.In()], comparators=[of]) if (
                _called(of) in names
            ):
                yield key, None


def _called(node: ast.expr) -> str:
    return getattr(node, "attr", getattr(node, "id", ""))


# Arguments of optimizers and schedules ----------------------------------------------------------------------------


def arguments(table: Mapping[str, Any], without: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """Name -> argument -> default, of the classes in a table that are DeepSpeed's."""
    rows = {name: row.dotted for name, row in table.items() if row.dotted.startswith("deepspeed.")}
    return {name: _arguments(dotted, without) for name, dotted in rows.items()}


def _arguments(dotted: str, without: tuple[str, ...]) -> dict[str, Any]:
    package, _, name = dotted.rpartition(".")
    made = inspect.signature(getattr(importlib.import_module(package), name)).parameters
    return {
        key: None if item.default is item.empty else _plain(item.default)
        for key, item in made.items()
        if key not in without and item.kind is not item.VAR_KEYWORD
    }


# The file that is written ---------------------------------------------------------------------------------------


def _plain(value: Any) -> Any:
    """A value as a literal: enums by value, subclasses of numbers as numbers, what is no literal as None."""
    if isinstance(value, enum.Enum):
        return _plain(value.value)
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, list | tuple):
        return type(value)(_plain(item) for item in value)
    return {key: _plain(item) for key, item in value.items()} if isinstance(value, dict) else None


def collect() -> Found:
    """Everything that DeepSpeed reads."""
    logging.disable(logging.CRITICAL)  # of what it is tried with, DeepSpeed warns
    try:
        found, seen = Found(), Seen()
    finally:
        logging.disable(logging.NOTSET)
    for path, model in sorted(seen.models.items()):
        add_model(found, path, model)
    add_watched(found, seen)
    add_read_elsewhere(found)
    return found


def text() -> str:
    """The file: a line a key, so that a difference reads well."""
    found = collect()
    keys = {
        ".".join(path): {name: tuple(row) for name, row in sorted(rows.items())}
        for path, rows in sorted(found.keys.items())
    }
    table = {
        "version": deepspeed.__version__,
        "keys": keys,
        "choices": found.choices,
        "bounds": found.bounds,
        "deprecated": found.deprecated,
        "other_names": found.other_names,
        "removed": (*REMOVED, *(f"zero_optimization.{name}" for name in REMOVED_OF_ZERO)),
        "optimizers": arguments(OPTIMIZERS, ("model_params", "params")),
        "lr_schedulers": arguments(LR_SCHEDULERS, ("optimizer", "last_batch_iteration")),
    }
    return _as_json(table) + "\n"


def _as_json(value: Any, depth: int = 3, indent: str = "") -> str:
    if not (isinstance(value, Mapping) and value and depth):
        return json.dumps(value)
    inner = indent + "  "
    items = (f"{inner}{json.dumps(name)}: {_as_json(item, depth - 1, inner)}" for name, item in value.items())
    return "{\n" + ",\n".join(items) + f"\n{indent}}}"


def difference(old: str, new: str) -> str:
    """Return a diff of the recorded keys and those of the installed DeepSpeed, after its version if that differs.

    It is empty if both are equal.
    """
    recorded = json.loads(old)["version"]
    other = recorded != deepspeed.__version__
    head = f"recorded from another DeepSpeed: {recorded}, installed: {deepspeed.__version__}\n" if other else ""
    return head + "\n".join(difflib.unified_diff(old.splitlines(), new.splitlines(), "recorded", "installed", "", ""))


def main(arguments: list[str] | None = None, say: Callable[[str], object] = print) -> int:
    """Write the file, or compare it. Returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="compare, write nothing; 1 where they differ")
    if not parser.parse_args(arguments).check:
        TARGET.write_text(text())
        return 0
    differs = difference(TARGET.read_text(), text())
    if differs:
        say(f"{differs}\n{TARGET.relative_to(ROOT)} is not what DeepSpeed reads: python tools/deepspeed_keys.py")
    return 1 if differs else 0


if __name__ == "__main__":
    sys.exit(main())
