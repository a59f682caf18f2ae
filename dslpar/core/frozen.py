"""`@frozen`: a frozen, keyword-only dataclass that costs next to nothing to define.

`dataclasses.dataclass(frozen=True)` compiles five functions a class, 0.6 ms each time: with the thirty classes of the
spec, more than half of what `dslpar lint` may take. Here the methods are written once and shared, and the fields of a
class are collected when they are first asked for. `fields`, `replace` and `is_dataclass` of the standard library work
as ever, and type checkers see a plain frozen dataclass.
"""

from __future__ import annotations

from dataclasses import MISSING, FrozenInstanceError, dataclass, field, fields
from typing import TYPE_CHECKING, Any, TypeVar

Class = TypeVar("Class", bound=type)

if TYPE_CHECKING:
    from typing_extensions import dataclass_transform

    @dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
    def frozen(cls: Class) -> Class:
        """Make a frozen, keyword-only dataclass of `cls`."""
        ...

else:

    def frozen(cls: Class) -> Class:
        """Make a frozen, keyword-only dataclass of `cls`."""
        for name, method in _METHODS.items():
            setattr(cls, name, method)
        cls.__dataclass_fields__ = _Fields()
        return cls


class _Fields:
    """Stand in for a class's `__dataclass_fields__` until somebody reads it, and let `dataclass` collect them then.

    Most commands read the fields of a few sections alone; a base class's are read when its heirs' are.
    """

    def __get__(self, instance: object, owner: type) -> object:
        dataclass(init=False, repr=False, eq=False, kw_only=True)(owner)
        return owner.__dataclass_fields__  # type: ignore[attr-defined]


def _init(self: Any, **values: object) -> None:
    name = type(self).__name__
    for item in fields(self):
        if item.name in values:
            self.__dict__[item.name] = values.pop(item.name)
        elif item.default is not MISSING:
            self.__dict__[item.name] = item.default
        elif item.default_factory is not MISSING:
            self.__dict__[item.name] = item.default_factory()
        else:
            raise TypeError(f"{name}() needs {item.name}=")
    if values:
        raise TypeError(f"{name}() has no field {', '.join(values)}")
    check = getattr(self, "__post_init__", None)
    if check is not None:
        check()


def _refuse(self: object, name: str, *_: object) -> None:
    raise FrozenInstanceError(f"cannot change {name!r} of a {type(self).__name__}")


def _values(self: Any) -> tuple[object, ...]:
    return tuple(getattr(self, item.name) for item in fields(self))


def _eq(self: object, other: object) -> bool:
    return _values(self) == _values(other) if type(other) is type(self) else NotImplemented


def _hash(self: object) -> int:
    return hash((type(self), *_values(self)))


def _repr(self: Any) -> str:
    shown = ", ".join(f"{item.name}={getattr(self, item.name)!r}" for item in fields(self))
    return f"{type(self).__name__}({shown})"


_METHODS = {
    "__init__": _init,
    "__setattr__": _refuse,
    "__delattr__": _refuse,
    "__eq__": _eq,
    "__hash__": _hash,
    "__repr__": _repr,
}
