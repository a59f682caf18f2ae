"""Static syntax check of a file: reports syntax outside the language, and collects the names that the file reads.

It runs before the evaluation, so that `while` is found even in a branch that is never taken. It marks each unsupported
node, whose value is then unknown to the evaluator.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from typing import Any, cast

from dslpar.core.errors import Finding
from dslpar.language.errors import finding
from dslpar.language.limits import MAX_NESTING
from dslpar.language.source import Source

Function = (ast.FunctionDef, ast.AsyncFunctionDef)

UNSUPPORTED: dict[type[ast.AST], tuple[str, str]] = {
    ast.While: ("`while`", "write `for step in range(...):`, with `break` where it ends"),
    ast.FunctionDef: (
        "`def`",
        "write the value itself where the function is called",
    ),
    ast.AsyncFunctionDef: ("`async def`", "write the value itself where the function is called"),
    ast.ClassDef: ("`class`", "put it into a module, and write `from ... import {name}`"),
    ast.Try: ("`try`", "choose one of its branches, and write that alone"),
    getattr(ast, "TryStar", ast.Try): ("`try`", "choose one of its branches, and write that alone"),
    ast.With: ("`with`", "write the value itself that is read there, or import it from a config"),
    ast.AsyncWith: ("`async with`", "write the value itself that is read there"),
    ast.AsyncFor: ("`async for`", "write `for ... in ...:`"),
    ast.Raise: ("`raise`", "write `assert False, ...` with the message"),
    ast.Match: ("`match`", "write `if ...:` and `elif ...:`"),
    ast.Global: ("`global`", "leave it out: a config has one scope"),
    ast.Nonlocal: ("`nonlocal`", "leave it out: a config has one scope"),
    ast.Return: ("`return`", "write `... = ...` to give the value a name"),
    ast.Lambda: ("`lambda`", "write the value itself that it gives where it is called"),
    ast.NamedExpr: ("`:=`", "write `{name} = ...` in a line of its own, before this one"),
    ast.Await: ("`await`", "write the value itself"),
    ast.Yield: ("`yield`", "write `[...]` of all values"),
    ast.YieldFrom: ("`yield from`", "write `[...]` of all values"),
}
CONSTANTS: dict[type, tuple[str, str]] = {
    bytes: ("a bytes literal", "write `{value!r}`"),
    complex: ("a complex number", "write `({value.real}, {value.imag})`"),
    type(...): ("`...`", "write the value itself that it stands for"),
}

MUTATING_METHODS = frozenset(
    ["append", "clear", "extend", "insert", "pop", "popitem", "remove", "reverse", "setdefault", "sort", "update"]
)
"""The methods that change their owner."""


def check_syntax(tree: ast.Module, source: Source) -> tuple[list[Finding], set[str]]:
    """Mark unsupported nodes. Returns the findings about them, and the names that some expression reads."""
    findings: list[Finding] = []
    names_read: set[str] = set()
    # An explicit stack: recursion would overflow on syntax nested too deeply, before it could be reported.
    pending: list[tuple[Any, int]] = [(node, 1) for node in tree.body]
    while pending:
        node, depth = pending.pop()
        if depth > MAX_NESTING:
            node.unsupported = True
            hint = "choose inner parts, and assign them to names first"
            findings.append(finding("CFG005", source.location(node), "syntax is nested too deeply", hint))
            continue
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue  # a docstring, or `...` as in shortened examples
        reason = _why_unsupported(node)
        if reason is not None:
            node.unsupported = True
            what, hint = reason
            message = f"{what} is not part of the config language"
            findings.append(finding("CFG002", source.location(node), message, hint))
            continue
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and not hasattr(node, "is_assigned"):
            names_read.add(node.id)
        elif isinstance(node, ast.JoinedStr):
            # Python 3.11 counts columns wrongly within an f-string: its nodes get the location of the whole string.
            for part in ast.walk(node):
                part.location = source.location(node)  # type: ignore[attr-defined]
        elif isinstance(node, (ast.Attribute, ast.Subscript)) and not isinstance(node.ctx, ast.Load):
            target: Any = node
            while isinstance(target, (ast.Attribute, ast.Subscript)):
                target = target.value
            target.is_assigned = True  # `train` in `train.dist.x = 4` is changed, not read
        # A chain of `elif` is nested in the tree but not in the text, so its length does not count as depth.
        is_chain = isinstance(node, ast.If) and len(node.orelse) == 1 and isinstance(node.orelse[0], ast.If)
        for child in _children(node):
            pending.append((child, depth if is_chain and child is node.orelse[0] else depth + 1))
    return findings, names_read


_OF_CONSTANTS = (ast.Assign, ast.AnnAssign, ast.Expr, ast.Pass)
"""Statements of a class that only groups values: assignments, and the docstring."""
_NO_EXPRESSION = (ast.expr_context, ast.operator, ast.unaryop, ast.cmpop, ast.boolop)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def _children(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the child nodes, but for contexts and operators. `ast.iter_child_nodes` takes twice as long."""
    for name in node._fields:
        value = getattr(node, name, None)
        for child in value if isinstance(value, list) else (value,):
            if isinstance(child, ast.AST) and not isinstance(child, _NO_EXPRESSION):
                yield child


def _why_unsupported(node: ast.AST) -> tuple[str, str] | None:
    """Return the name of an unsupported node and what to write instead; None if the node is supported."""
    if isinstance(node, _COMPREHENSIONS) and any(clause.is_async for clause in node.generators):
        return "`async for`", "write `for ... in ...`"
    if isinstance(node, ast.Constant):
        what, hint = CONSTANTS.get(type(node.value), ("", ""))
        value = node.value.decode("latin-1") if isinstance(node.value, bytes) else node.value
        return (what, hint.format(value=value)) if what else None
    if type(node) not in UNSUPPORTED:
        return None
    what, hint = UNSUPPORTED[type(node)]
    if isinstance(node, ast.ClassDef) and all(isinstance(item, _OF_CONSTANTS) for item in node.body):
        hint = "write `{name} = dict(...)`: its keys are attributes, too"
    return what, hint.format(name=node.target.id if isinstance(node, ast.NamedExpr) else getattr(node, "name", ""))


def changed_targets(node: Any) -> Sequence[Any]:
    """Return the targets that an unevaluated statement would bind or change: names, attributes, items, methods' owners.

    The result is cached on the node, since a loop may ask for it a hundred thousand times.
    """
    if not hasattr(node, "changed"):
        node.changed = tuple(_changed_targets(node))
    return cast("Sequence[Any]", node.changed)


def _changed_targets(node: ast.AST) -> Iterator[Any]:
    pending: list[Any] = [node]
    while pending:
        item = pending.pop()
        if isinstance(item, ast.Call) and isinstance(item.func, ast.Attribute) and item.func.attr in MUTATING_METHODS:
            yield item.func
        elif isinstance(item, (ast.Name, ast.Attribute, ast.Subscript)) and not isinstance(item.ctx, ast.Load):
            yield item
        elif isinstance(item, (*Function, ast.ClassDef)):
            yield ast.Name(item.name, ast.Store())
            continue
        elif isinstance(item, ast.alias):
            yield ast.Name((item.asname or item.name).partition(".")[0], ast.Store())
        pending.extend(ast.iter_child_nodes(item))
