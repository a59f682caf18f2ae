"""`@frozen`: a frozen, keyword-only dataclass whose definition costs almost no time.

`dataclasses.dataclass(frozen=True)` compiles five functions per class, which takes 0.6 ms. For the thirty classes of
the spec, this is more than half of the time that `dslpar lint` may take, and importing `dataclasses` takes another
3 ms. Here all classes share their methods, and a class's fields are collected on first use. The standard library's
`fields`, `replace` and `is_dataclass` work on such a class, and type checkers see a plain frozen dataclass. Modules
that lint loads at start use this module's functions instead.

    >>> @frozen
    ... class Point:
    ...     x: int
    ...     y: int = 0
    >>> replace(Point(x=1), y=2)
    Point(x=1, y=2)
    >>> [item.name for item in fields(Point)]
    ['x', 'y']
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, TypeVar

from dslpar.core.named_tuple import NamedTuple

Class = TypeVar("Class", bound=type)
Value = TypeVar("Value")


class _Missing:
    def __repr__(self) -> str:
        return "MISSING"


MISSING: Final = _Missing()
"""Marks a field without a default."""


class Field:
    """Field of a frozen class, with the attributes of `dataclasses.Field` that are used."""

    __slots__ = ("default", "default_factory", "metadata", "name", "type")

    def __init__(
        self, default: object, default_factory: Callable[[], object] | None, metadata: Mapping[str, Any]
    ) -> None:
        self.name = self.type = ""
        self.default, self.default_factory, self.metadata = default, default_factory, metadata

    @property
    def required(self) -> bool:
        """Return whether the field has no default."""
        return self.default is MISSING and self.default_factory is None


def field(
    *,
    default: Any = MISSING,
    default_factory: Callable[[], Any] | None = None,
    metadata: Mapping[str, Any] = {},
) -> Any:
    """Declare a field with a default factory or metadata."""
    return Field(default, default_factory, metadata)


if TYPE_CHECKING:
    from typing_extensions import dataclass_transform

    @dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
    def frozen(cls: Class) -> Class:
        """Make `cls` a frozen, keyword-only dataclass."""
        ...

else:

    def frozen(cls: Class) -> Class:
        """Make `cls` a frozen, keyword-only dataclass."""
        for name, method in _METHODS.items():
            setattr(cls, name, method)
        cls.__dataclass_fields__ = _DataclassFields()
        return cls


def keeping_hash(cls: Class) -> Class:
    """Cache the hash of each value of a frozen class, for values that are looked up often."""
    for name, method in (("__hash__", _kept_hash), ("__eq__", _equal_by_hash), ("__getstate__", _state)):
        setattr(cls, name, method)
    return cls


def _kept_hash(self: object) -> int:
    held = self.__dict__
    if "_hash" not in held:
        held["_hash"] = hash((type(self), *_values(self)))
    found: int = held["_hash"]
    return found


def _equal_by_hash(self: object, other: object) -> object:
    """Compare fields, unless two cached hashes already differ."""
    if self is other:
        return True
    if type(other) is not type(self):
        return NotImplemented
    hashes = self.__dict__.get("_hash"), other.__dict__.get("_hash")
    return (None in hashes or hashes[0] == hashes[1]) and _values(self) == _values(other)


def _state(self: object) -> dict[str, object]:
    """Return the fields for pickling and copying, without the hash, since strings hash differently in each process."""
    return {name: self.__dict__[name] for name in _layout_of(type(self)).names}


def fields(value: object) -> tuple[Field, ...]:
    """Return the fields of a frozen class or value; those of base classes come first."""
    cls = value if isinstance(value, type) else type(value)
    # From this class's own __dict__: getattr would find the fields of its base.
    found: tuple[Field, ...] | None = cls.__dict__.get("_fields")
    if found is None:
        by_name = {item.name: item for base in reversed(cls.__bases__) if is_frozen(base) for item in fields(base)}
        for name, annotation in vars(cls).get("__annotations__", {}).items():
            if not str(annotation).startswith("ClassVar"):
                default = cls.__dict__.get(name, MISSING)
                item = default if isinstance(default, Field) else Field(default, None, {})
                item.name, item.type = name, annotation
                by_name[name] = item
        found = tuple(by_name.values())
        cls._fields = found  # type: ignore[attr-defined]
    return found


def is_frozen(value: object) -> bool:
    """Return whether `value` is a frozen class or a value of one."""
    cls = value if isinstance(value, type) else type(value)
    return cls.__setattr__ is _refuse


def replace(value: Value, **changes: object) -> Value:
    """Return a copy of a frozen value with some fields changed."""
    cls = type(value)
    layout = _layout_of(cls)
    if not changes.keys() <= layout.known:
        return cls(**changes)  # raises TypeError
    made, held = object.__new__(cls), value.__dict__
    made.__dict__.update({name: held[name] for name in layout.names}, **changes)
    if layout.has_check:
        made.__post_init__()  # type: ignore[attr-defined]
    return made


class _Layout(NamedTuple):
    """Facts about a class's fields that its methods need, cached because a search makes thousands of values."""

    names: tuple[str, ...]
    known: frozenset[str]
    required: frozenset[str]
    defaults: Mapping[str, object]
    """Defaults in the order of the fields; MISSING if a field has none or a factory."""
    factories: Mapping[str, Callable[[], object]]
    has_check: bool
    """Whether the class has a `__post_init__`."""


