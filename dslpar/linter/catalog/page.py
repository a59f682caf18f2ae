"""Pages of the findings that only a run can make: what a machine has, what a class is, how ranks were started.

They are raised as `DslparError` where they are found; their codes count from 201 (TEN110: a layer asked for by mode).
"""

from __future__ import annotations

from typing import NamedTuple

from dslpar.core.errors import Severity


class RunTimePage(NamedTuple):
    """One finding of a run, and what `dslpar explain` prints of it."""

    code: str
    name: str
    page: str
    severity: Severity = "error"

    def text(self) -> str:
        """The page, with headings as rules have them."""
        return self.page.strip()
