"""Sections with unknown values: where a value is invalid, reading it raises UnknownValueError.

The reader puts a default or a placeholder in place of an invalid value, with which a rule must not compute.

    spec = with_unknown(reading.spec, reading.invalid)      # invalid: {"model.num_heads"}
    spec.model.hidden_size                                  # a valid value: 256
    spec.model.num_heads                                    # raises UnknownValueError
    isinstance(spec.model, GPT)                             # True

A section with an unknown value is an instance of a subclass of its section class, with a property for each unknown
value. So mypy checks the fields that rules read, and functions of a section accept this one too. All other sections are
those of the reader, unchanged.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from dslpar.core.frozen import is_frozen
from dslpar.linter.problem import UnknownValueError
from dslpar.schema.datasets import BlendPart

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Section = TypeVar("Section", bound="DataclassInstance")


def with_unknown(section: Section, keys: Iterable[str], above: str = "") -> Section:
    """Return the section with unknown values at the dotted `keys`, which are relative to the section.

    `above`: the dotted key of the section itself, with a dot at its end, for the message of the exception.
    """
    own, below = _by_name(section, keys)
    unknown = {name for name in own if _is_attribute(section, name)}
    values = {field.name: getattr(section, field.name) for field in fields(section) if field.name not in unknown}
    for name, keys_below in below.items():
        if name in values:
            values[name] = _value(values[name], keys_below, f"{above}{name}.")
    made: Section = object.__new__(_subclass(type(section), unknown, above) if unknown else type(section))
    vars(made).update(values)
    return made


def _value(value: Any, keys: Iterable[str], above: str) -> Any:
    """Return a section, or a tuple of sections, with unknown values; return any other value as it is."""
    if is_frozen(value):
        return with_unknown(value, keys, above)
    if isinstance(value, tuple):
        _, of_items = _by_name(value, keys)
        return tuple(_value(item, of_items.get(str(at), ()), f"{above}{at}.") for at, item in enumerate(value))
    return value


def _by_name(section: object, keys: Iterable[str]) -> tuple[set[str], dict[str, list[str]]]:
    """Return the names in `keys` that stand alone, and name -> the keys below it."""
    alone: set[str] = set()
    below: dict[str, list[str]] = {}
    for key in keys:
        name, _, rest = key.partition(".")
        if isinstance(section, BlendPart) and name != "weight":  # in a config a part has the keys of its data set
            below.setdefault("dataset", []).append(key)
        elif rest:
            below.setdefault(name, []).append(rest)
        else:
            alone.add(name)
    return alone, below


def _is_attribute(section: object, name: str) -> bool:
    """Return whether a key is a field or a property of the section; other keys are arguments of an author's class."""
    return not name.startswith("_") and (name in vars(section) or hasattr(type(section), name))


def _subclass(cls: type, names: Iterable[str], above: str) -> type:
    """Return a subclass that raises for these names.

    It keeps the name and the module of the section class, which stand for the section's type and its family.
    """
    # Two such sections are never equal, and each has a hash: functions that cache by a section take them too.
    methods: dict[str, Any] = {"__eq__": object.__eq__, "__hash__": object.__hash__, "__module__": cls.__module__}
    return type(cls.__name__, (cls,), methods | {name: _unknown(f"{above}{name}") for name in names})


def _unknown(key: str) -> property:
    def value(section: object) -> NoReturn:
        raise UnknownValueError(key)

    return property(value)
