"""Helpers for frozen dataclasses: queries, and a decorator for values that are looked up often."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

Class = TypeVar("Class", bound=type)


def is_frozen(value: object) -> bool:
    """Return True if `value` is a frozen dataclass or a value of one."""
    params = getattr(value, "__dataclass_params__", None)
    return params is not None and bool(params.frozen)


def is_required(field: dataclasses.Field[Any]) -> bool:
    """Return True if a field has no default."""
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def keeping_hash(cls: Class) -> Class:
    """Cache the hash of each value of a frozen dataclass, for values that are looked up often.

    Two values with cached hashes are compared by these first.
    """
    names = tuple(field.name for field in dataclasses.fields(cls))

    def values(self: object) -> tuple[object, ...]:
        held = self.__dict__
        return tuple([held[name] for name in names])

    def kept_hash(self: object) -> int:
        held = self.__dict__
        if "_hash" not in held:
            held["_hash"] = hash((cls, *values(self)))
        found: int = held["_hash"]
        return found

    def equal(self: object, other: object) -> object:
        if self is other:
            return True
        if type(other) is not cls:
            return NotImplemented
        hashes = self.__dict__.get("_hash"), other.__dict__.get("_hash")
        return (None in hashes or hashes[0] == hashes[1]) and values(self) == values(other)

    def state(self: object) -> dict[str, object]:
        """Return the fields for pickling and copying, without the hash: strings hash differently in each process."""
        return dict(zip(names, values(self), strict=True))

    for name, method in (("__hash__", kept_hash), ("__eq__", equal), ("__getstate__", state)):
        setattr(cls, name, method)
    return cls
