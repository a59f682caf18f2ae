"""Sections that note which of their fields are read, for `dslpar.linter.related`.

    read = []
    spec = traced(spec, read)
    spec.model.hidden_size      # a value like any other: 256
    read                        # ["model.hidden_size"]

A traced section is an instance of a subclass of its section class, as in `dslpar.linter.unknown_values`.
"""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any, TypeVar

from dslpar.core.frozen import is_frozen

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Section = TypeVar("Section", bound="DataclassInstance")
_READ, _ABOVE = "_read", "_above"
_CLASSES: dict[type, type] = {}
"""Section class -> its traced subclass; of declared classes only, since those with unknown values are made anew."""


def traced(section: Section, read: list[str], above: str = "") -> Section:
    """Return the section; reading a field that is no section itself adds its dotted key to `read`.

    above: the dotted key of the section, with a dot at its end.
    """
    own = vars(section)
    names = [field.name for field in fields(section) if field.name in own]
    values = {name: _value(own[name], read, f"{above}{name}.") for name in names}
    made: Section = object.__new__(_subclass(type(section), is_whole=len(names) == len(fields(section))))
    vars(made).update(values | {_READ: read, _ABOVE: above})
    return made


def _value(value: Any, read: list[str], above: str) -> Any:
    if is_frozen(value) and not isinstance(value, type):
        return traced(value, read, above)
    if isinstance(value, tuple) and any(map(is_frozen, value)):
        return tuple(_value(item, read, f"{above}{at}.") for at, item in enumerate(value))
    return value


def _subclass(cls: type[DataclassInstance], is_whole: bool) -> type:
    if cls in _CLASSES:
        return _CLASSES[cls]
    declared = cls.__dataclass_fields__

    def get(section: object, name: str) -> Any:
        value = object.__getattribute__(section, name)
        own = object.__getattribute__(section, "__dict__")
        # `dataclasses.replace` makes sections without these two; nobody wrote their values.
        if _READ in own and name in own and name in declared and not is_frozen(value):
            own[_READ].append(f"{own[_ABOVE]}{name}")
        return value

    # As for unknown values: no two are equal, so that functions that cache by a section read the fields again.
    methods: dict[str, Any] = {"__eq__": object.__eq__, "__hash__": object.__hash__, "__module__": cls.__module__}
    made = type(cls.__name__, (cls,), methods | {"__getattribute__": get})
    if is_whole:
        _CLASSES[cls] = made
    return made
