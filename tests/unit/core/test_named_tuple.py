"""dslpar's NamedTuple against typing's: fields, defaults, methods, documentation, pickle."""

from __future__ import annotations

import pickle
import typing

from dslpar.core.errors import Location
from dslpar.core.named_tuple import NamedTuple


class Ours(NamedTuple):
    """A pair."""

    first: int
    second: str = "b"
    """The second."""

    @property
    def both(self) -> str:
        return f"{self.first}{self.second}"


class Theirs(typing.NamedTuple):
    """A pair."""

    first: int
    second: str = "b"

    @property
    def both(self) -> str:
        return f"{self.first}{self.second}"


def test_it_is_what_typing_makes() -> None:
    for name in ("_fields", "_field_defaults", "__doc__", "__module__"):
        assert getattr(Ours, name) == getattr(Theirs, name)
    assert typing.get_type_hints(Ours) == typing.get_type_hints(Theirs)
    assert Ours(1) == Theirs(1) == (1, "b")
    assert Ours(first=1, second="c").both == "1c"
    assert Ours.__mro__[1:] == (tuple, object)


def test_replace_repr_and_pickle() -> None:
    location = Location("a.py", 2)
    assert location._replace(line=3) == ("a.py", 3, 1, 1, 1)
    assert repr(Ours(1)) == "Ours(first=1, second='b')"
    assert pickle.loads(pickle.dumps(location)) == location
    assert type(pickle.loads(pickle.dumps(Ours(1)))) is Ours
