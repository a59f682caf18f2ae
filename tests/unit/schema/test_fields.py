"""Sections as dataclasses: the methods that all of them share do what generated ones do."""

from __future__ import annotations

from dataclasses import dataclass, field

from dslpar.schema.fields import key, section


@section
class Shared:
    size: int = key()
    names: tuple[str, ...] = key(default=())


@dataclass(frozen=True, kw_only=True)
class Generated:
    size: int
    names: tuple[str, ...] = field(default=())


@section
class Larger(Shared):
    depth: int = key(default=1)


def test_text_and_hash_are_those_of_a_dataclass() -> None:
    ours, theirs = Shared(size=3, names=("a", "b")), Generated(size=3, names=("a", "b"))
    assert repr(ours) == repr(theirs).replace("Generated", "Shared")
    assert hash(ours) == hash(theirs)


def test_sections_of_one_class_are_equal_by_value() -> None:
    assert Shared(size=3) == Shared(size=3, names=())
    assert Shared(size=3) != Shared(size=4)
    assert Larger(size=3) != Larger(size=3, depth=2)
    assert Larger(size=3) != Shared(size=3), "of another class"
