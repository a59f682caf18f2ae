"""Options of a layer that are given by name, and what is said of a name that there is not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from dslpar.core.catalog import raise_finding

T = TypeVar("T")


def one_of(known: Mapping[str, T], name: str, what: str) -> T:
    """Raises: DslparError, where there is none of that name."""
    if name not in known:
        message, hint = f"no {what} is called {name!r}", f"{what}={' or '.join(map(repr, known))}"
        raise_finding("TEN224", message, hint, key=f"model.{what}")
    return known[name]
