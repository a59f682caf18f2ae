"""Conditions over a source's keys: a small part of Python's expressions, parsed and never executed.

    >>> holds("zero.stage == 3 and pipeline.stages > 1", {"zero.stage": 3, "pipeline.stages": 2}.get, lambda key: True)
    True

A name is a dotted key of the source. `given(key)` asks whether the source writes it, whatever its value: False is a
value, and None sets nothing. Literals, lists, comparisons,
`and`, `or`, `not`, `in` and `+ - * // %` are allowed. What is unknown stays unknown: a missing number, a value of the
wrong type or a division by zero makes the part around it unknown, and an unknown condition does not hold.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

from dslpar.language.operators import COMPARE
from dslpar.migrate.unread import UNREAD

_LARGEST = 10**18
"""Larger numbers are unknown: their text alone may take minutes."""
_ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    **COMPARE,
    ast.Is: operator.eq,  # `is None` and `is True` of values that were read
    ast.IsNot: operator.ne,
}


class UnknownError(Exception):
    """A part of a condition is unknown."""


ValueOf = Callable[[str], Any]
IsGiven = Callable[[str], bool]


def holds(text: str, value_of: ValueOf, is_given: IsGiven) -> bool:
    """Return whether a condition holds; False if it is unknown."""
    try:
        return bool(_value(parsed(text), value_of, is_given))
    except UnknownError:
        return False


@cache
def parsed(text: str) -> ast.expr:
    """Parse a condition. Raises SyntaxError if it is no expression."""
    return ast.parse(text, mode="eval").body


def keys_of(text: str) -> Iterator[str]:
    """Yield the dotted keys that a condition names. Raises SyntaxError for an expression that is not allowed."""
    yield from _keys(parsed(text))


def _keys(node: ast.AST) -> Iterator[str]:
    if key := _dotted(node):
        yield key
    elif isinstance(node, ast.Call):
        if not (isinstance(node.func, ast.Name) and node.func.id == "given" and len(node.args) == 1):
            raise SyntaxError(f"no call is allowed but given(key): {ast.unparse(node)}")
        yield from _keys(node.args[0])
    elif isinstance(node, _ALLOWED):
        for child in ast.iter_child_nodes(node):
            yield from _keys(child)
    else:
        raise SyntaxError(f"not allowed in a condition: {ast.unparse(node)}")


_ALLOWED: tuple[type[ast.AST], ...] = (
    *(ast.BoolOp, ast.UnaryOp, ast.BinOp, ast.Compare, ast.Constant, ast.List, ast.Tuple, ast.Load),
    *(ast.And, ast.Or, ast.Not, ast.USub),
    *_ARITHMETIC,
    *_COMPARISONS,
)


def _dotted(node: ast.AST) -> str:
    """Return `a.b.c` for a chain of names; empty for any other expression."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        above = _dotted(node.value)
        return above and f"{above}.{node.attr}"
    return ""


def _value(node: ast.expr, value_of: ValueOf, is_given: IsGiven) -> Any:
    def value(each: ast.expr) -> Any:
        return _value(each, value_of, is_given)

    if key := _dotted(node):
        return _known(value_of(key))
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.List | ast.Tuple):
        return [value(each) for each in node.elts]
    if isinstance(node, ast.Call):
        return is_given(_dotted(node.args[0]))
    if isinstance(node, ast.BoolOp):
        return _bool(node, value)
    if isinstance(node, ast.UnaryOp):
        return not value(node.operand) if isinstance(node.op, ast.Not) else -_number(value(node.operand))
    if isinstance(node, ast.BinOp):
        left, right = _number(value(node.left)), _number(value(node.right))
        try:
            return _number(_ARITHMETIC[type(node.op)](left, right))
        except ArithmeticError as error:
            raise UnknownError from error
    if isinstance(node, ast.Compare):
        return _compared(node, value)
    raise UnknownError


def _bool(node: ast.BoolOp, value: Callable[[ast.expr], Any]) -> bool:
    """Evaluate `and` and `or` with three values: one operand may decide although another is unknown."""
    decisive, unknown = isinstance(node.op, ast.Or), False
    for each in node.values:
        try:
            if bool(value(each)) is decisive:
                return decisive
        except UnknownError:
            unknown = True
    if unknown:
        raise UnknownError
    return not decisive


def _compared(node: ast.Compare, value: Callable[[ast.expr], Any]) -> bool:
    left = value(node.left)
    for op, expression in zip(node.ops, node.comparators, strict=True):
        right = value(expression)
        try:
            if not _COMPARISONS[type(op)](left, right):
                return False
        except TypeError as error:
            raise UnknownError from error
        left = right
    return True


def _known(value: Any) -> Any:
    if value is UNREAD or (type(value) is int and abs(value) > _LARGEST):
        raise UnknownError
    return value


def _number(value: Any) -> int | float:
    if type(value) not in (int, float) or abs(value) > _LARGEST:
        raise UnknownError
    number: int | float = value
    return number
