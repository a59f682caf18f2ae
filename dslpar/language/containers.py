"""Containers written out: lists, tuples, dicts, sets, `*` and `**` in them, and comprehensions.

A comprehension has its own scope and evaluates its first iterable in the outer one, at once; its elements are made one
by one, so a generator expression is as lazy as Python's.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from typing import Any

from dslpar.core.errors import Location
from dslpar.language.codes import UnknownError, finding
from dslpar.language.expressions import Expressions, Scope
from dslpar.language.limits import check_items, check_size, in_fixed_order
from dslpar.language.values import NO_PLACES, Dict, List, Placed, Tuple, Unknown, adopt, make_tuple, origins_of

VIEWS: tuple[type, ...] = (type({}.values()), type({}.items()))
ITEMS: type = type({}.items())


class Displays(Expressions):
    """Displays and comprehensions."""

    def items(self, nodes: list[Any]) -> tuple[list[Any], list[Any]]:
        """Elements of a display or arguments of a call, `*` written out; values and places."""
        values: list[Any] = []
        places: list[Any] = []
        for node in nodes:
            if not isinstance(node, ast.Starred):
                value, place = self.eval(node)
                values.append(value)
                places.append(place)
                continue
            taken, taken_places = self.unpacked(node.value)
            values += taken
            places += taken_places
            check_items(len(values))
        return values, places

    def unpacked(self, node: Any) -> tuple[list[Any], list[Any]]:
        """All items of an iterable, with places."""
        value, place = self.eval(node)
        return self.all_items(value, place)

    def all_items(self, value: Any, place: Location) -> tuple[list[Any], list[Any]]:
        if isinstance(value, Unknown):
            raise UnknownError
        self.check_spoiled(value)
        values = self.budget.take_all(value)
        known = isinstance(value, (List, tuple))
        return values, [item or place for item in origins_of(value)] if known else [place] * len(values)

    def list_display(self, node: ast.List) -> Placed:
        values, places = self.items(node.elts)
        return List(values, places), self.place(node)

    def tuple_display(self, node: ast.Tuple) -> Placed:
        values, places = self.items(node.elts)
        return make_tuple(values, places), self.place(node)

    def set_display(self, node: ast.Set) -> Placed:
        values, _ = self.items(node.elts)
        self.budget.weigh_keys(*values)
        return set(values), self.place(node)

    def dict_display(self, node: ast.Dict) -> Placed:
        made = Dict()
        for key_node, value_node in zip(node.keys, node.values, strict=True):
            if key_node is None:
                self.merge(made, *self.eval(value_node))
                continue
            key, value = self.eval(key_node), self.eval(value_node)
            if isinstance(key_node, ast.Constant) and isinstance(key[0], str) and key[0] in made:
                place = self.place(key_node)
                self.session.add(finding("CFG012", place, f"the key {key[0]!r} stands twice in this dict"))
            self.put(made, key, value)
        return made, self.place(node)

    def put(self, made: Dict, key: Placed, value: Placed) -> None:
        if isinstance(key[0], Unknown):
            made.spoiled = True
            return
        self.budget.weigh_keys(key[0])
        made.put(key[0], value[0], value[1], key[1])

    def merge(self, made: Dict, value: Any, place: Location) -> None:
        """`**value` in a dict display."""
        if isinstance(value, Unknown):
            made.spoiled = True
            return
        if not isinstance(value, dict):
            raise TypeError(f"{type(value).__name__.lower()!r} object is not a mapping")
        self.budget.spend(len(value) // 4)
        made.take(value, place)
        made.spoiled |= getattr(value, "spoiled", False)
        check_items(len(made))

    def list_comprehension(self, node: ast.ListComp) -> Placed:
        values, places = [], []
        for value, place in self.comprehend(node, self.eval):
            values.append(value)
            places.append(place)
            check_items(len(values))
        return List(values, places), self.place(node)

    def set_comprehension(self, node: ast.SetComp) -> Placed:
        values = [value for value, _ in self.comprehend(node, self.eval)]
        self.budget.weigh_keys(*values)
        return check_size(set(values)), self.place(node)

    def dict_comprehension(self, node: ast.DictComp) -> Placed:
        made = Dict()
        for _ in self.comprehend(node, lambda inner: self.dict_item(inner, made)):
            check_items(len(made))
        return made, self.place(node)

    def dict_item(self, node: ast.DictComp, made: Dict) -> Placed:
        key, value = self.eval(node.key), self.eval(node.value)
        self.put(made, key, value)
        return value

    def generator(self, node: ast.GeneratorExp) -> Placed:
        return (value for value, _ in self.comprehend(node, self.eval)), self.place(node)

    def comprehend(self, node: Any, element: Callable[[Any], Any]) -> Iterator[Any]:
        """The elements of a comprehension, lazily; its first iterable is evaluated at once, in the outer scope."""
        iterator = self.iterate(node.generators[0].iter)
        scope = Scope(self.scope)
        inner = node if isinstance(node, ast.DictComp) else node.elt
        return self.in_scope(scope, self.clauses(node.generators, iterator, lambda: element(inner)))

    def in_scope(self, scope: Scope, items: Iterator[Any]) -> Iterator[Any]:
        """The items, each made while the scope is the current one."""
        while True:
            outer, self.scope = self.scope, scope
            try:
                item = next(items)
            except StopIteration:
                return
            finally:
                self.scope = outer
            yield item

    def clauses(self, clauses: list[Any], iterator: Iterator[Placed], element: Callable[[], Any]) -> Iterator[Any]:
        clause, rest = clauses[0], clauses[1:]
        for value, place in iterator:
            self.budget.spend(1)
            self.assign(clause.target, value, place)
            if not all(self.eval(condition)[0] for condition in clause.ifs):
                continue
            if rest:
                yield from self.clauses(rest, self.iterate(rest[0].iter), element)
            else:
                yield element()

    def iterate(self, node: Any) -> Iterator[Placed]:
        """What a `for` loops over, item by item with origins, as the container is at each moment."""
        value, place = self.eval(node)
        if isinstance(value, Unknown):
            raise UnknownError
        self.check_spoiled(value)
        iterator = iter(in_fixed_order(value))
        if isinstance(value, VIEWS) and isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner = self.peek(node.func.value)
            if isinstance(owner, Dict):
                return self.view_items(iterator, owner, isinstance(value, ITEMS), place)
        return self.placed_items(iterator, value.origins if isinstance(value, (List, Tuple)) else None, place)

    def placed_items(self, iterator: Iterator[Any], origins: Any, place: Location) -> Iterator[Placed]:
        for index, item in enumerate(iterator):
            self.budget.spend(1)
            known = origins[index] if origins is not None and index < len(origins) else None
            yield adopt(item), known or place

    def view_items(self, iterator: Iterator[Any], owner: Dict, pairs: bool, place: Location) -> Iterator[Placed]:
        """`mapping.items()` and `mapping.values()`: keys and values bring their places along."""
        keys = list(owner)
        for index, item in enumerate(iterator):
            self.budget.spend(1)
            value_place, key_place = owner.origins.get(keys[index], NO_PLACES)
            if pairs:
                yield make_tuple(item, [key_place or place, value_place or place]), place
            else:
                yield item, value_place or place

    def assign(self, target: Any, value: Any, place: Location) -> None:
        """Bind a target; see statements.py."""
        raise NotImplementedError
