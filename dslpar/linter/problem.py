"""The results of a rule: `Problem`, or `UnknownValueError` if a value that the rule needs is unknown."""

from __future__ import annotations

from typing import NamedTuple, TypeVar

from dslpar.core.errors import Fix, Location

Section = TypeVar("Section")


class UnknownValueError(Exception):
    """A value that a rule needs is invalid, or depends on a missing world size. The rule ends without a finding."""


class Problem(NamedTuple):
    """A mistake and its location; the rule adds its code, name and severity."""

    location: Location
    message: str
    help: str = ""
    """The suggested change, printed after "help:"."""
    key: str = ""
    """The dotted key as the author wrote it; empty if the problem has no key."""
    fix: Fix | None = None
    """The change that `dslpar lint --fix` makes; None if a person has to decide."""


def require(section: object, cls: type[Section]) -> Section:
    """Return the section if it is an instance of `cls`. Raises UnknownValueError if not, which ends the rule."""
    if not isinstance(section, cls):
        raise UnknownValueError(cls.__name__)
    return section
