"""A row of the table: what was seen, what was asked, and whether it held."""

from __future__ import annotations

from typing import NamedTuple


class Row(NamedTuple):
    """One thing that was looked at."""

    name: str
    seen: str
    asked: str = ""
    held: bool | None = None
    """None: a number to read, of which nothing is asked."""

    @property
    def verdict(self) -> str:
        """The row's verdict in the table."""
        return {True: "ok", False: "FAIL", None: ""}[self.held]

    def __str__(self) -> str:
        return f"{self.name:58} {self.seen:30} {self.asked:24} {self.verdict}".rstrip()


def at_most(name: str, value: float, limit: float, unit: str = "") -> Row:
    """A number that must not be above a limit."""
    return Row(name, f"{value:.3g}{unit}", f"at most {limit:g}{unit}", value <= limit)


def holds(name: str, seen: object, asked: str, held: bool) -> Row:
    """A statement."""
    return Row(name, str(seen), asked, bool(held))
