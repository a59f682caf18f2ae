"""Operators on values: Python's own, with a guard that refuses results beyond the bounds before they are made."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable

from dslpar.language.errors import ConfigError
from dslpar.language.formatting import percent
from dslpar.language.limits import CONTAINERS, MAX_BITS, Budget, check_bits, check_items, check_length, check_size
from dslpar.language.tree import Reference
from dslpar.language.values import Dict, List, Value, make_tuple, origins_of, require_known, require_readable

BINARY: dict[type[ast.operator], Callable[[Value, Value], Value]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.LShift: operator.lshift,
    ast.RShift: operator.rshift,
    ast.BitOr: operator.or_,
    ast.BitAnd: operator.and_,
    ast.BitXor: operator.xor,
}
UNARY: dict[type[ast.unaryop], Callable[[Value], Value]] = {
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
    ast.Invert: operator.invert,
    ast.Not: operator.not_,
}
COMPARE: dict[type[ast.cmpop], Callable[[Value, Value], Value]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.In: lambda item, container: item in container,
    ast.NotIn: lambda item, container: item not in container,
}
SEQUENCES = (str, list, tuple)
VIEWS: tuple[type, ...] = (type({}.keys()), type({}.items()))


def unary(op: ast.unaryop, value: Value) -> Value:
    """Evaluate `-x`, `+x`, `~x` or `not x`."""
    return check_size(UNARY[type(op)](value))


def binary(op: ast.operator, left: Value, right: Value, budget: Budget) -> Value:
    """Evaluate `left op right`; the result's items keep their origins."""
    require_known(left, right)
    if isinstance(op, ast.Mod) and isinstance(left, str):
        return check_size(percent(left, right, budget))
    if isinstance(left, VIEWS) or isinstance(right, VIEWS):
        left, right = _as_set(left, budget), _as_set(right, budget)
    _check_growth(op, left, right)
    made = check_size(BINARY[type(op)](left, right))
    if isinstance(made, complex):
        raise ConfigError(
            "CFG004", "the result is a complex number", "correct the number: one that is not negative has a root"
        )
    if isinstance(made, (str, *CONTAINERS)):
        budget.spend(len(made) // 4)
        return _with_origins(op, left, right, made)
    return made


def _as_set(value: Value, budget: Budget) -> Value:
    """Convert an operand of a set operation with a dict view to a set, and pay for it; it may be any iterable."""
    if isinstance(value, set) or not hasattr(value, "__iter__") or isinstance(value, Reference):
        return value
    # Priced before hashing, since an author can make the hashes of ints collide.
    items = list(budget.metered(value))
    budget.weigh_keys(*items)
    return set(items)


def _with_origins(op: ast.operator, left: Value, right: Value, made: Value) -> Value:
    if isinstance(made, dict):
        merged = Dict()
        merged.take(left)
        merged.take(right)
        return merged
    if not isinstance(made, (list, tuple)):
        return made
    if isinstance(op, ast.Add):
        origins = origins_of(left) + origins_of(right)
    else:
        items, count = (left, right) if isinstance(left, (list, tuple)) else (right, left)
        origins = origins_of(items) * count
    return List(made, origins) if isinstance(made, list) else make_tuple(made, origins)


def in_place(op: ast.operator, left: Value, right: Value, budget: Budget) -> Value:
    """Evaluate `left op= right`. Lists, dicts and sets change in place, so that every name for them sees the change."""
    # As in Python, `list +=` and `dict |=` take any iterable, which `+` and `|` do not.
    if isinstance(op, ast.Add) and isinstance(left, List):
        left.append_all(right, budget)
        return left
    if isinstance(op, ast.BitOr) and isinstance(left, Dict):
        left.merge(right, budget)
        return left
    made = binary(op, left, right, budget)
    if isinstance(left, List) and isinstance(made, List):
        left[:], left.origins[:] = made, made.origins
        return left
    if isinstance(left, set) and isinstance(made, set):
        left.clear()
        left.update(made)
        return left
    return made


def compare(op: ast.cmpop, left: Value, right: Value, budget: Budget) -> Value:
    """Evaluate one operator of a (chained) comparison."""
    require_known(left, right)
    if isinstance(op, (ast.In, ast.NotIn)):
        right = _searched(left, right, budget)
    elif not isinstance(op, (ast.Is, ast.IsNot)):
        budget.weigh(left, right)
    return COMPARE[type(op)](left, right)


def _searched(item: Value, container: Value, budget: Budget) -> Value:
    """Return a container that `in` may read. A sized container is paid for at once, a lazy one item by item."""
    budget.weigh(item)
    if isinstance(container, (str, *CONTAINERS)):
        hashed = isinstance(container, (dict, set))
        budget.spend(0 if hashed else len(container) // 8)
        if not hashed:
            budget.weigh(container)
        require_readable(container)
        return container
    if isinstance(container, range) and isinstance(item, int):
        return container
    return budget.metered(container) if hasattr(container, "__iter__") else container


def _check_growth(op: ast.operator, left: Value, right: Value) -> None:
    """Refuse a result beyond the bounds before it is made."""
    ints = isinstance(left, int) and isinstance(right, int)
    if isinstance(op, ast.Add) and isinstance(left, SEQUENCES) and isinstance(right, SEQUENCES):
        (check_length if isinstance(left, str) else check_items)(len(left) + len(right))
    elif isinstance(op, ast.Mult):
        for items, count in ((left, right), (right, left)):
            if isinstance(items, SEQUENCES) and isinstance(count, int):
                (check_length if isinstance(items, str) else check_items)(len(items) * max(count, 0))
        if ints:
            check_bits(left.bit_length() + right.bit_length() - 1)
    elif isinstance(op, ast.Pow) and ints and right > 0 and abs(left) > 1:
        check_bits((left.bit_length() - 1) * right)
    elif isinstance(op, ast.LShift) and ints and left and right > 0:
        check_bits(left.bit_length() + min(right, 2 * MAX_BITS))
