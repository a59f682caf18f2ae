"""Import statements: relative imports read config files, absolute imports make references.

Absolute imports only *name* things, as in mmengine's lazy configs. Relative imports read configs by their position,
without packages, as in detectron2. Absolute imports of config modules (`from configs.common.train import train`, as in
LiBai's projects) read configs too; `dslpar.language.finder` finds their files.
"""

from __future__ import annotations

import ast
import os.path
from itertools import islice

from dslpar.core.errors import Location
from dslpar.core.suggest import did_you_mean
from dslpar.language.errors import ConfigError, UnknownError
from dslpar.language.evaluator import Evaluator
from dslpar.language.finder import find_absolute, find_module
from dslpar.language.functions import FUNCTIONS, VALUES
from dslpar.language.limits import MAX_SUGGESTED
from dslpar.language.load_session import as_mapping
from dslpar.language.tree import Reference
from dslpar.language.values import Binding, Value, deep_copy


def import_modules(ev: Evaluator, node: ast.Import) -> None:
    """Evaluate `import a.b as c`, which binds a reference."""
    for alias in node.names:
        name = alias.name if alias.asname else alias.name.partition(".")[0]
        location = ev.location(alias)
        ev.bind(alias.asname or name, Reference(name), location, location, "module")


def import_names(ev: Evaluator, node: ast.ImportFrom) -> None:
    """Evaluate `from a.b import c`, which binds references, or `from .a.b import c`, which binds a config's values."""
    if any(alias.name == "*" for alias in node.names):
        hint = f"write `from {'.' * node.level}{node.module or ''} import ...` with the names that are needed"
        raise ConfigError("CFG008", "`import *` is not part of the config language", hint)
    base = find_module(node.module or "", node.level, ev.source.path) if node.level else None
    if not node.level and node.module:
        base = find_absolute(node.module, ev.source.path)
    if base is not None:
        _import_from_config(ev, node, base)
    elif node.module != "__future__":
        for alias in node.names:
            full, location = f"{node.module}.{alias.name}", ev.location(alias)
            renamed = alias.asname is not None and full not in FUNCTIONS and full not in VALUES
            value, imported_as = VALUES.get(full, Reference(full)), "" if renamed else "module"
            ev.bind(alias.asname or alias.name, value, location, location, imported_as)


def _import_from_config(ev: Evaluator, node: ast.ImportFrom, base: str) -> None:
    """Bind values of the config file at `base` (a path without extension), or files of the folder `base`."""
    as_module = not node.level or ev.session.in_module

    def names_of(path: str, location: Location) -> dict[str, Binding] | None:
        return ev.session.names_of(path, location, as_module)

    is_folder = not node.module or (os.path.isdir(base) and not os.path.exists(f"{base}.py"))
    names: dict[str, Binding] | None = {}
    if not is_folder:
        names = names_of(f"{base}.py", ev.source.find("." * node.level + (node.module or ""), ev.location(node)))
    init = os.path.join(base, "__init__.py")
    copied: dict[int, Value] | None = None if as_module or not ev.session.modules else {}
    for alias in node.names:
        location = ev.location(alias)
        path = os.path.join(base, f"{alias.name}.py")
        try:
            if (is_folder and not os.path.lexists(init)) or (os.path.isdir(base) and os.path.lexists(path)):
                ev.bind(alias.asname or alias.name, as_mapping(names_of(path, location)), location, location, "module")
            else:
                _import_name(ev, alias, names_of(init, location) if is_folder else names, copied)
        except UnknownError:
            ev.make_unknown(alias)
        except ConfigError as error:
            ev.report(error, alias)
            ev.make_unknown(alias)


def _import_name(
    ev: Evaluator, alias: ast.alias, names: dict[str, Binding] | None, copied: dict[int, Value] | None
) -> None:
    """Bind one name of a file.

    If `copied` is set, the value may belong to a module. It is then deep-copied, since relative imports must not share
    a module's values. `copied` maps the ids of containers copied so far to their copies.
    """
    if names is None:
        raise UnknownError
    if alias.name not in names:
        has = ", ".join(list(names)[:12])
        close = did_you_mean(alias.name, islice(names, MAX_SUGGESTED))
        hint = close or (f"choose from its names: {has}" if has else "")
        raise ConfigError("CFG006", f"no name {alias.name!r} in that config", hint)
    binding = names[alias.name]
    imported_as = "module" if binding.imported_as == "module" else "config"
    value = binding.value
    if copied is not None:
        ev.budget.weigh(value)
        value = deep_copy(value, copied)
    ev.bind(alias.asname or alias.name, value, binding.location, ev.location(alias), imported_as)
