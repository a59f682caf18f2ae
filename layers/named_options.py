"""Look up a layer's option by name: an activation, a norm, a role."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from dslpar.core.catalog import raise_finding

T = TypeVar("T")


def one_of(known: Mapping[str, T], name: str, what: str) -> T:
    """Return the option `what` called `name`. Raises: DslparError: there is no such option."""
    if name not in known:
        message, hint = f"unknown {what} {name!r}", f"{what}={' or '.join(map(repr, known))}"
        raise_finding("TEN224", message, hint, key=f"model.{what}")
    return known[name]
