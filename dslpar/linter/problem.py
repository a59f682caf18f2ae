"""The result of a rule: problems, each with its location; or an exception if a value it needs is unknown."""

from __future__ import annotations

from dslpar.core.errors import Fix, Location
from dslpar.core.named_tuple import NamedTuple


class UnknownValueError(Exception):
    """A rule needs a value that is unknown: it is invalid, or it needs a world size. The rule is skipped."""


class Problem(NamedTuple):
    """A mistake and its location; the rule adds its code, name and severity."""

    location: Location
    message: str
    help: str = ""
    key: str = ""
    fix: Fix | None = None
