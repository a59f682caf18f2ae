"""Call expressions: methods of values, functions of the language, and the second call of `LazyCall(X)(...)`."""

from __future__ import annotations

import ast

from dslpar.core.errors import Location
from dslpar.language.call import Call
from dslpar.language.containers import elements
from dslpar.language.errors import PYTHON_ERRORS, ConfigError, UnknownError, finding
from dslpar.language.evaluator import Evaluator, Handlers, type_name
from dslpar.language.expressions import attribute_of
from dslpar.language.finder import find_config
from dslpar.language.functions import call_function
from dslpar.language.lazy_calls import call_lazy
from dslpar.language.load_session import as_mapping
from dslpar.language.methods import call_method, find_method
from dslpar.language.syntax import MUTATING_METHODS
from dslpar.language.tree import TARGET, Reference
from dslpar.language.values import (
    NO_ORIGINS,
    UNKNOWN,
    Dict,
    LazyTarget,
    List,
    Located,
    Unknown,
    Value,
    require_known,
    require_readable,
)


def call(ev: Evaluator, node: ast.Call) -> Located:
    target: Value
    method = ""
    # Python looks the method up before it evaluates the arguments, so an argument cannot change which one is called.
    if isinstance(node.func, ast.Attribute):
        target, location = ev.eval(node.func.value)
        method = node.func.attr
        has_attributes = isinstance(target, (Unknown, Reference, Dict, LazyTarget))
        if has_attributes and not find_method(target, method):
            target, method = _callee(ev, target, location, node.func), ""
    else:
        target, _ = ev.eval(node.func)
    made = _arguments(ev, node)
    result = _call_method(ev, target, method, made) if method else _call_value(target, made)
    return result, made.result_origin or ev.location(node)


def _callee(ev: Evaluator, owner: Value, location: Location, node: ast.Attribute) -> Value:
    try:
        return attribute_of(ev, owner, location, node)[0]
    except UnknownError:
        return UNKNOWN
    except ConfigError as error:
        if isinstance(owner, Dict):
            error = ConfigError("CFG003", f"dict.{node.attr}() is not part of the config language", error.hint)
        ev.report(error, node)
        return UNKNOWN


def _call_method(ev: Evaluator, owner: Value, name: str, call: Call) -> Value:
    try:
        require_known(owner)
        if name == "update" and isinstance(owner, Dict):
            _warn_of_replaced_sections(ev, owner, call)
        return call_method(owner, name, call)
    except (UnknownError, ConfigError, *PYTHON_ERRORS):
        if name in MUTATING_METHODS and isinstance(owner, (List, Dict)):
            owner.tainted = True
        raise


def _warn_of_replaced_sections(ev: Evaluator, owner: Dict, call: Call) -> None:
    """Warn if `train.update(dict(dist=dict(...)))` replaces a mapping and thereby drops some of its keys."""
    for other in (*call.args, call.kwargs):
        for key, value in other.items() if isinstance(other, dict) else ():
            old = owner.get(key) if isinstance(key, str) else None
            if not (isinstance(old, dict) and isinstance(value, dict)) or old is value:
                continue
            lost = [str(name) for name in old if name not in value]
            if lost and not {"type", TARGET} & set(value):  # another class replaces the section on purpose
                ev.budget.spend(len(old) // 4)
                origin = other.origin_of(key) if isinstance(other, Dict) else call.keyword_origins[key][0]
                listed = ", ".join(lost[:4]) + ", ..." * (len(lost) > 4)
                message = f"update() replaces {key!r}, and drops its {listed}"
                ev.session.add(finding("CFG120", origin or call.location, message))


def _call_value(target: Value, call: Call) -> Value:
    require_known(target)
    if isinstance(target, LazyTarget):
        return call_lazy(target, call)
    if isinstance(target, Reference):
        return call_function(target, call)
    raise TypeError(f"{type_name(target)!r} object is not callable")


def _arguments(ev: Evaluator, node: ast.Call) -> Call:
    def open_config(name: str, home: str, location: Location) -> Value:
        return as_mapping(ev.session.names_of(find_config(name, ev.source.path, home), location))

    call = Call(ev.location(node), ev.budget, open_config)
    call.args, call.locations = elements(ev, node.args)
    for keyword in node.keywords:
        value, location = ev.eval(keyword.value)
        if keyword.arg is not None:
            start = ev.location(keyword)
            end_column = start.column + len(keyword.arg)
            call.add_keyword(keyword.arg, value, location, Location(*start[:3], start.line, end_column))
        else:
            _add_keywords(ev, value, location, call)
    return call


def _add_keywords(ev: Evaluator, value: Value, location: Location, call: Call) -> None:
    """Add the items of `**value` to a call as keyword arguments."""
    require_known(value)
    if not isinstance(value, dict):
        raise TypeError(f"argument after ** must be a mapping, not {type_name(value)}")
    require_readable(value)
    ev.budget.spend(len(value))
    for name, item in value.items():
        origin, key_origin = value.origins.get(name, NO_ORIGINS) if isinstance(value, Dict) else NO_ORIGINS
        call.add_keyword(name, item, origin or location, key_origin or location)


HANDLERS: Handlers = {ast.Call: call}
