"""Evaluator of one config file: holds the file's names, and calls the handler of each expression's syntax.

An `Evaluator` holds the state that the handlers of expressions and statements share. It knows no syntax itself:
handlers are functions `(evaluator, node)`, listed in one table per module and merged in statements.py. A failing
expression is recorded as a finding and its value becomes `UNKNOWN`, so that one pass reports everything.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from typing import TypeAlias

from dslpar.core.errors import Location
from dslpar.language.errors import CODES, PYTHON_ERRORS, WRITE_VALUE, ConfigError, UnknownError
from dslpar.language.load_session import Session
from dslpar.language.source import Source, import_by_position
from dslpar.language.syntax import changed_targets
from dslpar.language.tree import Reference
from dslpar.language.values import UNKNOWN, Binding, Dict, List, Located, Value, origins_of, require_readable

Handlers: TypeAlias = "Mapping[type[ast.AST], Callable[[Evaluator, Value], Located]]"


class Scope:
    """The names of a file, or of a comprehension within it."""

    __slots__ = ("names", "outer")

    def __init__(self, outer: Scope | None = None) -> None:
        self.names: dict[str, Binding] = {}
        self.outer = outer

    def find(self, name: str) -> Binding | None:
        """Look a name up, from the innermost scope outwards."""
        scope: Scope | None = self
        while scope is not None:
            if name in scope.names:
                return scope.names[name]
            scope = scope.outer
        return None


class Evaluator:
    """One file under evaluation."""

    def __init__(self, source: Source, session: Session, expressions: Handlers) -> None:
        self.source, self.session, self.budget = source, session, session.budget
        self.expressions = expressions
        self.globals = self.scope = Scope()
        self.loops = 0
        """Number of loops around the current statement."""

    def location(self, node: ast.AST) -> Location:
        """Return the location of a node in the file."""
        return self.source.location(node)

    def eval(self, node: ast.AST) -> Located:
        """Return the value and origin of an expression; `UNKNOWN`, with a finding, if its evaluation fails."""
        self.budget.spend(1)
        if hasattr(node, "unsupported"):
            if isinstance(node, ast.NamedExpr):
                self.globals.names[node.target.id] = Binding(UNKNOWN, self.location(node), self.location(node))
            return UNKNOWN, self.location(node)
        try:
            handler = self.expressions.get(type(node))
            if handler is None:  # a misplaced starred expression or slice
                raise ConfigError("CFG002", "this expression has no value", WRITE_VALUE)
            return handler(self, node)
        except UnknownError:
            pass  # the unknown value that it depends on has a finding already
        except (ConfigError, *PYTHON_ERRORS) as error:
            self.report(error, node)
        return UNKNOWN, self.location(node)

    def report(self, error: Exception, node: ast.AST) -> None:
        """Record a failure at the error's own location if it has one, else at the node's."""
        told = as_config_error(error)
        if told.hint == WRITE_VALUE:
            names = (self.peek(part) for part in ast.walk(node) if isinstance(part, (ast.Name, ast.Attribute)))
            hints = (
                import_by_position(value.name, self.source.path) for value in names if isinstance(value, Reference)
            )
            told.hint = next(filter(None, hints), WRITE_VALUE)
        self.session.report(told, self.location(node))

    def bind(self, name: str, value: Value, location: Location, name_location: Location, imported_as: str = "") -> None:
        """Bind a name of the current scope to a value."""
        self.scope.names[name] = Binding(value, location, name_location, imported_as)

    def items_of(self, value: Value, location: Location) -> tuple[list[Value], list[Value]]:
        """Read an iterable to its end. Returns the items and their origins."""
        require_readable(value)
        items = self.budget.take_all(value)
        known = isinstance(value, (List, tuple))
        return items, [origin or location for origin in origins_of(value)] if known else [location] * len(items)

    def peek(self, node: ast.AST) -> Value:
        """Follow a chain of names and attributes without findings; for an item `x[...]`, return the container `x`."""
        if isinstance(node, ast.Name):
            binding = self.scope.find(node.id)
            return binding.value if binding else None
        owner = self.peek(node.value) if isinstance(node, (ast.Attribute, ast.Subscript)) else None
        if isinstance(owner, Dict) and isinstance(node, ast.Attribute):
            return owner.get(node.attr)
        return owner

    def make_unknown(self, node: ast.AST) -> None:
        """Mark as unknown everything that a failed or skipped statement would have bound or changed."""
        for target in changed_targets(node):
            self.budget.spend(1)
            if isinstance(target, ast.Name):
                # The names that `def`, `class` and imports bind are not nodes of the tree and have no location.
                location = self.location(target if hasattr(target, "lineno") else node)
                self.bind(target.id, UNKNOWN, location, location)
                continue
            # Some item of the container is now unknown, so a missing item may not be reported as a mistake.
            owner = self.peek(target.value)
            if isinstance(owner, (List, Dict)):
                owner.tainted = True


def type_name(value: object) -> str:
    """Return the name of a value's type as the author knows it."""
    name = type(value).__name__
    return name.lower() if isinstance(value, (list, tuple, dict)) else name


def as_config_error(error: Exception) -> ConfigError:
    """Convert a Python error to a ConfigError that names types as the author knows them: `dict`, not `Dict`."""
    if isinstance(error, ConfigError):
        return error
    if isinstance(error, RecursionError):
        return ConfigError(
            "CFG005", "evaluation is nested too deeply", "choose inner parts, and assign them to names first"
        )
    message = str(error) if not isinstance(error, KeyError) else f"there is no key {error}"
    if any(name in message for name in ("'Reference'", "not Reference", "LazyTarget")):
        # A Reference is imported only at build, so its value is not known here, unlike in Python.
        return ConfigError("CFG003", "the contents of another package are not known in a config", WRITE_VALUE)
    for ours in ("List", "Dict", "Tuple"):
        message = message.replace(f"'{ours}'", f"'{ours.lower()}'").replace(f'"{ours}"', f'"{ours.lower()}"')
    return ConfigError("CFG004", f"{type(error).__name__}: {message[:300]}", CODES["CFG004"].hint)
