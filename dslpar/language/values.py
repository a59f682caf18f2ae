"""Values during evaluation: Python's own, in containers that also remember where each item was written.

Every expression evaluates to a pair `(value, place)`. Scalars are plain Python; `List`, `Tuple` and `Dict` are
subclasses of Python's, so that the interpreter's own operators work on them, with the items' places beside them. A
place that is None means "as the container's". `UNKNOWN` stands for what could not be evaluated: touching it raises
`UnknownError`, so whatever depends on it is unknown as well, silently: the NaN of IEEE, the error node of a compiler.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

from dslpar.core.errors import Location
from dslpar.core.named_tuple import NamedTuple
from dslpar.language.codes import UnknownError
from dslpar.language.tree import Reference

Place = Location | None
Placed = tuple[Any, Location]


class Slot(NamedTuple):
    """What a name stands for: its value, where that was written, where the name was written."""

    value: Any
    place: Location
    key_place: Location
    bound_by: str = ""
    """`"module"` or `"config"` where an import bound the name to a module or reference, or to a config's value."""


class Unknown:
    """A value that could not be evaluated."""

    __slots__ = ()

    def _poison(self, *_: object) -> NoReturn:
        raise UnknownError

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _poison
    __bool__ = __len__ = __iter__ = __contains__ = __getitem__ = __index__ = _poison
    __str__ = __repr__ = __format__ = __int__ = __float__ = __hash__ = _poison
    __add__ = __radd__ = __mul__ = __rmul__ = __sub__ = __rsub__ = _poison


UNKNOWN = Unknown()


class List(list[Any]):
    """A list with a place for each item."""

    __slots__ = ("origins", "spoiled")

    def __init__(self, items: Iterable[Any] = (), origins: Iterable[Place] | None = None) -> None:
        super().__init__(items)
        self.origins: list[Place] = [None] * len(self) if origins is None else list(origins)
        self.spoiled = False
        assert len(self.origins) == len(self)


class Tuple(tuple[Any, ...]):
    """A tuple with a place for each item."""

    origins: list[Place]


class Dict(dict[Any, Any]):
    """A dict with places for each value and each key; attribute access is the language's one extension."""

    __slots__ = ("origins", "spoiled")

    def __init__(self) -> None:
        super().__init__()
        self.origins: dict[Any, tuple[Place, Place]] = {}
        self.spoiled = False
        """Whether a change of unknown effect was made: then a missing key is unknown, not wrong."""

    def put(self, key: Any, value: Any, place: Place = None, key_place: Place = None) -> None:
        """Set an item and its places."""
        self[key] = value
        self.origins[key] = (place, key_place)

    def drop(self, key: Any) -> Any:
        """Remove an item, and return its value."""
        self.origins.pop(key, None)
        return self.pop(key)

    def place_of(self, key: Any) -> Place:
        return self.origins.get(key, NO_PLACES)[0]

    def take(self, other: dict[Any, Any], place: Place = None) -> None:
        """Update from another dict, with its places, or with one place for all that has none."""
        for key, value in other.items():
            value_place, key_place = other.origins.get(key, NO_PLACES) if isinstance(other, Dict) else NO_PLACES
            self.put(key, value, value_place or place, key_place or place)


NO_PLACES: tuple[Place, Place] = (None, None)


class LazyTarget:
    """`LazyCall(target)`, before its second call."""

    __slots__ = ("target",)

    def __init__(self, target: Reference) -> None:
        self.target = target


def origins_of(items: Any) -> list[Place]:
    """The places of a sequence's items."""
    return items.origins if isinstance(items, (List, Tuple)) else [None] * len(items)


def make_tuple(items: Iterable[Any], origins: list[Place]) -> Tuple:
    made = Tuple(items)
    made.origins = origins
    return made


def adopt(value: Any) -> Any:
    """A list or dict that Python made, as ours."""
    if type(value) is list:
        return List(value)
    if type(value) is dict:
        made = Dict()
        made.take(value)
        return made
    return value


def copied(value: Any, known: dict[int, Any] | None = None) -> Any:
    """A deep copy of the containers, sharing kept: what OmegaConf does with the values it is given."""
    known = {} if known is None else known
    if not isinstance(value, (list, dict, tuple)):
        return value
    if id(value) in known:
        return known[id(value)]
    if isinstance(value, tuple):
        items = tuple(copied(item, known) for item in value)
        known[id(value)] = make_tuple(items, origins_of(value))
    elif isinstance(value, list):
        made = known[id(value)] = List((), ())
        made.extend(copied(item, known) for item in value)
        made.origins = list(origins_of(value))
        made.spoiled = getattr(value, "spoiled", False)
    else:
        known[id(value)] = _copied_dict(value, known)
    return known[id(value)]


def _copied_dict(value: dict[Any, Any], known: dict[int, Any]) -> Dict:
    made = known[id(value)] = Dict()
    for key, item in value.items():
        made[key] = copied(item, known)
    made.origins = dict(value.origins) if isinstance(value, Dict) else {}
    made.spoiled = getattr(value, "spoiled", False)
    return made
