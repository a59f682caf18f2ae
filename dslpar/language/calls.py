"""Calls: methods of values, functions of the language, and the second call of `LazyCall(X)(...)`."""

from __future__ import annotations

import ast
from typing import Any

from dslpar.core.errors import Location
from dslpar.language.arguments import Call
from dslpar.language.codes import PYTHON_ERRORS, MistakeError, UnknownError, finding
from dslpar.language.containers import Displays
from dslpar.language.expressions import kind_of
from dslpar.language.functions import call_function, call_lazy
from dslpar.language.methods import call_method, find_method
from dslpar.language.syntax import CHANGING
from dslpar.language.tree import TARGET, Reference
from dslpar.language.values import UNKNOWN, Dict, LazyTarget, List, Placed, Unknown


class Invocations(Displays):
    """All expressions of the language."""

    def call(self, node: ast.Call) -> Placed:
        target: Any = None
        method = ""
        if isinstance(node.func, ast.Attribute):
            target, place = self.eval(node.func.value)
            method = node.func.attr
            if not find_method(target, method) and not self.is_plain(target):
                target, method = self.callee(target, place, node.func), ""
        else:
            target, _ = self.eval(node.func)
        call = self.arguments(node)
        result = self.called_method(target, method, call) if method else self.called(target, call, node)
        return result, call.passed_on or self.place(node)

    @staticmethod
    def is_plain(value: Any) -> bool:
        """Whether a value's attributes are Python's methods only."""
        return not isinstance(value, (Unknown, Reference, Dict, LazyTarget))

    def callee(self, owner: Any, place: Location, node: ast.Attribute) -> Any:
        try:
            return self.attribute_of(owner, place, node)[0]
        except UnknownError:
            return UNKNOWN
        except MistakeError as error:
            if isinstance(owner, Dict):
                error = MistakeError("CFG003", f"dict.{node.attr}() is not part of the config language", error.help)
            self.report(error, node)
            return UNKNOWN

    def called_method(self, owner: Any, name: str, call: Call) -> Any:
        try:
            if isinstance(owner, Unknown):
                raise UnknownError
            if name == "update" and isinstance(owner, Dict):
                self.warn_of_replaced(owner, call)
            return call_method(owner, name, call)
        except (UnknownError, MistakeError, *PYTHON_ERRORS):
            if name in CHANGING and isinstance(owner, (List, Dict)):
                owner.spoiled = True
            raise

    def warn_of_replaced(self, owner: Dict, call: Call) -> None:
        """`train.update(dict(dist=dict(...)))`: a shorter mapping takes the place of a longer one, key and all."""
        for other in (*call.args, call.kwargs):
            for key, value in other.items() if isinstance(other, dict) else ():
                old = owner.get(key) if isinstance(key, str) else None
                if not (isinstance(old, dict) and isinstance(value, dict)) or old is value:
                    continue
                lost = [str(name) for name in old if name not in value]
                if lost and not {"type", TARGET} & set(value):  # another class is another section
                    self.budget.spend(len(old) // 4)
                    place = (
                        other.place_of(key) if isinstance(other, Dict) else call.keyword_places[key][0]
                    ) or call.place
                    message = (
                        f"update() replaces {key!r}, and drops its {', '.join(lost[:4])}{', ...' * (len(lost) > 4)}"
                    )
                    self.session.add(finding("CFG120", place, message))

    def called(self, target: Any, call: Call, node: ast.Call) -> Any:
        if isinstance(target, Unknown):
            raise UnknownError
        if isinstance(target, LazyTarget):
            return call_lazy(target, call)
        if isinstance(target, Reference):
            return call_function(target, call)
        raise TypeError(f"{kind_of(target)!r} object is not callable")

    def arguments(self, node: ast.Call) -> Call:
        call = Call(self.place(node), self.budget, self.open_config)
        values, places = self.items(node.args)
        call.args, call.places = values, places
        for keyword in node.keywords:
            value, place = self.eval(keyword.value)
            if keyword.arg is not None:
                key_place = self.place(keyword)
                end = key_place.column + len(keyword.arg)
                call.add_keyword(keyword.arg, value, place, Location(*key_place[:3], key_place.line, end))
            elif isinstance(value, Unknown):
                raise UnknownError
            else:
                self.keywords_of(value, place, call)
        return call

    def keywords_of(self, value: Any, place: Location, call: Call) -> None:
        """`**value` in a call."""
        if not isinstance(value, dict):
            raise TypeError(f"argument after ** must be a mapping, not {kind_of(value)}")
        self.check_spoiled(value)
        self.budget.spend(len(value))
        for name, item in value.items():
            item_place, key_place = value.origins.get(name, (None, None)) if isinstance(value, Dict) else (None, None)
            call.add_keyword(name, item, item_place or place, key_place or place)

    def open_config(self, name: str, place: Location) -> Any:
        return self.session.open_config(name, self.source.path, place)


Invocations.handlers = {
    ast.Constant: Invocations.constant,
    ast.Name: Invocations.name,
    ast.Attribute: Invocations.attribute,
    ast.Subscript: Invocations.subscript,
    ast.List: Invocations.list_display,
    ast.Tuple: Invocations.tuple_display,
    ast.Set: Invocations.set_display,
    ast.Dict: Invocations.dict_display,
    ast.UnaryOp: Invocations.unary,
    ast.BinOp: Invocations.binary,
    ast.BoolOp: Invocations.boolean,
    ast.Compare: Invocations.comparison,
    ast.IfExp: Invocations.conditional,
    ast.JoinedStr: Invocations.text,
    ast.FormattedValue: Invocations.text_field,
    ast.Call: Invocations.call,
    ast.ListComp: Invocations.list_comprehension,
    ast.SetComp: Invocations.set_comprehension,
    ast.DictComp: Invocations.dict_comprehension,
    ast.GeneratorExp: Invocations.generator,
}
