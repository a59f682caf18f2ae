"""Expressions of the config language, evaluated over `ast`, never executed.

Each handler returns `(value, place)`. A failure is recorded where it happens and its expression becomes `UNKNOWN`, so
that one pass reports everything. Names hold references for what Python would import; see functions.py.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from itertools import islice
from typing import Any, ClassVar

from dslpar.core.errors import Location
from dslpar.core.suggest import did_you_mean
from dslpar.language import operators
from dslpar.language.codes import CODES, PYTHON_ERRORS, MistakeError, UnknownError
from dslpar.language.formatting import CONVERSIONS, formatted, to_text
from dslpar.language.functions import BUILTINS, VALUES
from dslpar.language.limits import MAX_SUGGESTED, check_length, check_size
from dslpar.language.methods import find_method
from dslpar.language.session import Session
from dslpar.language.source import Source
from dslpar.language.tree import Reference
from dslpar.language.values import UNKNOWN, Dict, List, Placed, Slot, Unknown, make_tuple, origins_of


class Scope:
    """Names of a file, or of a comprehension within it."""

    __slots__ = ("names", "outer")

    def __init__(self, outer: Scope | None = None) -> None:
        self.names: dict[str, Slot] = {}
        self.outer = outer

    def find(self, name: str) -> Slot | None:
        scope: Scope | None = self
        while scope is not None:
            if name in scope.names:
                return scope.names[name]
            scope = scope.outer
        return None


class Expressions:
    """Names, operators and text; containers and calls are added by displays.py and invocations.py."""

    handlers: ClassVar[dict[type[ast.AST], Callable[[Any, Any], Placed]]] = {}

    def __init__(self, source: Source, session: Session) -> None:
        self.source, self.session, self.budget = source, session, session.budget
        self.globals = self.scope = Scope()

    def place(self, node: Any) -> Location:
        return self.source.place(node)

    def eval(self, node: Any) -> Placed:
        """The value of an expression and its origin; `UNKNOWN` where it fails, with a finding."""
        self.budget.spend(1)
        if hasattr(node, "out"):
            if isinstance(node, ast.NamedExpr):
                self.globals.names[node.target.id] = Slot(UNKNOWN, self.place(node), self.place(node))
            return UNKNOWN, self.place(node)
        try:
            handler = self.handlers.get(type(node))
            if handler is None:  # a starred expression or a slice where neither belongs
                raise MistakeError("CFG002", "this expression has no value", "write a value")
            return handler(self, node)
        except UnknownError:
            pass
        except (MistakeError, *PYTHON_ERRORS) as error:
            self.report(error, node)
        return UNKNOWN, self.place(node)

    def report(self, error: Exception, node: Any) -> None:
        """Record a failure at its own place, or else at the node's."""
        self.session.report(to_failed(error), self.place(node))

    def constant(self, node: ast.Constant) -> Placed:
        if isinstance(node.value, str):
            self.budget.spend(len(node.value) // 64)
        return check_size(node.value), self.place(node)

    def name(self, node: ast.Name) -> Placed:
        slot = self.scope.find(node.id)
        if slot is not None:
            return slot.value, slot.place
        if node.id in BUILTINS:
            return Reference(f"builtins.{node.id}"), self.place(node)
        raise self.undefined(node.id)

    def undefined(self, name: str) -> MistakeError:
        import builtins

        if hasattr(builtins, name):
            return MistakeError("CFG003", f"{name!r} is not part of the config language", BUILTIN_HELP.get(name, ""))
        known = islice([*self.globals.names, *BUILTINS], MAX_SUGGESTED)
        return MistakeError(
            "CFG010", f"name {name!r} is not defined{did_you_mean(name, known, '; ')}", NAME_HELP.get(name, "")
        )

    def attribute(self, node: ast.Attribute) -> Placed:
        owner, place = self.eval(node.value)
        return self.attribute_of(owner, place, node)

    def attribute_of(self, owner: Any, place: Location, node: ast.Attribute) -> Placed:
        name = node.attr
        if isinstance(owner, Unknown):
            raise UnknownError
        if isinstance(owner, Dict):
            return self.dict_attribute(owner, place, node)
        if name.startswith("__"):
            raise MistakeError("CFG004", f"attribute {name!r} is not part of the config language", "name a value")
        if isinstance(owner, Reference):
            full = f"{owner.name}.{name}"
            check_length(len(full) * 100)
            return VALUES.get(full, Reference(full)), self.place(node)
        if find_method(owner, name):
            raise MistakeError("CFG003", f"the method {name!r} is not called", f"write {name}(...)")
        raise MistakeError(
            "CFG004", f"a {kind_of(owner)} has no attribute {name!r}", "attributes are keys of dicts only"
        )

    def dict_attribute(self, owner: Dict, place: Location, node: ast.Attribute) -> Placed:
        if node.attr in owner:
            return owner[node.attr], owner.place_of(node.attr) or place
        if owner.spoiled:
            raise UnknownError
        if find_method(owner, node.attr):
            raise MistakeError("CFG003", f"the method {node.attr!r} is not called", f"write {node.attr}(...)")
        raise missing_key(node.attr, owner, self.attribute_place(node))

    def attribute_place(self, node: ast.Attribute) -> Location:
        """Where the name behind the dot stands."""
        place = self.place(node)
        return Location(place.path, place.end_line, place.end_column - len(node.attr), *place[3:])

    def subscript(self, node: ast.Subscript) -> Placed:
        owner, place = self.eval(node.value)
        if isinstance(node.slice, ast.Slice):
            return self.sliced(owner, self.slice_of(node.slice), node)
        key, _ = self.eval(node.slice)
        if isinstance(owner, Unknown) or isinstance(key, Unknown):
            raise UnknownError
        if isinstance(owner, Reference):
            raise MistakeError("CFG003", f"{owner.name}[...] is not read in a config", "write the value itself")
        if isinstance(owner, dict):
            self.budget.weigh(key)
            if key not in owner:
                if getattr(owner, "spoiled", False):
                    raise UnknownError
                raise missing_key(key, owner, self.place(node.slice))
            return owner[key], (owner.place_of(key) if isinstance(owner, Dict) else None) or place
        self.check_spoiled(owner)
        value = owner[key]
        item_place = origins_of(owner)[key] if isinstance(owner, (list, tuple)) else self.place(node)
        return check_size(value), item_place or place

    @staticmethod
    def check_spoiled(owner: Any) -> None:
        """What is read from a list that was changed in an unknown way is unknown."""
        if getattr(owner, "spoiled", False):
            raise UnknownError

    def slice_of(self, node: ast.Slice) -> slice:
        parts = [None if part is None else self.eval(part)[0] for part in (node.lower, node.upper, node.step)]
        if any(isinstance(part, Unknown) for part in parts):
            raise UnknownError
        return slice(*parts)

    def sliced(self, owner: Any, part: slice, node: Any) -> Placed:
        if isinstance(owner, Unknown):
            raise UnknownError
        self.check_spoiled(owner)
        made = owner[part]
        if isinstance(made, (str, list, tuple)):
            self.budget.spend(len(made) // 8)
        if isinstance(made, list):
            made = List(made, origins_of(owner)[part])
        elif isinstance(made, tuple):
            made = make_tuple(made, origins_of(owner)[part])
        return made, self.place(node)

    def peek(self, node: Any) -> Any:
        """What a chain of names and keys leads to, without findings."""
        if isinstance(node, ast.Name):
            slot = self.scope.find(node.id)
            return slot.value if slot else None
        owner = self.peek(node.value) if isinstance(node, (ast.Attribute, ast.Subscript)) else None
        if isinstance(owner, Dict) and isinstance(node, ast.Attribute):
            return owner.get(node.attr)
        return owner  # of an item of unknown key, the whole

    def unary(self, node: ast.UnaryOp) -> Placed:
        value, _ = self.eval(node.operand)
        if isinstance(value, Unknown):
            raise UnknownError
        return operators.unary(node.op, value), self.place(node)

    def binary(self, node: ast.BinOp) -> Placed:
        left, _ = self.eval(node.left)
        right, _ = self.eval(node.right)
        return operators.binary(node.op, left, right, self.budget), self.place(node)

    def boolean(self, node: ast.BoolOp) -> Placed:
        wanted = isinstance(node.op, ast.Or)
        for operand in node.values[:-1]:
            value, place = self.eval(operand)
            if bool(value) is wanted:
                return value, place
        return self.eval(node.values[-1])

    def comparison(self, node: ast.Compare) -> Placed:
        left, _ = self.eval(node.left)
        result: Any = True
        for op, operand in zip(node.ops, node.comparators, strict=True):
            right, _ = self.eval(operand)
            result = operators.compare(op, left, right, self.budget)
            if not result:
                break
            left = right
        return result, self.place(node)

    def conditional(self, node: ast.IfExp) -> Placed:
        test, _ = self.eval(node.test)
        return self.eval(node.body if test else node.orelse)

    def text(self, node: ast.JoinedStr) -> Placed:
        parts: list[Any] = []
        for part in node.values:
            parts.append(part.value if isinstance(part, ast.Constant) else self.eval(part)[0])
            if isinstance(parts[-1], Unknown):
                raise UnknownError
        check_length(sum(map(len, parts)))
        return check_size("".join(parts)), self.place(node)

    def text_field(self, node: ast.FormattedValue) -> Placed:
        value, _ = self.eval(node.value)
        spec = self.eval(node.format_spec)[0] if node.format_spec else ""
        if isinstance(value, Unknown) or isinstance(spec, Unknown):
            raise UnknownError
        convert = CONVERSIONS[node.conversion]
        if convert is not None:
            value = to_text(value, self.budget, convert)
        return formatted(value, spec, self.budget), self.place(node)


def missing_key(key: Any, owner: dict[Any, Any], place: Location) -> MistakeError:
    """A KeyError, with what the mapping has instead."""
    keys = ", ".join(str(name)[:40] for name in list(owner)[:12] if isinstance(name, (str, int)))
    shown = repr(key) if isinstance(key, (str, int, float)) and len(str(key)) < 80 else "of this value"
    help = f"its keys are: {keys}" if keys else "the mapping is empty: assign the key first"
    return MistakeError(
        "CFG004",
        f"there is no key {shown} in this mapping{did_you_mean(key, islice(owner, MAX_SUGGESTED), '; ')}",
        help,
        place,
    )


def kind_of(value: Any) -> str:
    """The type's name as the author knows it."""
    return type(value).__name__.lower() if isinstance(value, (list, tuple, dict)) else type(value).__name__


def to_failed(error: Exception) -> MistakeError:
    """A Python error with the same sense, as a failure of the language."""
    if isinstance(error, MistakeError):
        return error
    if isinstance(error, RecursionError):
        return MistakeError("CFG005", "evaluation nested too deep", "assign the inner parts to names first")
    message = str(error) if not isinstance(error, KeyError) else f"there is no key {error}"
    for ours in ("List", "Dict", "Tuple"):
        message = message.replace(f"'{ours}'", f"'{ours.lower()}'").replace(f'"{ours}"', f'"{ours.lower()}"')
    return MistakeError("CFG004", f"{type(error).__name__}: {message[:300]}", CODES["CFG004"].help)


BUILTIN_HELP = {
    "open": "write the values that the file holds into the config, or import them from a config",
    "print": "leave it out; `dslpar config FILE` shows the values",
    "map": "write a comprehension: [f(x) for x in xs]",
    "filter": "write a comprehension: [x for x in xs if ...]",
    "pow": "write base ** exponent",
    "eval": "write the expression itself",
    "exec": "write the statements themselves",
    "__import__": "write an import statement",
    "getattr": "write mapping.key or mapping.get('key', default)",
    "setattr": "write mapping.key = value",
    "hasattr": "write 'key' in mapping",
    "frozenset": "write set(...)",
    "type": "write isinstance(value, type)",
}
NAME_HELP = {
    "__file__": "write paths relative to the working directory",
    "__name__": "leave it out: a config is never a program",
}
