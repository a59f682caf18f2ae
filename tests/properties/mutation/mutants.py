"""Mutants of rules: each changes one function slightly, to show whether a test notices.

The changes are the classical ones (DeMillo, Lipton and Sayward, "Hints on test data selection", 1978; the operators of
mutmut and cosmic-ray): another comparison, a negated or missing condition, a number off by one, another operator, a
skipped statement. Strings are not changed, since messages have their own tests.

A mutant is the code object of one function, so no module is loaded again: a child process gives the function the other
code.

    >>> tree = ast.parse("def f(a, b):\\n    return a < b and not a")
    >>> [change for _, change, _ in mutated(tree.body[0])]
    ['<= for <', '>= for <', 'or for and', 'without a < b', 'without not a', 'a for not a']
"""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any, NamedTuple

from tests.support.paths import ROOT

PACKAGE = ROOT / "dslpar"
Function = ast.FunctionDef | ast.AsyncFunctionDef
Change = tuple[str, Any, str]
"""A field of a node, its new value, and the name of the change."""


class Mutant(NamedTuple):
    """One function with one change."""

    file: str
    """Below dslpar/."""
    line: int
    name: str
    """The function's name."""
    change: str
    function: FunctionType
    code: CodeType

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.name}: {self.change}"


def mutants(file: str) -> list[Mutant]:
    """Return every mutant of a module's functions and methods; `file` is below dslpar/."""
    module = importlib.import_module("dslpar." + file.removesuffix(".py").replace("/", "."))
    found = []
    for owner, node in _functions(module, ast.parse((PACKAGE / file).read_text())):
        function = _function(vars(owner)[node.name])
        for line, change, code in mutated(node):
            found.append(Mutant(file, line, node.name, change, function, code))
    return found


def _functions(owner: Any, tree: ast.Module | ast.ClassDef) -> Iterator[tuple[Any, Function]]:
    """Yield the functions of a module and its classes, each with its owner."""
    for node in tree.body:
        if isinstance(node, Function):
            yield owner, node
        elif isinstance(node, ast.ClassDef):
            yield from _functions(vars(owner)[node.name], node)


def _function(value: Any) -> FunctionType:
    """Return the function of a rule, a property or a decorated function."""
    for name in ("check", "fget", "func", "__func__", "__wrapped__"):
        value = getattr(value, name, None) or value
    assert isinstance(value, FunctionType), value
    return value


def mutated(node: Function) -> Iterator[tuple[int, str, CodeType]]:
    """Yield line, name and code of each change of a function."""
    bare = ast.Module([ast.fix_missing_locations(_without_decorators(node))], [])
    for part in [part for statement in node.body for part in ast.walk(statement)]:
        for field, value, change in _changes(part):
            before = getattr(part, field)
            setattr(part, field, value)
            yield getattr(part, "lineno", node.lineno), change, _code(bare)
            setattr(part, field, before)


def _without_decorators(node: Function) -> Function:
    copy = type(node)(**{field: value for field, value in ast.iter_fields(node) if field != "decorator_list"})
    copy.decorator_list = []
    return ast.copy_location(copy, node)


def _code(module: ast.Module) -> CodeType:
    compiled = compile(ast.fix_missing_locations(module), "<mutant>", "exec")
    return next(const for const in compiled.co_consts if isinstance(const, CodeType))


# The changes ------------------------------------------------------------------------------------------------------

_COMPARISONS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
_OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
}
_CALLS = {"min": "max", "max": "min", "any": "all", "all": "any"}
_SIGNS: dict[type[ast.AST], str] = {
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
    ast.Eq: "==",
    ast.NotEq: "!=",
    ast.Is: "is",
    ast.IsNot: "is not",
    ast.In: "in",
    ast.NotIn: "not in",
    ast.Add: "+",
    ast.Sub: "-",
    ast.Mult: "*",
    ast.FloorDiv: "//",
    ast.Div: "/",
    ast.Mod: "%",
    ast.BitOr: "|",
    ast.BitAnd: "&",
    ast.And: "and",
    ast.Or: "or",
}


def _changes(node: ast.AST) -> Iterator[Change]:
    """Yield the changes of one node."""
    match node:
        case ast.Compare(ops=[op]):
            for other in _COMPARISONS[type(op)]:
                yield "ops", [other()], f"{_SIGNS[other]} for {_SIGNS[type(op)]}"
        case ast.BoolOp():
            yield from _of_conditions(node)
        case ast.UnaryOp(op=ast.Not()):
            yield "operand", _negated(node.operand), f"{ast.unparse(node.operand)} for {ast.unparse(node)}"
        case ast.If() | ast.IfExp() | ast.While():
            yield "test", _negated(node.test), f"not ({ast.unparse(node.test)})"
        case ast.comprehension(ifs=[_, *_]):
            for test in node.ifs:
                yield "ifs", [each for each in node.ifs if each is not test], f"without if {ast.unparse(test)}"
        case ast.BinOp() if type(node.op) in _OPERATORS and not isinstance(node.left, ast.Constant | ast.JoinedStr):
            other_op = _OPERATORS[type(node.op)]
            yield "op", other_op(), f"{_SIGNS[other_op]} for {_SIGNS[type(node.op)]}"
        case ast.Constant(value=bool()):
            yield "value", not node.value, f"{not node.value} for {node.value}"
        case ast.Constant(value=int() | float()):
            for value in (node.value + 1, node.value - 1):
                yield "value", value, f"{value} for {node.value}"
        case ast.Call(func=ast.Name(id=name)) if name in _CALLS:
            yield "func", ast.Name(_CALLS[name], ast.Load()), f"{_CALLS[name]} for {name}"
    yield from _of_statements(node)


def _of_conditions(node: ast.BoolOp) -> Iterator[Change]:
    other = ast.Or if isinstance(node.op, ast.And) else ast.And
    yield "op", other(), f"{_SIGNS[other]} for {_SIGNS[type(node.op)]}"
    for value in node.values:
        kept = [each for each in node.values if each is not value]
        yield "values", kept if len(kept) > 1 else kept * 2, f"without {ast.unparse(value)}"


def _of_statements(node: ast.AST) -> Iterator[Change]:
    """Yield changes that leave out a jump or a yielded value."""
    for field in ("body", "orelse"):
        statements = getattr(node, field, None)
        for index, statement in enumerate(statements if isinstance(statements, list) else ()):
            if _can_be_skipped(statement):
                rest = [*statements[:index], ast.Pass(), *statements[index + 1 :]]
                yield field, rest, f"without {ast.unparse(statement)}"


def _can_be_skipped(statement: ast.AST) -> bool:
    match statement:
        case ast.Continue() | ast.Break() | ast.Raise() | ast.Return(value=None):
            return True
        case ast.Expr(value=ast.Yield() | ast.YieldFrom() | ast.Call()):
            return True
    return False


def _negated(test: ast.expr) -> ast.expr:
    return ast.UnaryOp(ast.Not(), test)
