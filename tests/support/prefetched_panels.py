"""Count the prefetched panels of weights."""

from __future__ import annotations

from typing import Any

from dslpar.layers import weight_prefetch


def count_ahead() -> list[bool]:
    """Return a list that gets an entry per prefetched panel: whether it was used."""
    used: list[bool] = []
    original = weight_prefetch._Ahead.is_of

    def is_of(self: Any, *args: Any) -> bool:
        used.append(original(self, *args))
        return used[-1]

    weight_prefetch._Ahead.is_of = is_of  # type: ignore[method-assign]
    return used
