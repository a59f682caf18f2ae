"""The result of a rule: problems, each with its location; or an exception if a value it needs is unknown."""

from __future__ import annotations

from typing import NamedTuple

from dslpar.core.errors import Fix, Location


class UnknownValueError(Exception):
    """A rule needs a value that is unknown: it is invalid, or it needs a world size. The rule is skipped."""


class Problem(NamedTuple):
    """A mistake and its location; the rule adds its code, name and severity."""

    location: Location
    message: str
    help: str = ""
    key: str = ""
    fix: Fix | None = None
