"""Statements of the config language, and `evaluate`, which runs a whole file.

If a condition is unknown, neither branch is evaluated, and every name that they would have bound becomes unknown.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any, Literal, TypeAlias

from dslpar.language import calls, containers, expressions
from dslpar.language.errors import PYTHON_ERRORS, ConfigError, UnknownError
from dslpar.language.evaluator import Evaluator, Handlers
from dslpar.language.imports import import_modules, import_names
from dslpar.language.inherit import BASE, inherit, merged
from dslpar.language.load_session import Parsed, Session
from dslpar.language.targets import assign, augment, delete
from dslpar.language.values import Binding, require_known

LoopExit: TypeAlias = Literal["break", "continue"] | None
"""Statement by which a body ended early; None if it ran to its end."""

EXPRESSIONS: Handlers = {**expressions.HANDLERS, **containers.HANDLERS, **calls.HANDLERS}


def evaluate(parsed: Parsed, session: Session) -> dict[str, Binding]:
    """Evaluate a parsed file and return the names that it binds or inherits."""
    ev = Evaluator(parsed.source, session, EXPRESSIONS)
    run(ev, parsed.tree.body)
    return merged(ev, ev.globals.names)


def run(ev: Evaluator, body: list[ast.stmt]) -> LoopExit:
    """Evaluate statements in order. The names that a failing statement would have bound become unknown."""
    for node in body:
        ev.session.statement = (ev.source, node)  # the location of the finding if the budget is exceeded here
        ev.budget.spend(1)
        handler = HANDLERS.get(type(node))
        try:
            if handler is None or hasattr(node, "unsupported"):
                raise UnknownError
            left = handler(ev, node)
            if left:
                return left
        except UnknownError:
            ev.make_unknown(node)
        except (ConfigError, *PYTHON_ERRORS) as error:
            ev.report(error, node)
            ev.make_unknown(node)
    return None


def expression(ev: Evaluator, node: ast.Expr) -> None:
    ev.eval(node.value)


def nothing(ev: Evaluator, node: ast.Pass) -> None:
    pass


def assignment(ev: Evaluator, node: ast.Assign) -> None:
    value, location = ev.eval(node.value)
    if any(isinstance(target, ast.Name) and target.id == BASE for target in node.targets):
        value, location = inherit(ev, value, location)
    for target in node.targets:
        assign(ev, target, value, location)


def annotated_assignment(ev: Evaluator, node: ast.AnnAssign) -> None:
    if node.value is not None:
        assign(ev, node.target, *ev.eval(node.value))


def deletion(ev: Evaluator, node: ast.Delete) -> None:
    for target in node.targets:
        try:
            delete(ev, target)
        except UnknownError:
            ev.make_unknown(target)
        except (ConfigError, *PYTHON_ERRORS) as error:
            ev.report(error, target)


def condition(ev: Evaluator, node: ast.If) -> LoopExit:
    """Evaluate `if`, `elif`, `else`. The loop handles a chain of any length without recursion."""
    while True:
        test, _ = ev.eval(node.test)
        if bool(test):
            return run(ev, node.body)
        if len(node.orelse) != 1 or not isinstance(node.orelse[0], ast.If):
            return run(ev, node.orelse)
        node = node.orelse[0]


def loop(ev: Evaluator, node: ast.For) -> LoopExit:
    for value, location in containers.iterate(ev, node.iter):
        assign(ev, node.target, value, location)
        ev.loops += 1
        left = run(ev, node.body)
        ev.loops -= 1
        if left == "break":
            return None
    return run(ev, node.orelse)


def leave_loop(ev: Evaluator, node: ast.Break | ast.Continue) -> LoopExit:
    word: LoopExit = "break" if isinstance(node, ast.Break) else "continue"
    if not ev.loops:
        raise ConfigError("CFG001", f"`{word}` outside of a loop", "leave it out")
    return word


def assertion(ev: Evaluator, node: ast.Assert) -> None:
    test, _ = ev.eval(node.test)
    if test:
        return
    message = "" if node.msg is None else ev.eval(node.msg)[0]
    require_known(message)
    reason = f": {message[:300]}" if isinstance(message, str) and message else ""
    hint = "correct the values, so that the condition holds"
    raise ConfigError("CFG004", f"AssertionError{reason}", hint, ev.location(node.test))


HANDLERS: dict[type[ast.AST], Callable[[Evaluator, Any], LoopExit]] = {
    ast.Expr: expression,
    ast.Pass: nothing,
    ast.Assign: assignment,
    ast.AnnAssign: annotated_assignment,
    ast.AugAssign: augment,
    ast.Delete: deletion,
    ast.If: condition,
    ast.For: loop,
    ast.Break: leave_loop,
    ast.Continue: leave_loop,
    ast.Assert: assertion,
    ast.Import: import_modules,
    ast.ImportFrom: import_names,
}
