"""A value that nobody wrote, with the reason that `dslpar config --explain` tells: made where the value is decided."""

from __future__ import annotations

from typing import Any, Literal

from dslpar.core.named_tuple import NamedTuple


class Decision(NamedTuple):
    """A value, and why it is that; a value that was given needs no reason."""

    value: Any
    why: str = ""
    sources: tuple[str, ...] = ()
    """The keys that it follows from."""
    how: Literal["inferred", "default"] = "inferred"
    """"default": no key tells, not even the world size."""
