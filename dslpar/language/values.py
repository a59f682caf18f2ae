"""Values during evaluation: Python values, in containers that also store where each item was written.

Scalars are plain Python. `List`, `Tuple` and `Dict` are subclasses of Python's containers, so that the interpreter's
operators work on them. They store their items' origins separately. `UNKNOWN` is the value of an expression that could
not be evaluated. Using it raises `UnknownError`, so a dependent value silently becomes unknown too, like a NaN or the
error node of a compiler.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, NoReturn, TypeAlias

from dslpar.core.errors import Location
from dslpar.language.errors import UnknownError
from dslpar.language.limits import Budget, check_items
from dslpar.language.tree import Reference

Value: TypeAlias = Any
"""Any value of an expression of the language; Python's own operators work on it."""
Origin: TypeAlias = Location | None
"""Location where a value was written; None means that of its container."""
Located: TypeAlias = tuple[Value, Location]
"""Value and origin of an expression."""


class Binding(NamedTuple):
    """Value of a name, and the locations where the value and the name were written."""

    value: Value
    location: Location
    name_location: Location
    imported_as: str = ""
    """`"module"` if an import bound the name to a module or reference, `"config"` if to a config's value."""


class Unknown:
    """Type of `UNKNOWN`, the value of an expression that could not be evaluated."""

    __slots__ = ()

    def _raise(self, *_: object) -> NoReturn:
        raise UnknownError

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _raise
    __bool__ = __len__ = __iter__ = __contains__ = __getitem__ = __index__ = _raise
    __str__ = __repr__ = __format__ = __int__ = __float__ = __hash__ = _raise
    __add__ = __radd__ = __mul__ = __rmul__ = __sub__ = __rsub__ = _raise


UNKNOWN = Unknown()


def require_known(*values: object) -> None:
    """Raise UnknownError if one of the values is unknown, because a result would be unknown too."""
    if any(isinstance(value, Unknown) for value in values):
        raise UnknownError


def require_readable(value: object) -> None:
    """Raise UnknownError if a value is unknown, or was changed in an unknown way."""
    if isinstance(value, Unknown) or getattr(value, "tainted", False):
        raise UnknownError


class List(list[Any]):
    """A list with the origin of each item. It is `tainted` if it was changed in an unknown way, like a `Dict`."""

    __slots__ = ("origins", "tainted")

    def __init__(self, items: Iterable[Value] = (), origins: Iterable[Origin] | None = None) -> None:
        super().__init__(items)
        self.origins: list[Origin] = [None] * len(self) if origins is None else list(origins)
        self.tainted = False
        assert len(self.origins) == len(self)

    def append_all(self, items: Value, budget: Budget) -> None:
        """Evaluate `list.extend` and `list +=`: append the items of any iterable, with their origins if it has them."""
        taken = budget.take_all(items)
        check_items(len(self) + len(taken))
        known = isinstance(items, (list, tuple)) and len(items) == len(taken)
        self.origins.extend(origins_of(items) if known else [None] * len(taken))
        self.extend(taken)


class Tuple(tuple[Any, ...]):
    """A tuple with the origin of each item."""

    origins: list[Origin]


class Dict(dict[Any, Any]):
    """A dict with the origins of its values and keys. Configs may read and set its items as attributes."""

    __slots__ = ("origins", "tainted")

    def __init__(self) -> None:
        super().__init__()
        self.origins: dict[Any, tuple[Origin, Origin]] = {}
        self.tainted = False
        """Whether the dict was changed in an unknown way. A missing key is then unknown, not an error."""

    def put(self, key: Value, value: Value, origin: Origin = None, key_origin: Origin = None) -> None:
        """Set an item and its origins."""
        self[key] = value
        self.origins[key] = (origin, key_origin)

    def drop(self, key: Value) -> Value:
        """Remove an item and return its value."""
        self.origins.pop(key, None)
        return self.pop(key)

    def origin_of(self, key: Value) -> Origin:
        """Return where the value of a key was written."""
        return self.origins.get(key, NO_ORIGINS)[0]

    def take(self, other: dict[Value, Value], location: Origin = None) -> None:
        """Update from another dict, with its origins; an item without an origin gets `location`."""
        for key, value in other.items():
            origin, key_origin = other.origins.get(key, NO_ORIGINS) if isinstance(other, Dict) else NO_ORIGINS
            self.put(key, value, origin or location, key_origin or location)

    def merge(self, other: Value, budget: Budget, location: Origin = None) -> None:
        """Evaluate `dict.update` and `dict |=` with a dict or pairs; an item without an origin gets `location`."""
        pairs = other if isinstance(other, dict) else budget.dict_of(other)
        budget.spend(len(pairs) // 4)
        self.take(pairs, location)
        self.tainted |= getattr(pairs, "tainted", False)
        check_items(len(self))


NO_ORIGINS: tuple[Origin, Origin] = (None, None)


class LazyTarget:
    """`LazyCall(target)`, before its second call."""

    __slots__ = ("target",)

    def __init__(self, target: Reference) -> None:
        self.target = target


def origins_of(items: Sequence[Value]) -> list[Origin]:
    """Return the origins of a sequence's items."""
    return items.origins if isinstance(items, (List, Tuple)) else [None] * len(items)


def make_tuple(items: Iterable[Value], origins: list[Origin]) -> Tuple:
    """Make a tuple with origins, which its constructor cannot take."""
    made = Tuple(items)
    made.origins = origins
    return made


def adopt(value: Value) -> Value:
    """Convert a plain list or dict to a `List` or `Dict`; return any other value unchanged."""
    if type(value) is list:
        return List(value)
    if type(value) is dict:
        made = Dict()
        made.take(value)
        return made
    return value


def deep_copy(value: Value, known: dict[int, Value] | None = None) -> Value:
    """Copy containers deeply, as OmegaConf copies its arguments; parts that are shared stay shared."""
    known = {} if known is None else known
    if not isinstance(value, (list, dict, tuple)):
        return value
    if id(value) in known:
        return known[id(value)]
    if isinstance(value, tuple):
        items = tuple(deep_copy(item, known) for item in value)
        known[id(value)] = make_tuple(items, origins_of(value))
    elif isinstance(value, list):
        made = known[id(value)] = List((), ())
        made.extend(deep_copy(item, known) for item in value)
        made.origins = list(origins_of(value))
        made.tainted = getattr(value, "tainted", False)
    else:
        copy = known[id(value)] = Dict()  # stored before its items are copied, since an item may contain the dict
        copy.update((key, deep_copy(item, known)) for key, item in value.items())
        copy.origins = dict(value.origins) if isinstance(value, Dict) else {}
        copy.tainted = getattr(value, "tainted", False)
    return known[id(value)]
