"""A row of the table: the measured value, the target, and whether it held."""

from __future__ import annotations

from typing import NamedTuple


class Row(NamedTuple):
    """One measurement."""

    name: str
    seen: str
    asked: str = ""
    held: bool | None = None
    """None: a number without a target."""

    @property
    def verdict(self) -> str:
        """Return the table's text for the verdict."""
        return {True: "ok", False: "FAIL", None: ""}[self.held]

    def __str__(self) -> str:
        return f"{self.name:58} {self.seen:30} {self.asked:24} {self.verdict}".rstrip()


def at_most(name: str, value: float, limit: float, unit: str = "") -> Row:
    """Return a row for a number with an upper limit."""
    return Row(name, f"{value:.3g}{unit}", f"at most {limit:g}{unit}", value <= limit)


def holds(name: str, seen: object, asked: str, held: bool) -> Row:
    """Return a row for a statement."""
    return Row(name, str(seen), asked, bool(held))
