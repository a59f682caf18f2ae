"""Import statements: config files by position, everything else as references.

That absolute imports only *name* things is the idea of mmengine's lazy configs; that relative ones read configs by
their position, without packages, is detectron2's.
"""

from __future__ import annotations

import ast
import os.path
from itertools import islice

from dslpar.core.suggest import did_you_mean
from dslpar.language.errors import ConfigError, UnknownError
from dslpar.language.evaluator import Evaluator
from dslpar.language.functions import FUNCTIONS, VALUES
from dslpar.language.limits import MAX_SUGGESTED
from dslpar.language.session import as_mapping, find_module
from dslpar.language.tree import Reference
from dslpar.language.values import Binding


def import_modules(ev: Evaluator, node: ast.Import) -> None:
    """Evaluate `import a.b as c`: a reference by name."""
    for alias in node.names:
        name = alias.name if alias.asname else alias.name.partition(".")[0]
        location = ev.location(alias)
        ev.bind(alias.asname or name, Reference(name), location, location, "module")


def import_names(ev: Evaluator, node: ast.ImportFrom) -> None:
    """Evaluate `from a.b import c`, which binds references, or `from .a.b import c`, values of a config file."""
    if any(alias.name == "*" for alias in node.names):
        raise ConfigError("CFG008", "`import *` is not part of the config language")
    if node.level:
        _import_from_config(ev, node)
    elif node.module != "__future__":
        for alias in node.names:
            full, location = f"{node.module}.{alias.name}", ev.location(alias)
            renamed = alias.asname is not None and full not in FUNCTIONS and full not in VALUES
            value, imported_as = VALUES.get(full, Reference(full)), "" if renamed else "module"
            ev.bind(alias.asname or alias.name, value, location, location, imported_as)


def _import_from_config(ev: Evaluator, node: ast.ImportFrom) -> None:
    base = find_module(node.module or "", node.level, ev.source.path)
    is_folder = not node.module or (os.path.isdir(base) and not os.path.exists(f"{base}.py"))
    names: dict[str, Binding] | None = {}
    if not is_folder:
        module = ev.source.find("." * node.level + (node.module or ""), ev.location(node))
        names = ev.session.names_of(f"{base}.py", module)
    for alias in node.names:
        try:
            _import_name(ev, alias, base, names, is_folder)
        except UnknownError:
            ev.make_unknown(alias)
        except ConfigError as error:
            ev.report(error, alias)
            ev.make_unknown(alias)


def _import_name(ev: Evaluator, alias: ast.alias, base: str, names: dict[str, Binding] | None, is_folder: bool) -> None:
    location, bound_as = ev.location(alias), alias.asname or alias.name
    init = os.path.join(base, "__init__.py")
    path = os.path.join(base, f"{alias.name}.py")
    if (is_folder and not os.path.lexists(init)) or (os.path.isdir(base) and os.path.lexists(path)):
        ev.bind(bound_as, as_mapping(ev.session.names_of(path, location)), location, location, "module")
        return
    if is_folder:
        names = ev.session.names_of(init, location)
    if names is None:
        raise UnknownError
    if alias.name not in names:
        has = ", ".join(list(names)[:12])
        close = did_you_mean(alias.name, islice(names, MAX_SUGGESTED), "; ")
        raise ConfigError("CFG006", f"no name {alias.name!r} in that config{close}", f"it has: {has}" if has else "")
    binding = names[alias.name]
    imported_as = "module" if binding.imported_as == "module" else "config"
    ev.bind(bound_as, binding.value, binding.location, location, imported_as)
