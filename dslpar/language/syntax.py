"""The static pass over a file: which syntax is in the language, and which names the file reads.

One walk before anything is evaluated, so that `while` in a branch never taken is found too. What is out is marked on
its node; the evaluator takes a marked node for unknown.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

from dslpar.core.errors import Finding
from dslpar.core.named_tuple import NamedTuple
from dslpar.language.codes import finding
from dslpar.language.limits import MAX_NESTING
from dslpar.language.source import Source

Function = (ast.FunctionDef, ast.AsyncFunctionDef)

UNSUPPORTED: dict[type[ast.AST], tuple[str, str]] = {
    ast.While: ("`while`", "write `for step in range(n):`"),
    ast.FunctionDef: ("`def`", "write the values themselves, or a `for` loop or comprehension that makes them"),
    ast.AsyncFunctionDef: ("`async def`", "write the values themselves"),
    ast.ClassDef: ("`class`", "put the class into a module, and write `from module import Class` and L(Class)(...)"),
    ast.Try: ("`try`", "write an `if` that asks for the case, such as `if 'key' in mapping:`"),
    getattr(ast, "TryStar", ast.Try): ("`try`", "write an `if` that asks for the case, such as `if 'key' in mapping:`"),
    ast.With: ("`with`", "write the values that the file holds into the config, or import them from a config"),
    ast.AsyncWith: ("`async with`", "write the values into the config"),
    ast.AsyncFor: ("`async for`", "write `for`"),
    ast.Raise: ("`raise`", "write `assert condition, message`"),
    ast.Match: ("`match`", "write `if` and `elif`"),
    ast.Global: ("`global`", "leave it out: a config has one scope"),
    ast.Nonlocal: ("`nonlocal`", "leave it out: a config has one scope"),
    ast.Return: ("`return`", "assign the value to a name"),
    ast.Lambda: ("`lambda`", "put the function into a module, and import it: it becomes a reference"),
    ast.NamedExpr: ("`:=`", "assign the name in a line of its own"),
    ast.Await: ("`await`", "write the value itself"),
    ast.Yield: ("`yield`", "write a list"),
    ast.YieldFrom: ("`yield from`", "write a list"),
}
CONSTANTS: dict[type, tuple[str, str]] = {
    bytes: ("a bytes literal", "write a string, without the `b`"),
    complex: ("a complex number", "write two floats"),
    type(...): ("`...`", "write None"),
}

CHANGING = frozenset(
    ["append", "clear", "extend", "insert", "pop", "popitem", "remove", "reverse", "setdefault", "sort", "update"]
)
"""Methods that change their owner."""


class Checked(NamedTuple):
    """What the static pass found."""

    findings: list[Finding]
    used: set[str]
    """Names that some expression reads."""


def check(tree: ast.Module, source: Source) -> Checked:
    """Mark and report what is out of the language."""
    checked = Checked([], set())
    pending: list[tuple[Any, int]] = [(node, 1) for node in tree.body]
    while pending:
        node, depth = pending.pop()
        if depth > MAX_NESTING:
            node.out = True
            help = "assign the inner parts to names first"
            checked.findings.append(finding("CFG005", source.place(node), "syntax nested too deep", help))
        elif not _is_out(node, source, checked):
            pending.extend(_children(node, depth, source, checked.used))
    return checked


def _is_out(node: Any, source: Source, checked: Checked) -> bool:
    reason = CONSTANTS.get(type(node.value)) if isinstance(node, ast.Constant) else UNSUPPORTED.get(type(node))
    if any(clause.is_async for clause in getattr(node, "generators", ())):
        reason = ("`async for`", "write `for`")
    if reason is None:
        return False
    node.out = True
    what, help = reason
    checked.findings.append(finding("CFG002", source.place(node), f"{what} is not part of the config language", help))
    return True


def _children(node: Any, depth: int, source: Source, used: set[str]) -> Iterator[tuple[Any, int]]:
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and not getattr(node, "is_base", False):
        used.add(node.id)
    if isinstance(node, ast.JoinedStr):
        _give_place(node, source)
    if isinstance(node, (ast.Attribute, ast.Subscript)) and not isinstance(node.ctx, ast.Load):
        _mark_base(node)
    is_elif = isinstance(node, ast.If) and len(node.orelse) == 1 and isinstance(node.orelse[0], ast.If)
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.expr_context, ast.operator, ast.unaryop, ast.cmpop, ast.boolop)):
            continue
        yield child, depth if is_elif and child is node.orelse[0] else depth + 1


def _give_place(joined: ast.JoinedStr, source: Source) -> None:
    """Inside an f-string, Python 3.11 counts lines and columns from odd places: give them the string's."""
    place = source.place(joined)
    for node in ast.walk(joined):
        node.place = place  # type: ignore[attr-defined]


def _mark_base(node: Any) -> None:
    """`train` in `train.dist.x = 4` is changed, not read."""
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        node = node.value
    node.is_base = True


def bound_names(node: ast.AST) -> Iterator[Any]:
    """The targets that a statement which is not evaluated would bind or change: names, attributes, items, lists."""
    pending: list[Any] = [node]
    while pending:
        item = pending.pop()
        if isinstance(item, ast.Call) and isinstance(item.func, ast.Attribute) and item.func.attr in CHANGING:
            yield item.func
        elif isinstance(item, (ast.Name, ast.Attribute, ast.Subscript)) and not isinstance(item.ctx, ast.Load):
            yield item
        elif isinstance(item, (*Function, ast.ClassDef)):
            yield ast.Name(item.name, ast.Store())
            continue
        elif isinstance(item, ast.alias):
            yield ast.Name((item.asname or item.name).partition(".")[0], ast.Store())
        pending.extend(ast.iter_child_nodes(item))
