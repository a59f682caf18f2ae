"""Container displays (lists, tuples, dicts, sets, with `*` and `**`) and comprehensions.

A comprehension has its own scope. Its first iterable is evaluated at once, in the outer scope. Its elements are made
one at a time, so a generator expression is as lazy as in Python.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from typing import TypeAlias

from dslpar.core.errors import Location
from dslpar.language.errors import finding
from dslpar.language.evaluator import Evaluator, Handlers, Scope, type_name
from dslpar.language.limits import check_items, check_size, in_fixed_order
from dslpar.language.targets import assign
from dslpar.language.values import (
    NO_ORIGINS,
    Dict,
    List,
    Located,
    Tuple,
    Unknown,
    Value,
    adopt,
    make_tuple,
    require_readable,
)

Comprehension: TypeAlias = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp

VIEWS: tuple[type, ...] = (type({}.values()), type({}.items()))
ITEMS: type = type({}.items())


def elements(ev: Evaluator, nodes: list[ast.expr]) -> tuple[list[Value], list[Value]]:
    """Evaluate the elements of a display or the arguments of a call, expanding `*`. Returns values and origins."""
    values: list[Value] = []
    origins: list[Value] = []
    for node in nodes:
        if not isinstance(node, ast.Starred):
            value, location = ev.eval(node)
            values.append(value)
            origins.append(location)
            continue
        taken, taken_origins = ev.items_of(*ev.eval(node.value))
        values += taken
        origins += taken_origins
        check_items(len(values))
    return values, origins


def list_display(ev: Evaluator, node: ast.List) -> Located:
    return List(*elements(ev, node.elts)), ev.location(node)


def tuple_display(ev: Evaluator, node: ast.Tuple) -> Located:
    return make_tuple(*elements(ev, node.elts)), ev.location(node)


def set_display(ev: Evaluator, node: ast.Set) -> Located:
    values, _ = elements(ev, node.elts)
    ev.budget.weigh_keys(*values)
    return set(values), ev.location(node)


def dict_display(ev: Evaluator, node: ast.Dict) -> Located:
    made = Dict()
    for key_node, value_node in zip(node.keys, node.values, strict=True):
        if key_node is None:
            _merge(ev, made, *ev.eval(value_node))
            continue
        key, value = ev.eval(key_node), ev.eval(value_node)
        if isinstance(key_node, ast.Constant) and isinstance(key[0], str) and key[0] in made:
            message = f"the key {key[0]!r} appears twice in this dict"
            ev.session.add(finding("CFG012", ev.location(key_node), message))
        _put(ev, made, key, value)
    return made, ev.location(node)


def _put(ev: Evaluator, made: Dict, key: Located, value: Located) -> None:
    if isinstance(key[0], Unknown):
        made.tainted = True
        return
    ev.budget.weigh_keys(key[0])
    made.put(key[0], value[0], value[1], key[1])


def _merge(ev: Evaluator, made: Dict, value: Value, location: Location) -> None:
    """Add the items of `**value` to a dict display."""
    if isinstance(value, Unknown):
        made.tainted = True
        return
    if not isinstance(value, dict):
        raise TypeError(f"{type_name(value)!r} object is not a mapping")
    made.merge(value, ev.budget, location)


def list_comprehension(ev: Evaluator, node: ast.ListComp) -> Located:
    values, origins = [], []
    for value, location in _comprehend(ev, node, lambda: ev.eval(node.elt)):
        values.append(value)
        origins.append(location)
        check_items(len(values))
    return List(values, origins), ev.location(node)


def set_comprehension(ev: Evaluator, node: ast.SetComp) -> Located:
    values = [value for value, _ in _comprehend(ev, node, lambda: ev.eval(node.elt))]
    ev.budget.weigh_keys(*values)
    return check_size(set(values)), ev.location(node)


def dict_comprehension(ev: Evaluator, node: ast.DictComp) -> Located:
    made = Dict()

    def put_item() -> Located:
        key, value = ev.eval(node.key), ev.eval(node.value)
        _put(ev, made, key, value)
        return value

    for _ in _comprehend(ev, node, put_item):
        check_items(len(made))
    return made, ev.location(node)


def generator(ev: Evaluator, node: ast.GeneratorExp) -> Located:
    return (value for value, _ in _comprehend(ev, node, lambda: ev.eval(node.elt))), ev.location(node)


def _comprehend(ev: Evaluator, node: Comprehension, element: Callable[[], Located]) -> Iterator[Located]:
    """Make the elements of a comprehension lazily. Its first iterable is evaluated at once, in the outer scope."""
    iterator = iterate(ev, node.generators[0].iter)
    return _in_scope(ev, Scope(ev.scope), _clauses(ev, node.generators, iterator, element))


def _in_scope(ev: Evaluator, scope: Scope, items: Iterator[Located]) -> Iterator[Located]:
    """Yield the items, with `scope` as the current scope while an item is made, since other code runs in between."""
    while True:
        outer, ev.scope = ev.scope, scope
        try:
            item = next(items)
        except StopIteration:
            return
        finally:
            ev.scope = outer
        yield item


def _clauses(
    ev: Evaluator, clauses: list[ast.comprehension], iterator: Iterator[Located], element: Callable[[], Located]
) -> Iterator[Located]:
    clause, rest = clauses[0], clauses[1:]
    for value, location in iterator:
        ev.budget.spend(1)
        assign(ev, clause.target, value, location)
        if not all(ev.eval(condition)[0] for condition in clause.ifs):
            continue
        if rest:
            yield from _clauses(ev, rest, iterate(ev, rest[0].iter), element)
        else:
            yield element()


def iterate(ev: Evaluator, node: ast.expr) -> Iterator[Located]:
    """Evaluate the iterable of a `for`; yield its items with their origins, also those that the loop's body appends."""
    value, location = ev.eval(node)
    require_readable(value)
    iterator = iter(in_fixed_order(value))
    # A view has no reference to its dict, which holds the origins: take the dict that the method was called on.
    if isinstance(value, VIEWS) and isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        owner = ev.peek(node.func.value)
        if isinstance(owner, Dict):
            return _view_items(ev, iterator, owner, isinstance(value, ITEMS), location)
    return _located_items(ev, iterator, value.origins if isinstance(value, (List, Tuple)) else None, location)


def _located_items(ev: Evaluator, iterator: Iterator[Value], origins: Value, location: Location) -> Iterator[Located]:
    for index, item in enumerate(iterator):
        ev.budget.spend(1)
        # The body of the loop may shorten the list, as in Python.
        origin = origins[index] if origins is not None and index < len(origins) else None
        yield adopt(item), origin or location


def _view_items(
    ev: Evaluator, iterator: Iterator[Value], owner: Dict, pairs: bool, location: Location
) -> Iterator[Located]:
    """Yield the items of `mapping.items()` or `mapping.values()`, with the origins of keys and values."""
    keys = list(owner)
    for index, item in enumerate(iterator):
        ev.budget.spend(1)
        origin, key_origin = owner.origins.get(keys[index], NO_ORIGINS)
        if pairs:
            yield make_tuple(item, [key_origin or location, origin or location]), location
        else:
            yield item, origin or location


HANDLERS: Handlers = {
    ast.List: list_display,
    ast.Tuple: tuple_display,
    ast.Set: set_display,
    ast.Dict: dict_display,
    ast.ListComp: list_comprehension,
    ast.SetComp: set_comprehension,
    ast.DictComp: dict_comprehension,
    ast.GeneratorExp: generator,
}
