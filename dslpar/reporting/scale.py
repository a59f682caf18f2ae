"""Scale of a plot's axis: positions of values, ticks, and their labels.

    scale = make_scale([0.31, 2.94], log=False)
    scale.ticks(5), scale.at(1.5), [label(tick) for tick in scale.ticks(5)]

Ticks are 1, 2 or 5 times a power of ten (Heckbert's "nice numbers", Graphics Gems, 1990).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

_NICE = (1.0, 2.0, 5.0, 10.0)
_LEAST, _MOST = 1e-300, 1e300
"""Limits to which values are clipped, so that computations with them do not overflow."""


class Scale(NamedTuple):
    """Values from `low` to `high`, linear or logarithmic."""

    low: float
    high: float
    log: bool = False

    def at(self, value: float) -> float:
        """Return the position of a value: 0 at `low`, 1 at `high`."""
        low, high = self.low, self.high
        if self.log:
            low, high, value = math.log10(low), math.log10(high), math.log10(max(value, _LEAST))
        return min(max((value - low) / (high - low), 0.0), 1.0)

    def ticks(self, count: int) -> list[float]:
        """Return about `count` values to mark, ascending."""
        if not self.log:
            return _linear_ticks(self.low, self.high, count)
        first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
        stride = max(1, round((last - first) / count))
        factors = (1, 2, 5) if last - first <= 2 else (1,)
        found = [factor * 10.0**power for power in range(first, last + 1, stride) for factor in factors]
        inside = [tick for tick in found if self.low <= tick <= self.high]
        return inside if len(inside) > 1 else _linear_ticks(self.low, self.high, count)


def make_scale(values: Iterable[float], log: bool = False) -> Scale:
    """Return a scale that contains all values; without values, a scale from 0 to 1, or from 1 to 10 if logarithmic."""
    values = [min(max(value, _LEAST if log else -_MOST), _MOST) for value in values if not log or value > 0]
    low, high = min(values, default=1.0 if log else 0.0), max(values, default=10.0 if log else 1.0)
    if high - low <= 1e-12 * max(abs(low), abs(high), _LEAST):  # equal values: a line through the middle
        room = abs(low) / 2 or 1.0
        low, high = low - room, high + room
    return Scale(low, high, log)


def _linear_ticks(low: float, high: float, count: int) -> list[float]:
    rough = high / count - low / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next((nice * power for nice in _NICE if nice * power >= rough * 0.999), 10 * power)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [number * step for number in range(first, last + 1)]


def label(value: float) -> str:
    """Format a tick in few characters.

    >>> [label(value) for value in (0.0, 0.25, 3e-4, 1500.0, 2e6, 1e9)]
    ['0', '0.25', '3e-4', '1,500', '2M', '1e9']
    """
    size = abs(value)
    if size >= 1e9 or 0 < size < 1e-3:
        digits, _, power = f"{value:.3e}".partition("e")
        return f"{digits.rstrip('0').rstrip('.')}e{int(power)}"
    if size >= 1e6:
        return f"{value / 1e6:.4g}M"
    return f"{value:,.0f}" if size >= 1000 else f"{value:.4g}"
