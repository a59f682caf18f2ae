"""Options of a layer that are given by name, and what is said of a name that there is not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from dslpar.core.errors import WORLD, DslparError, Finding, Location

T = TypeVar("T")


def one_of(known: Mapping[str, T], name: str, what: str) -> T:
    """Raises: DslparError, where there is none of that name."""
    if name not in known:
        message, hint = f"no {what} is called {name!r}", f"{what}={' or '.join(map(repr, known))}"
        raise DslparError(
            [Finding("TEN224", "no-such-layer-option", "error", message, hint, Location(WORLD), f"model.{what}")]
        )
    return known[name]
