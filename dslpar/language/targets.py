"""Targets of assignments, loops and `del`: names, attributes, items, slices, and tuples of these."""

from __future__ import annotations

import ast

from dslpar.core.errors import Location
from dslpar.language import operators
from dslpar.language.errors import PYTHON_ERRORS, WRITE_VALUE, ConfigError, UnknownError
from dslpar.language.evaluator import Evaluator, type_name
from dslpar.language.expressions import attribute_location, name, slice_bounds, slice_of, undefined
from dslpar.language.limits import check_items
from dslpar.language.tree import Reference
from dslpar.language.values import Dict, List, Value, require_known, require_readable


def assign(ev: Evaluator, target: ast.expr, value: Value, location: Location) -> None:
    """Assign a value to a target. If the assignment fails, record a finding and make the target unknown."""
    try:
        _store(ev, target, value, location)
    except UnknownError:
        ev.make_unknown(target)
    except (ConfigError, *PYTHON_ERRORS) as error:
        ev.report(error, target)
        ev.make_unknown(target)


def _store(ev: Evaluator, target: ast.expr, value: Value, location: Location) -> None:
    if isinstance(target, ast.Name):
        ev.bind(target.id, value, location, ev.location(target))
    elif isinstance(target, ast.Attribute):
        owner, _ = ev.eval(target.value)
        _set_item(ev, _attribute_owner(owner, target), target.attr, value, location, attribute_location(ev, target))
    elif isinstance(target, ast.Subscript):
        owner, _ = ev.eval(target.value)
        if isinstance(target.slice, ast.Slice):
            _store_slice(ev, owner, slice_bounds(ev, target.slice), value, location)
            return
        key, _ = ev.eval(target.slice)
        require_known(owner, key)
        _set_item(ev, owner, key, value, location, ev.location(target.slice))
    elif isinstance(target, (ast.Tuple, ast.List)):
        _unpack(ev, target, value, location)
    else:
        raise ConfigError("CFG002", "cannot assign to this", "choose a name, an attribute or an item")


def _attribute_owner(owner: Value, node: ast.Attribute) -> Dict:
    """Return `owner` if its attributes can be set. Raises ConfigError if it is not a dict."""
    require_known(owner)
    if isinstance(owner, Reference):
        raise ConfigError("CFG004", f"{owner.name} is a reference: it has no values to change", WRITE_VALUE)
    if not isinstance(owner, Dict):
        message = f"cannot set attribute {node.attr!r} of a {type_name(owner)}"
        raise ConfigError("CFG004", message, "choose a key of a dict")
    return owner


def _set_item(
    ev: Evaluator, owner: Value, key: Value, value: Value, location: Location, key_location: Location
) -> None:
    if isinstance(owner, Dict):
        ev.budget.weigh_keys(key)
        owner.put(key, value, location, key_location)
        check_items(len(owner))
    elif isinstance(owner, List):
        owner[key] = value
        owner.origins[key] = location
    else:
        raise TypeError(f"{type_name(owner)!r} object does not support item assignment")


def _store_slice(ev: Evaluator, owner: Value, bounds: slice, value: Value, location: Location) -> None:
    require_known(owner)
    if not isinstance(owner, List):
        raise TypeError(f"{type_name(owner)!r} object does not support item assignment")
    values, origins = ev.items_of(value, location)
    owner[bounds] = values
    owner.origins[bounds] = origins
    ev.budget.spend(len(owner) // 32)
    check_items(len(owner))


def _unpack(ev: Evaluator, target: ast.Tuple | ast.List, value: Value, location: Location) -> None:
    values, origins = ev.items_of(value, location)
    stars = [index for index, item in enumerate(target.elts) if isinstance(item, ast.Starred)]
    if len(stars) > 1:
        raise ConfigError("CFG001", "two starred targets in one assignment", "choose one to star")
    star = stars[0] if stars else None
    wanted = len(target.elts) - (star is not None)
    if (star is None and len(values) != wanted) or len(values) < wanted:
        least = "at least " if star is not None else ""
        raise ValueError(f"expected {least}{wanted} values to unpack, got {len(values)}")
    if star is not None:
        end = star + len(values) - wanted
        values[star:end], origins[star:end] = [List(values[star:end], origins[star:end])], [location]
    for item, part, origin in zip(target.elts, values, origins, strict=True):
        assign(ev, item.value if isinstance(item, ast.Starred) else item, part, origin)


def augment(ev: Evaluator, node: ast.AugAssign) -> None:
    """Evaluate `target op= value`. The target's owner and key are evaluated only once."""
    target = node.target
    if isinstance(target, ast.Name):
        old, _ = name(ev, target)
        ev.bind(target.id, _changed(ev, node, old), ev.location(node.value), ev.location(target))
        return
    owner, _ = ev.eval(target.value)
    if isinstance(target, ast.Attribute):
        key, key_location = target.attr, attribute_location(ev, target)
        _attribute_owner(owner, target)
    elif isinstance(target.slice, ast.Slice):
        bounds = slice_bounds(ev, target.slice)
        old, _ = slice_of(ev, owner, bounds, target)
        _store_slice(ev, owner, bounds, _changed(ev, node, old), ev.location(node))
        return
    else:
        key, key_location = ev.eval(target.slice)[0], ev.location(target.slice)
    require_readable(owner)
    require_known(key)
    ev.budget.weigh(key)
    _set_item(ev, owner, key, _changed(ev, node, owner[key]), ev.location(node.value), key_location)


def _changed(ev: Evaluator, node: ast.AugAssign, old: Value) -> Value:
    right, _ = ev.eval(node.value)
    try:
        require_known(old, right)
        return operators.in_place(node.op, old, right, ev.budget)
    except (UnknownError, ConfigError, *PYTHON_ERRORS):
        # The container should have changed, and other names may share it: its contents become unknown for all of them.
        if isinstance(old, (List, Dict)):
            old.tainted = True
        raise


def delete(ev: Evaluator, target: ast.expr) -> None:
    """Evaluate one target of a `del`."""
    if isinstance(target, ast.Name):
        if target.id not in ev.scope.names:
            raise undefined(ev, target.id)
        del ev.scope.names[target.id]
    elif isinstance(target, (ast.Tuple, ast.List)):
        for item in target.elts:
            delete(ev, item)
    elif isinstance(target, (ast.Attribute, ast.Subscript)):
        _delete_item(ev, target)


def _delete_item(ev: Evaluator, target: ast.Attribute | ast.Subscript) -> None:
    owner, _ = ev.eval(target.value)
    key: Value
    if isinstance(target, ast.Attribute):
        key = target.attr
        _attribute_owner(owner, target)
    else:
        key = slice_bounds(ev, target.slice) if isinstance(target.slice, ast.Slice) else ev.eval(target.slice)[0]
    require_known(owner, key)
    if isinstance(owner, Dict):
        ev.budget.weigh(key)
        owner.drop(key)
    elif isinstance(owner, List):
        ev.budget.spend(len(owner) // 64)
        del owner[key]
        del owner.origins[key]
    else:
        raise TypeError(f"{type_name(owner)!r} object doesn't support item deletion")
