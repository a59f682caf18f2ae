"""Statements of the config language: assignment, del, if, for, assert; imports are in imports.py.

A condition that is unknown leaves both branches unevaluated and makes unknown what they would have bound.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

from dslpar.core.errors import Location
from dslpar.language import operators
from dslpar.language.codes import PYTHON_ERRORS, MistakeError, UnknownError
from dslpar.language.expressions import kind_of
from dslpar.language.imports import Imports
from dslpar.language.limits import check_items
from dslpar.language.tree import Reference
from dslpar.language.values import Dict, List, Unknown


class Evaluator(Imports):
    """The evaluator of one file."""

    loops = 0
    """Loops around the current statement."""

    def run(self, body: list[Any]) -> str | None:
        """Evaluate statements in order; one that fails makes unknown what it would have bound.

        Returns "break" or "continue" where one of these ended the body.
        """
        for node in body:
            self.session.now = (self.source, node)
            self.budget.spend(1)
            handler = STATEMENTS.get(type(node))
            try:
                if handler is None or hasattr(node, "out"):
                    raise UnknownError
                left = handler(self, node)
                if left:
                    return left
            except UnknownError:
                self.poison(node)
            except (MistakeError, *PYTHON_ERRORS) as error:
                self.report(error, node)
                self.poison(node)
        return None

    def expression(self, node: ast.Expr) -> None:
        self.eval(node.value)

    def nothing(self, node: ast.Pass) -> None:
        """`pass`"""

    def assignment(self, node: ast.Assign) -> None:
        value, place = self.eval(node.value)
        for target in node.targets:
            self.assign(target, value, place)

    def annotated(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.assign(node.target, *self.eval(node.value))

    def assign(self, target: Any, value: Any, place: Location) -> None:
        """Bind a target, with a finding if that fails."""
        try:
            self.store(target, value, place)
        except UnknownError:
            self.poison(target)
        except (MistakeError, *PYTHON_ERRORS) as error:
            self.report(error, target)
            self.poison(target)

    def store(self, target: Any, value: Any, place: Location) -> None:
        if isinstance(target, ast.Name):
            self.bind(target.id, value, place, self.place(target))
        elif isinstance(target, ast.Attribute):
            owner, _ = self.eval(target.value)
            self.set_item(self.attribute_owner(owner, target), target.attr, value, place, self.attribute_place(target))
        elif isinstance(target, ast.Subscript):
            self.store_item(target, value, place)
        elif isinstance(target, (ast.Tuple, ast.List)):
            self.unpack(target, value, place)
        else:
            raise MistakeError("CFG002", "this cannot be assigned to", "assign to a name, an attribute or an item")

    @staticmethod
    def attribute_owner(owner: Any, node: ast.Attribute) -> Dict:
        if isinstance(owner, Unknown):
            raise UnknownError
        if isinstance(owner, Reference):
            help = "import a config file by position, as in `from .common.train import train`"
            raise MistakeError("CFG004", f"{owner.name} is a reference: it has no values to change", help)
        if not isinstance(owner, Dict):
            raise MistakeError(
                "CFG004", f"a {kind_of(owner)} takes no attribute {node.attr!r}", "assign to keys of dicts only"
            )
        return owner

    def store_item(self, target: ast.Subscript, value: Any, place: Location) -> None:
        owner, _ = self.eval(target.value)
        if isinstance(target.slice, ast.Slice):
            self.store_slice(owner, self.slice_of(target.slice), value, place)
            return
        key, _ = self.eval(target.slice)
        if isinstance(owner, Unknown) or isinstance(key, Unknown):
            raise UnknownError
        self.set_item(owner, key, value, place, self.place(target.slice))

    def set_item(self, owner: Any, key: Any, value: Any, place: Location, key_place: Location) -> None:
        if isinstance(owner, Dict):
            self.budget.weigh_keys(key)
            owner.put(key, value, place, key_place)
            check_items(len(owner))
        elif isinstance(owner, List):
            owner[key] = value
            owner.origins[key] = place
        else:
            raise TypeError(f"{kind_of(owner)!r} object does not support item assignment")

    def store_slice(self, owner: Any, part: slice, value: Any, place: Location) -> None:
        if isinstance(owner, Unknown):
            raise UnknownError
        if not isinstance(owner, List):
            raise TypeError(f"{kind_of(owner)!r} object does not support item assignment")
        values, places = self.all_items(value, place)
        owner[part] = values
        owner.origins[part] = places
        self.budget.spend(len(owner) // 32)
        check_items(len(owner))

    def unpack(self, target: Any, value: Any, place: Location) -> None:
        if isinstance(value, Unknown):
            raise UnknownError
        values, places = self.all_items(value, place)
        stars = [index for index, item in enumerate(target.elts) if isinstance(item, ast.Starred)]
        if len(stars) > 1:
            raise MistakeError("CFG001", "two starred targets in one assignment", "star one of them")
        star = stars[0] if stars else None
        wanted = len(target.elts) - (star is not None)
        if (star is None and len(values) != wanted) or len(values) < wanted:
            least = "at least " if star is not None else ""
            raise ValueError(f"expected {least}{wanted} values to unpack, got {len(values)}")
        if star is not None:
            end = star + len(values) - wanted
            values[star:end], places[star:end] = [List(values[star:end], places[star:end])], [place]
        for item, part, part_place in zip(target.elts, values, places, strict=True):
            self.assign(item.value if isinstance(item, ast.Starred) else item, part, part_place)

    def augmented(self, node: ast.AugAssign) -> None:
        """`target op= value`; the target's owner and key are evaluated once."""
        target: Any = node.target
        if isinstance(target, ast.Name):
            old, _ = self.name(target)
            value = self.changed(node, old)
            self.bind(target.id, value, self.place(node.value), self.place(target))
            return
        owner, _ = self.eval(target.value)
        if isinstance(target, ast.Attribute):
            key, key_place = target.attr, self.attribute_place(target)
            self.attribute_owner(owner, target)
        elif isinstance(target.slice, ast.Slice):
            part = self.slice_of(target.slice)
            self.store_slice(owner, part, self.changed(node, self.sliced(owner, part, target)[0]), self.place(node))
            return
        else:
            key, key_place = self.eval(target.slice)[0], self.place(target.slice)
        if isinstance(owner, Unknown) or isinstance(key, Unknown) or getattr(owner, "spoiled", False):
            raise UnknownError
        self.budget.weigh(key)
        value = self.changed(node, owner[key])
        self.set_item(owner, key, value, self.place(node.value), key_place)

    def changed(self, node: ast.AugAssign, old: Any) -> Any:
        right, _ = self.eval(node.value)
        try:
            if isinstance(old, Unknown) or isinstance(right, Unknown):
                raise UnknownError
            return operators.in_place(node.op, old, right, self.budget)
        except (UnknownError, MistakeError, *PYTHON_ERRORS):
            if isinstance(old, (List, Dict)):
                old.spoiled = True
            raise

    def deletion(self, node: ast.Delete) -> None:
        for target in node.targets:
            try:
                self.delete(target)
            except UnknownError:
                self.poison(target)
            except (MistakeError, *PYTHON_ERRORS) as error:
                self.report(error, target)

    def delete(self, target: Any) -> None:
        if isinstance(target, ast.Name):
            if target.id not in self.scope.names:
                raise self.undefined(target.id)
            del self.scope.names[target.id]
        elif isinstance(target, (ast.Tuple, ast.List)):
            for item in target.elts:
                self.delete(item)
        else:
            self.delete_item(target)

    def delete_item(self, target: Any) -> None:
        owner, _ = self.eval(target.value)
        if isinstance(target, ast.Attribute):
            key: Any = target.attr
            self.attribute_owner(owner, target)
        else:
            key = self.slice_of(target.slice) if isinstance(target.slice, ast.Slice) else self.eval(target.slice)[0]
        if isinstance(owner, Unknown) or isinstance(key, Unknown):
            raise UnknownError
        if isinstance(owner, Dict):
            self.budget.weigh(key)
            owner.drop(key)
        elif isinstance(owner, List):
            self.budget.spend(len(owner) // 64)
            del owner[key]
            del owner.origins[key]
        else:
            raise TypeError(f"{kind_of(owner)!r} object doesn't support item deletion")

    def condition(self, node: ast.If) -> str | None:
        """`if`, `elif`, `else`: a chain of any length without recursion."""
        while True:
            test, _ = self.eval(node.test)
            if bool(test):
                return self.run(node.body)
            if len(node.orelse) != 1 or not isinstance(node.orelse[0], ast.If):
                return self.run(node.orelse)
            node = node.orelse[0]

    def loop(self, node: ast.For) -> str | None:
        for value, place in self.iterate(node.iter):
            self.assign(node.target, value, place)
            self.loops += 1
            left = self.run(node.body)
            self.loops -= 1
            if left == "break":
                return None
        return self.run(node.orelse)

    def leave(self, node: ast.Break | ast.Continue) -> str:
        """`break` and `continue`."""
        word = type(node).__name__.lower()
        if not self.loops:
            raise MistakeError("CFG001", f"`{word}` outside of a loop", "leave it out")
        return word

    def assertion(self, node: ast.Assert) -> None:
        test, _ = self.eval(node.test)
        if test:
            return
        message = "" if node.msg is None else self.eval(node.msg)[0]
        if isinstance(message, Unknown):
            raise UnknownError
        said = f": {message[:300]}" if isinstance(message, str) and message else ""
        place = self.place(node.test)
        raise MistakeError("CFG004", f"AssertionError{said}", "change the values so that the condition holds", place)


STATEMENTS: dict[type[ast.AST], Callable[[Evaluator, Any], str | None]] = {
    ast.Expr: Evaluator.expression,
    ast.Pass: Evaluator.nothing,
    ast.Assign: Evaluator.assignment,
    ast.AnnAssign: Evaluator.annotated,
    ast.AugAssign: Evaluator.augmented,
    ast.Delete: Evaluator.deletion,
    ast.If: Evaluator.condition,
    ast.For: Evaluator.loop,
    ast.Break: Evaluator.leave,
    ast.Continue: Evaluator.leave,
    ast.Assert: Evaluator.assertion,
    ast.Import: Evaluator.import_modules,
    ast.ImportFrom: Evaluator.import_names,
}
