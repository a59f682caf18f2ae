"""Import statements: config files by position, everything else as references; and what failing to bind leaves.

That absolute imports only *name* things is the idea of mmengine's lazy configs; that relative ones read configs by
their place, without packages, is detectron2's.
"""

from __future__ import annotations

import ast
import os.path
from itertools import islice
from typing import Any

from dslpar.core.errors import Location
from dslpar.core.suggest import did_you_mean
from dslpar.language.calls import Invocations
from dslpar.language.codes import MistakeError, UnknownError
from dslpar.language.functions import FUNCTIONS, VALUES
from dslpar.language.limits import MAX_SUGGESTED
from dslpar.language.session import as_mapping, find_module
from dslpar.language.syntax import bound_names
from dslpar.language.tree import Reference
from dslpar.language.values import UNKNOWN, Dict, List, Slot


class Imports(Invocations):
    """Binding names, by imports first of all."""

    def bind(self, name: str, value: Any, place: Location, key_place: Location, bound_by: str = "") -> None:
        self.scope.names[name] = Slot(value, place, key_place, bound_by)

    def poison(self, node: Any) -> None:
        """Make unknown all that a statement would have bound or changed."""
        for target in bound_names(node):
            self.budget.spend(1)
            if isinstance(target, ast.Name):
                place = self.place(target) if hasattr(target, "lineno") else self.place(node)
                self.bind(target.id, UNKNOWN, place, place)
            else:
                self.spoil(target.value)

    def spoil(self, node: Any) -> None:
        """Mark the container behind `node.x = ...` as changed in an unknown way, if it is there."""
        owner = self.peek(node)
        if isinstance(owner, (List, Dict)):
            owner.spoiled = True

    def import_modules(self, node: ast.Import) -> None:
        """`import a.b as c`: a reference by name."""
        for alias in node.names:
            name = alias.name if alias.asname else alias.name.partition(".")[0]
            place = self.place(alias)
            self.bind(alias.asname or name, Reference(name), place, place, "module")

    def import_names(self, node: ast.ImportFrom) -> None:
        """`from a.b import c`: references; `from .a.b import c`: values of a config file."""
        if any(alias.name == "*" for alias in node.names):
            raise MistakeError("CFG008", "`import *` is not part of the config language")
        if node.level:
            self.import_config(node)
        elif node.module != "__future__":
            self.import_references(node)

    def import_references(self, node: ast.ImportFrom) -> None:
        for alias in node.names:
            full, place = f"{node.module}.{alias.name}", self.place(alias)
            named = alias.asname is not None and full not in FUNCTIONS and full not in VALUES
            bound_by = "" if named else "module"
            self.bind(alias.asname or alias.name, VALUES.get(full, Reference(full)), place, place, bound_by)

    def import_config(self, node: ast.ImportFrom) -> None:
        base = find_module(node.module or "", node.level, self.source.path)
        is_folder = not node.module or (os.path.isdir(base) and not os.path.exists(f"{base}.py"))
        names = {} if is_folder else self.session.names_of(f"{base}.py", self.module_place(node))
        for alias in node.names:
            try:
                self.import_one(alias, base, names, is_folder)
            except UnknownError:
                self.poison(alias)
            except MistakeError as error:
                self.report(error, alias)
                self.poison(alias)

    def import_one(self, alias: ast.alias, base: str, names: dict[str, Slot] | None, is_folder: bool) -> None:
        place, bound_as = self.place(alias), alias.asname or alias.name
        if (is_folder and not os.path.lexists(os.path.join(base, "__init__.py"))) or self.is_file(base, alias.name):
            path = os.path.join(base, f"{alias.name}.py")
            self.bind(bound_as, as_mapping(self.session.names_of(path, place)), place, place, "module")
            return
        if is_folder:
            names = self.session.names_of(os.path.join(base, "__init__.py"), place)
        if names is None:
            raise UnknownError
        if alias.name not in names:
            has = ", ".join(list(names)[:12])
            message = (
                f"{alias.name!r} is not in that config{did_you_mean(alias.name, islice(names, MAX_SUGGESTED), '; ')}"
            )
            raise MistakeError("CFG006", message, f"it has: {has}" if has else "")
        slot = names[alias.name]
        bound_by = "module" if slot.bound_by == "module" else "config"
        self.bind(bound_as, slot.value, slot.place, place, bound_by)

    @staticmethod
    def is_file(base: str, name: str) -> bool:
        return os.path.isdir(base) and os.path.lexists(os.path.join(base, f"{name}.py"))

    def module_place(self, node: ast.ImportFrom) -> Location:
        """Where the module's name stands in the statement."""
        return self.source.find("." * node.level + (node.module or ""), self.place(node))
