"""Inheritance between configs, as in mmengine: `_base_ = ["../_base_/models/gpt.py", ...]`.

The base files are named by paths relative to this file, and evaluated afresh. Dicts of this file are merged into the
inherited dicts, recursively. Any other value replaces the inherited one, and so does a dict with `_delete_=True`. Two
bases may not set the same name. Expressions read inherited values as `_base_.model.hidden_size`.
"""

from __future__ import annotations

import os.path

from dslpar.core.errors import Location
from dslpar.language.errors import ConfigError, UnknownError
from dslpar.language.evaluator import Evaluator, type_name
from dslpar.language.load_session import as_mapping
from dslpar.language.values import (
    NO_ORIGINS,
    UNKNOWN,
    Binding,
    Dict,
    Located,
    Value,
    deep_copy,
    origins_of,
    require_known,
)

BASE, DELETE = "_base_", "_delete_"


def inherit(ev: Evaluator, value: Value, location: Location) -> Located:
    """Evaluate the configs that `_base_` lists, and return one mapping of all their names."""
    files = [value] if isinstance(value, str) else value
    if not isinstance(files, (list, tuple)) or not files or not all(isinstance(file, str) for file in files):
        hint = "correct it: a path relative to this file, or a list of them: _base_ = ['../common/train.py']"
        raise ConfigError("CFG004", f"{BASE} names no configs to inherit from", hint)
    inherited, home = Dict(), dict[Value, str]()
    for file, place in zip(files, origins_of(files), strict=True):
        names = as_mapping(ev.session.names_of(_path(file, ev.source.path), place or location))
        if not isinstance(names, Dict):
            ev.bind("*", UNKNOWN, location, location)  # its names are unknown, so no name counts as missing
            inherited.tainted = True
            continue
        twice = [str(name) for name in names if name in inherited]
        if twice:
            message = f"{file!r} and {home[twice[0]]!r} both set {', '.join(twice)}"
            raise ConfigError("CFG004", message, "choose the one base that sets it", place or location)
        home |= dict.fromkeys(names, file)
        inherited.take(names)
    return inherited, location


def _path(name: str, importer: str) -> str:
    if os.path.isabs(name) or "\\" in name or "\0" in name or not name.endswith(".py"):
        hint = "correct the path: it is relative to this file, such as '../common/train.py'"
        raise ConfigError("CFG009", f"{name!r} is not a path of a Python config", hint)
    return os.path.normpath(os.path.join(os.path.dirname(importer) or ".", name))


def merged(ev: Evaluator, names: dict[str, Binding]) -> dict[str, Binding]:
    """Return a file's names merged with the inherited ones; unchanged if it inherits none."""
    base = names.get(BASE)
    if base is None or not isinstance(base.value, Dict):
        return names
    made: dict[str, Binding] = {}
    inherited = deep_copy(base.value)
    for name, value in inherited.items():
        origin, key_origin = inherited.origins.get(name, NO_ORIGINS)
        made[name] = Binding(value, origin or base.location, key_origin or base.location, "config")
    for name, own in names.items():
        if name == BASE or (name in made and own.imported_as == "module"):
            continue
        if isinstance(own.value, Dict):
            try:
                old = made[name].value if name in made else Dict()
                own = own._replace(value=_merged(old, own.value, name))
            except UnknownError:
                own = own._replace(value=UNKNOWN)
            except ConfigError as error:
                ev.session.report(error, own.location)
                own = own._replace(value=UNKNOWN)
        made[name] = own
    return made


def _merged(old: Value, new: Dict, path: str) -> Value:
    """Merge a dict into the inherited one, or replace the inherited value."""
    require_known(old)
    replaces = new.get(DELETE, False) is True
    if not (replaces or isinstance(old, Dict)):
        message = f"{path} is a dict here, and {type_name(old)} in the config that this one inherits from"
        raise ConfigError(
            "CFG004", f"{message}: they cannot be merged", f"add {DELETE}=True to {path}: then it is replaced"
        )
    made = Dict() if replaces else deep_copy(old)
    made.tainted = made.tainted or new.tainted
    for key, value in new.items():
        if isinstance(value, Dict):
            value = _merged(made.get(key, Dict()), value, f"{path}.{key}")
        if key != DELETE:
            made.put(key, value, *new.origins.get(key, NO_ORIGINS))
    return made
