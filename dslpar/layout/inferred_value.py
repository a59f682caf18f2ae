"""Value that the config leaves out, with the reason that `dslpar config --explain` prints."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple


class InferredValue(NamedTuple):
    """Value with its reason; a value that the config sets needs no reason."""

    value: Any
    why: str = ""
    sources: tuple[str, ...] = ()
    """The config keys that the value follows from."""
    how: Literal["inferred", "default"] = "inferred"
    """"default" if the value depends on no other key and not on the world size."""
