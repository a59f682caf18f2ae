"""The results of a rule: `Problem`, or `UnknownValueError` if a value that the rule needs is unknown."""

from __future__ import annotations

from typing import NamedTuple

from dslpar.core.errors import Fix, Location


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
