"""Expressions other than containers and calls: names, attributes, items and slices, operators, f-strings.

The name of a builtin evaluates to a `Reference`, as do imported names and their attributes; see functions.py.
"""

from __future__ import annotations

import ast
import builtins
from itertools import islice

from dslpar.core.errors import Location
from dslpar.core.suggest import did_you_mean
from dslpar.language import operators
from dslpar.language.errors import WRITE_VALUE, ConfigError, UnknownError
from dslpar.language.evaluator import Evaluator, Handlers, type_name
from dslpar.language.formatting import CONVERSIONS, formatted, to_text
from dslpar.language.functions import BUILTINS, VALUES
from dslpar.language.limits import MAX_SUGGESTED, check_length, check_size
from dslpar.language.methods import find_method
from dslpar.language.tree import Reference
from dslpar.language.values import (
    Dict,
    List,
    Located,
    Value,
    make_tuple,
    origins_of,
    require_known,
    require_readable,
)


def constant(ev: Evaluator, node: ast.Constant) -> Located:
    if isinstance(node.value, str):
        ev.budget.spend(len(node.value) // 64)
    return check_size(node.value), ev.location(node)


def name(ev: Evaluator, node: ast.Name) -> Located:
    binding = ev.scope.find(node.id)
    if binding is not None:
        return binding.value, binding.location
    if node.id in BUILTINS:
        return Reference(f"builtins.{node.id}"), ev.location(node)
    raise undefined(ev, node.id)


def undefined(ev: Evaluator, name: str) -> ConfigError:
    """Make the error of a name that is not bound."""
    if hasattr(builtins, name):
        return ConfigError("CFG003", f"{name!r} is not part of the config language", BUILTIN_HINTS.get(name, ""))
    close = did_you_mean(name, islice([*ev.globals.names, *BUILTINS], MAX_SUGGESTED))
    return ConfigError("CFG010", f"name {name!r} is not defined", NAME_HINTS.get(name, close))


def attribute(ev: Evaluator, node: ast.Attribute) -> Located:
    owner, location = ev.eval(node.value)
    return attribute_of(ev, owner, location, node)


def attribute_of(ev: Evaluator, owner: Value, location: Location, node: ast.Attribute) -> Located:
    """Read an attribute: a key of a dict, or the next part of a reference's dotted name."""
    name = node.attr
    require_known(owner)
    if isinstance(owner, Dict) and name in owner:
        return owner[name], owner.origin_of(name) or location
    if isinstance(owner, Dict) and owner.tainted:
        raise UnknownError
    if name.startswith("__") and not isinstance(owner, Dict):
        raise ConfigError("CFG004", f"attribute {name!r} is not part of the config language", WRITE_VALUE)
    if isinstance(owner, Reference):
        full = f"{owner.name}.{name}"
        # `x = x.a` in a loop makes ever longer names: their total length grows with the square of the steps.
        check_length(len(full) * 100)
        return VALUES.get(full, Reference(full)), ev.location(node)
    if find_method(owner, name):
        raise ConfigError("CFG003", f"the method {name!r} is not called", f"write {name}(...)")
    if isinstance(owner, Dict):
        raise missing_key(name, owner, attribute_location(ev, node))
    raise ConfigError(
        "CFG004", f"a {type_name(owner)} has no attribute {name!r}", f"{WRITE_VALUE}; attributes are keys of dicts only"
    )


def attribute_location(ev: Evaluator, node: ast.Attribute) -> Location:
    """Return the location of the name after the dot."""
    location = ev.location(node)
    return Location(location.path, location.end_line, location.end_column - len(node.attr), *location[3:])


def subscript(ev: Evaluator, node: ast.Subscript) -> Located:
    owner, location = ev.eval(node.value)
    if isinstance(node.slice, ast.Slice):
        return slice_of(ev, owner, slice_bounds(ev, node.slice), node)
    key, _ = ev.eval(node.slice)
    require_known(owner, key)
    if isinstance(owner, Reference):
        raise ConfigError("CFG003", f"cannot index {owner.name} in a config", WRITE_VALUE)
    if isinstance(owner, dict):
        ev.budget.weigh(key)
        if key not in owner:
            require_readable(owner)
            raise missing_key(key, owner, ev.location(node.slice))
        return owner[key], (owner.origin_of(key) if isinstance(owner, Dict) else None) or location
    require_readable(owner)
    value = owner[key]
    origin = origins_of(owner)[key] if isinstance(owner, (list, tuple)) else ev.location(node)
    return check_size(value), origin or location


def slice_bounds(ev: Evaluator, node: ast.Slice) -> slice:
    """Evaluate `start:stop:step`."""
    parts = [None if part is None else ev.eval(part)[0] for part in (node.lower, node.upper, node.step)]
    require_known(*parts)
    return slice(*parts)


def slice_of(ev: Evaluator, owner: Value, bounds: slice, node: ast.AST) -> Located:
    """Read a slice, with the origins of its items."""
    require_readable(owner)
    part = owner[bounds]
    if isinstance(part, (str, list, tuple)):
        ev.budget.spend(len(part) // 8)
    if isinstance(part, list):
        part = List(part, origins_of(owner)[bounds])
    elif isinstance(part, tuple):
        part = make_tuple(part, origins_of(owner)[bounds])
    return part, ev.location(node)


def unary(ev: Evaluator, node: ast.UnaryOp) -> Located:
    value, _ = ev.eval(node.operand)
    require_known(value)
    return operators.unary(node.op, value), ev.location(node)


def binary(ev: Evaluator, node: ast.BinOp) -> Located:
    left, _ = ev.eval(node.left)
    right, _ = ev.eval(node.right)
    return operators.binary(node.op, left, right, ev.budget), ev.location(node)


def boolean(ev: Evaluator, node: ast.BoolOp) -> Located:
    decides = isinstance(node.op, ast.Or)
    for operand in node.values[:-1]:
        value, location = ev.eval(operand)
        if bool(value) is decides:
            return value, location
    return ev.eval(node.values[-1])


def comparison(ev: Evaluator, node: ast.Compare) -> Located:
    left, _ = ev.eval(node.left)
    result: Value = True
    for op, operand in zip(node.ops, node.comparators, strict=True):
        right, _ = ev.eval(operand)
        result = operators.compare(op, left, right, ev.budget)
        if not result:
            break
        left = right
    return result, ev.location(node)


def conditional(ev: Evaluator, node: ast.IfExp) -> Located:
    test, _ = ev.eval(node.test)
    return ev.eval(node.body if test else node.orelse)


def f_string(ev: Evaluator, node: ast.JoinedStr) -> Located:
    parts: list[Value] = []
    for part in node.values:
        parts.append(part.value if isinstance(part, ast.Constant) else ev.eval(part)[0])
        require_known(parts[-1])
    check_length(sum(map(len, parts)))
    return check_size("".join(parts)), ev.location(node)


def f_string_field(ev: Evaluator, node: ast.FormattedValue) -> Located:
    value, _ = ev.eval(node.value)
    spec = ev.eval(node.format_spec)[0] if node.format_spec else ""
    require_known(value, spec)
    convert = CONVERSIONS[node.conversion]
    if convert is not None:
        value = to_text(value, ev.budget, convert)
    return formatted(value, spec, ev.budget), ev.location(node)


def missing_key(key: Value, owner: dict[Value, Value], location: Location) -> ConfigError:
    """Make the error of a missing key; its hint lists the keys of the mapping."""
    keys = ", ".join(str(name)[:40] for name in list(owner)[:12] if isinstance(name, (str, int)))
    shown = repr(key) if isinstance(key, (str, int, float)) and len(str(key)) < 80 else "of this value"
    hint = f"choose from its keys: {keys}" if keys else "choose a value, and assign it to the key first"
    close = did_you_mean(key, islice(owner, MAX_SUGGESTED))
    return ConfigError("CFG004", f"there is no key {shown} in this mapping", close or hint, location)


BUILTIN_HINTS = {
    "open": "write the value itself that the file holds, or import it from a config",
    "print": "leave it out (dslpar config shows the values)",
    "map": "write `[... for ... in ...]`",
    "filter": "write `[... for ... in ... if ...]`",
    "pow": "write `... ** ...`",
    "eval": "write the value itself",
    "exec": "choose its statements, and write them alone",
    "__name__": "leave it out: a config is never a program",
    "__import__": "write `import ...`",
    "getattr": "write `NAME.get(...)`",
    "setattr": "write `NAME[...] = ...`",
    "hasattr": "write `... in NAME`",
    "frozenset": "write set",
    "type": "write `isinstance(...)`",
}
NAME_HINTS = {
    "__file__": "write the value itself: a path relative to the working directory",
    "math": "write `import math` above",
    "os": "write `import os` above",
}
HANDLERS: Handlers = {
    ast.Constant: constant,
    ast.Name: name,
    ast.Attribute: attribute,
    ast.Subscript: subscript,
    ast.UnaryOp: unary,
    ast.BinOp: binary,
    ast.BoolOp: boolean,
    ast.Compare: comparison,
    ast.IfExp: conditional,
    ast.JoinedStr: f_string,
    ast.FormattedValue: f_string_field,
}
