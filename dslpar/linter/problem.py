"""What a rule hands back: a problem at its place; or, by an exception, that it cannot tell."""

from __future__ import annotations

from dslpar.core.errors import Fix, Location
from dslpar.core.named_tuple import NamedTuple


class UnknownValueError(Exception):
    """A rule asked for a value that another finding covers, or that needs a world size: the rule is skipped."""


class Problem(NamedTuple):
    """What a rule found, and where; the rule adds its code, name and severity."""

    location: Location
    message: str
    help: str = ""
    key: str = ""
    fix: Fix | None = None