def _layout_of(cls: type) -> _Layout:
    # From this class's own __dict__, as in `fields`.
    found: _Layout | None = cls.__dict__.get("_layout")
    if found is None:
        items = fields(cls)
        found = _Layout(
            names=tuple(item.name for item in items),
            known=frozenset(item.name for item in items),
            required=frozenset(item.name for item in items if item.required),
            defaults={item.name: item.default for item in items},
            factories={item.name: item.default_factory for item in items if item.default_factory is not None},
            has_check=hasattr(cls, "__post_init__"),
        )
        cls._layout = found  # type: ignore[attr-defined]
    return found


class _DataclassFields:
    """Stands in for `__dataclass_fields__`: calls `dataclass` to make it when the standard library first reads it."""

    def __get__(self, instance: object, owner: type) -> object:
        import dataclasses

        for item in fields(owner):
            if item is owner.__dict__.get(item.name):
                given = {"default": item.default, "default_factory": item.default_factory or MISSING}
                known = {name: value for name, value in given.items() if value is not MISSING}
                setattr(owner, item.name, dataclasses.field(metadata=item.metadata, **known))
        dataclasses.dataclass(init=False, repr=False, eq=False, kw_only=True)(owner)
        return owner.__dataclass_fields__  # type: ignore[attr-defined]


def _init(self: object, **values: object) -> None:
    cls, given = type(self), values.keys()
    layout: _Layout = cls.__dict__.get("_layout") or _layout_of(cls)
    if not layout.required <= given:
        raise TypeError(
            f"{type(self).__name__}() needs {next(n for n in layout.names if n in layout.required - given)}="
        )
    if not given <= layout.known:
        unknown = ", ".join(name for name in values if name not in layout.known)
        raise TypeError(f"{type(self).__name__}() has no field {unknown}")
    held = self.__dict__  # since __setattr__ refuses
    held.update(layout.defaults)
    held.update(values)
    if layout.factories:
        for name, factory in layout.factories.items():
            if name not in given:
                held[name] = factory()
    if layout.has_check:
        self.__post_init__()  # type: ignore[attr-defined]


def _refuse(self: object, name: str, *_: object) -> None:
    from dataclasses import FrozenInstanceError

    raise FrozenInstanceError(f"cannot change {name!r} of a {type(self).__name__}")


def _values(self: object) -> tuple[object, ...]:
    cls, held = type(self), self.__dict__
    layout: _Layout = cls.__dict__.get("_layout") or _layout_of(cls)
    return tuple([held[name] for name in layout.names])


def _equal(self: object, other: object) -> object:
    if self is other:
        return True
    return _values(self) == _values(other) if type(other) is type(self) else NotImplemented


def _repr(self: object) -> str:
    shown = ", ".join(f"{item.name}={getattr(self, item.name)!r}" for item in fields(self))
    return f"{type(self).__name__}({shown})"


_METHODS: Mapping[str, Callable[..., object]] = {
    "__init__": _init,
    "__setattr__": _refuse,
    "__delattr__": _refuse,
    "__eq__": _equal,
    "__hash__": lambda self: hash((type(self), *_values(self))),
    "__repr__": _repr,
}
