"""Mutants of the maths: a function of dslpar with one small mistake of the kind that a layout invites.

    mutant = Mutant("norm-mean-of-own-piece", "slice", "dslpar.layers.norm", "_statistics",
                    "mean = means.mean(0)", "mean = means[axis.index]", "each rank's own mean", "axis.size > 1")
    mutant.apply()          # from here on this process, and those that fork from it, make the mistake

A mutant is data: in the source of one function, the text `old` becomes `new`. The function is compiled with that
change, and the function object gets the new code. So no module is loaded again, every holder of the function has the
mistake, and forked ranks inherit it. `when` is an expression over the function's names at the start of the changed
statement. It tells whether the change makes a difference there: an all-reduce over one rank may be left out.
"""

from __future__ import annotations
import __future__

import ast
import builtins
import dis
import importlib
import inspect
from collections.abc import Iterator, Sequence
from functools import cache
from types import CodeType, FunctionType
from typing import Any, Literal, NamedTuple, get_args

Kind = Literal["reduction", "axis", "order", "scale", "slice", "mask", "state", "seed", "schedule", "gradient"]
KINDS: tuple[Kind, ...] = get_args(Kind)

Function = ast.FunctionDef | ast.AsyncFunctionDef


class StaleMutantError(LookupError):
    """The text that a mutant changes does not occur in the source, or more than once."""


class Mutant(NamedTuple):
    """One mistake."""

    name: str
    kind: Kind
    module: str
    function: str
    """Its name in the module, such as 'all_reduce' or 'Sharding.start_reduce'."""
    old: str
    """Text that occurs once in the function."""
    new: str
    stands_for: str
    """The mistake, in one line."""
    when: str = "True"
    """The condition for a difference: an expression over the function's names before the changed statement."""

    @property
    def package(self) -> str:
        """Its package in dslpar: 'layers', 'engine', ..."""
        return self.module.split(".")[1]

    def target(self) -> FunctionType:
        """Return the function that is changed. Raises StaleMutantError if there is none of that name."""
        return _target(self.module, self.function)

    def code(self) -> CodeType:
        """Compile the function with the mistake.

        Raises:
            StaleMutantError: there is no such function, or `old` does not occur in it exactly once.
        """
        source, node = source_of(self.module), self._node()
        at, end = self._span(source)
        begin, last = _offsets(source, node)
        changed = source[begin:at] + self.new + source[end:last]
        # Compile the function alone, inside its classes: a whole module takes ten times as long.
        *owners, _ = self.function.split(".")
        heads = [f"{' ' * 4 * depth}class {owner}:\n" for depth, owner in enumerate(owners)]
        padding = "\n" * (first_line(node) - 1 - len(heads))  # traceback lines match the file's lines
        text, file = padding + "".join(heads) + changed, importlib.import_module(self.module).__file__ or ""
        compiled = compile(text, file, "exec", __future__.annotations.compiler_flag, dont_inherit=True)
        return code_within(compiled, self.function, first_line(node))

    def apply(self) -> None:
        """Make the mistake in this process and in later forks."""
        target = self.target()
        target.__globals__.setdefault("mistakes", importlib.import_module("tests.support.maths_mutants.mistakes"))
        target.__code__ = self.code()
        for remembered in _caches(self.module, self.function):
            remembered.cache_clear()

    def unknown_names(self) -> list[str]:
        """Return undefined global names that the changed function reads: it would stop instead of computing."""
        known = {**self.target().__globals__, "mistakes": None}
        used = {name for code in _nested(self.code()) for name in _globals_of(code)}
        return sorted(name for name in used if name not in known and not hasattr(builtins, name))

    def line(self) -> int:
        """Return the first line of the change in the source."""
        source = source_of(self.module)
        return source.count("\n", 0, self._span(source)[0]) + 1

    def last_line(self) -> int:
        """Return the last line of the changed text in the source."""
        source = source_of(self.module)
        return source.count("\n", 0, self._span(source)[1]) + 1

    def _node(self) -> Function:
        return function_node(self.module, self.function)

    def _span(self, source: str) -> tuple[int, int]:
        """Return the start and end of `old` in the module's source."""
        begin, end = _offsets(source, self._node())
        count = source.count(self.old, begin, end)
        if count != 1:
            times = "does not stand" if count == 0 else f"stands {count} times"
            raise StaleMutantError(f"{self.name}: {self.old!r} {times} in {self.module}.{self.function}")
        at = source.index(self.old, begin, end)
        return at, at + len(self.old)


# ---- the source of a module ----


@cache
def source_of(module: str) -> str:
    """Return the text of a module."""
    return inspect.getsource(importlib.import_module(module))


@cache
def tree_of(module: str) -> ast.Module:
    """Return the parsed module. Do not change it."""
    return ast.parse(source_of(module))


@cache
def function_node(module: str, name: str) -> Function:
    """Return the definition of a function or method. Raises StaleMutantError if there is none."""
    owner: Any = tree_of(module)
    for part in name.split("."):
        found = [each for each in owner.body if getattr(each, "name", None) == part]
        if not found:
            raise StaleMutantError(f"{module} has no {name}")
        owner = found[-1]
    assert isinstance(owner, Function), f"{module}.{name} is no function"
    return owner


def first_line(node: Function) -> int:
    """Return the first line of a function's code: its first decorator's."""
    return min([node.lineno, *(each.lineno for each in node.decorator_list)])


def _offsets(source: str, node: Function) -> tuple[int, int]:
    lines = source.splitlines(keepends=True)
    begin = sum(map(len, lines[: first_line(node) - 1]))
    assert node.end_lineno is not None
    return begin, begin + sum(map(len, lines[first_line(node) - 1 : node.end_lineno]))


def code_within(module: CodeType, name: str, line: int) -> CodeType:
    """Return a function's code object from its module's, by its name and first line."""
    *owners, last = name.split(".")
    code = module
    for part in owners:
        code = next(each for each in _codes(code) if each.co_name == part)
    return next(each for each in _codes(code) if each.co_name == last and each.co_firstlineno == line)


def _codes(code: CodeType) -> Iterator[CodeType]:
    return (each for each in code.co_consts if isinstance(each, CodeType))


def _nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for each in _codes(code):
        yield from _nested(each)


def _globals_of(code: CodeType) -> Sequence[str]:
    return [each.argval for each in dis.get_instructions(code) if each.opname == "LOAD_GLOBAL"]


@cache
def _target(module: str, name: str) -> FunctionType:
    owner: Any = importlib.import_module(module)
    for part in name.split("."):
        if part not in vars(owner):
            raise StaleMutantError(f"{module} has no {name}")
        owner = vars(owner)[part]
    for attribute in ("fget", "func", "__func__", "__wrapped__"):  # properties, methods, decorated functions
        owner = getattr(owner, attribute, None) or owner
    assert isinstance(owner, FunctionType), owner
    return owner


def _caches(module: str, name: str) -> Iterator[Any]:
    """Yield the cache around a function, if any: its values were computed without the mistake."""
    owner: Any = importlib.import_module(module)
    for part in name.split("."):
        owner = vars(owner)[part]
    if hasattr(owner, "cache_clear"):
        yield owner


# ---- the mutants that a run meets ----


def met_by(mutants: Sequence[Mutant]) -> Iterator[tuple[FunctionType, CodeType]]:
    """Yield functions, each with code that reports the mutants it meets by `maths_mutant_met(name)`.

    `install_recorder` puts that name into Python's builtins. A mutant is met if the changed statement runs while `when`
    holds.
    """
    by_module: dict[str, list[Mutant]] = {}
    for mutant in mutants:
        by_module.setdefault(mutant.module, []).append(mutant)
    for module, of_module in by_module.items():
        tree = ast.parse(source_of(module))  # a fresh tree, since it is changed
        for mutant in of_module:
            _insert_report(tree, mutant)
        compiled = compile(ast.fix_missing_locations(tree), importlib.import_module(module).__file__ or "", "exec")
        for name in dict.fromkeys(mutant.function for mutant in of_module):
            yield _target(module, name), code_within(compiled, name, first_line(function_node(module, name)))


def _insert_report(tree: ast.Module, mutant: Mutant) -> None:
    owner: Any = tree
    for part in mutant.function.split("."):
        owner = [each for each in owner.body if getattr(each, "name", None) == part][-1]
    body, index = _statement_at(owner.body, mutant.line(), mutant.last_line())
    report = ast.parse(f"if {mutant.when}: maths_mutant_met({mutant.name!r})").body[0]
    for node in ast.walk(report):
        ast.copy_location(node, body[index])
    body.insert(index, report)


def _statement_at(body: list[ast.stmt], first: int, last: int) -> tuple[list[ast.stmt], int]:
    """Return the innermost list of statements with these lines, and the index of their first statement in it."""
    for index, statement in enumerate(body):
        if isinstance(statement, ast.If) and _is_report(statement):
            continue
        if statement.lineno <= first <= (statement.end_lineno or 0):
            for within in _bodies(statement):
                if within and within[0].lineno <= first and last <= (within[-1].end_lineno or 0):
                    return _statement_at(within, first, last)
            return body, index
    raise StaleMutantError(f"no statement holds the lines {first} to {last}")


def _is_report(statement: ast.If) -> bool:
    call = statement.body[0]
    return (
        isinstance(call, ast.Expr)
        and isinstance(call.value, ast.Call)
        and (isinstance(call.value.func, ast.Name) and call.value.func.id == "maths_mutant_met")
    )


def _bodies(statement: ast.stmt) -> Iterator[list[ast.stmt]]:
    for owner in (statement, *getattr(statement, "handlers", []), *getattr(statement, "cases", [])):
        for name in ("body", "orelse", "finalbody"):
            found = getattr(owner, name, None)
            if isinstance(found, list) and found:
                yield found
