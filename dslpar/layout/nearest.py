"""Nearest legal sizes: the neighbouring multiples of one size, or combinations of attention's sizes.

>>> nearest_attention(Attention(hidden_size=50, num_heads=6), TensorMesh(y=4, mode="1d"))
[{'num_heads': 4, 'hidden_size': 48}]
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import NamedTuple

from dslpar.core.mesh import TensorMesh
from dslpar.layout.divisors import Attention, attention, divisors, head_ranks, ranks, residual_axes

LARGEST = 2**31 - 1
"""The largest size that is allowed."""
_MOST_TRIED = 64
_KEYS = ("num_heads", "num_kv_heads", "hidden_size")
_OF_KV_HEADS = dict.fromkeys(("TEN207", "TEN208"), "num_kv_heads")
"""The size that should change, for rules that compare two sizes."""


def neighbours(value: int, legal: Sequence[int]) -> list[int]:
    """Return the legal sizes next to `value`, below and above; `legal` must be sorted."""
    at = bisect_left(legal, value)
    return list(legal[max(0, at - 1) : at + 1])


def multiples(value: int, by: int) -> list[int]:
    """Return the multiples of `by` next to `value`, from `by` up to LARGEST."""
    above = max(by, -(-value // by) * by)  # not bisected in a range, whose length Python limits to 2**63
    return [size for size in (above - by, above) if by <= size <= LARGEST]


def nearest_attention(sizes: Attention, cuboid: TensorMesh) -> list[dict[str, int]]:
    """Return legal choices of num_heads, num_kv_heads and hidden_size; each choice has only the sizes that change.

    As few sizes change as possible, preferably the illegal ones. A single changed size has up to two choices, below and
    above. Several changed sizes have one choice: the nearest num_heads, then num_kv_heads, then hidden_size. The result
    is empty if no sizes are legal.
    """
    own_kv = sizes.num_kv_heads is not None
    requested = _Sizes(sizes.num_heads, sizes.num_kv_heads or sizes.num_heads, sizes.hidden_size)
    search = _Search(requested, _demand(sizes, cuboid), own_kv)
    wrong = {_OF_KV_HEADS.get(each.code, each.key) for each in attention(sizes, cuboid) if not each.holds}
    keys = [key for key in _KEYS if own_kv or key != "num_kv_heads"]
    free_sets = [free for count in range(1, len(keys) + 1) for free in combinations(keys, count)]
    for free in sorted(free_sets, key=lambda free: (len(free), len(set(free) - wrong))):
        if found := search.choices(free):
            return [{key: getattr(choice, key) for key in free} for choice in found]
    return []


def describe(choices: Sequence[Mapping[str, int]], name: Callable[[str], str] = str) -> str:
    """Describe legal choices for a hint; `name` gives the key as the author wrote it.

    >>> describe([{"num_heads": 4}, {"num_heads": 8}]), describe([{"num_heads": 4, "hidden_size": 48}])
    ('nearest legal: num_heads=4 or 8', 'nearest legal: num_heads=4 with hidden_size=48')
    """
    if not choices:
        return "a smaller tensor size"
    first = choices[0]
    if len(first) > 1:
        return "nearest legal: " + " with ".join(f"{name(key)}={size}" for key, size in first.items())
    (key,) = first
    return f"nearest legal: {name(key)}=" + " or ".join(str(choice[key]) for choice in choices)


class _Sizes(NamedTuple):
    num_heads: int
    num_kv_heads: int
    hidden_size: int


class _Demand(NamedTuple):
    """Divisors that the sizes must have."""

    heads_by: int
    """Divisor of num_heads and of num_kv_heads."""
    hidden_by: int
    """Divisor of hidden_size."""
    kv_features_by: int
    """Divisor of the features of all key heads together."""
    head_dim_by: int
    """Divisor of the features per head."""

    def head_dim(self, num_heads: int, num_kv_heads: int) -> int:
        """Return the number that a head's features must be a multiple of."""
        parts = (self.hidden_by, num_heads), (self.kv_features_by, num_kv_heads)
        return math.lcm(self.head_dim_by, *(by // math.gcd(by, count) for by, count in parts))

    def met(self, sizes: _Sizes) -> bool:
        """Return whether all sizes are divisible as demanded."""
        num_heads, num_kv_heads, hidden_size = sizes
        return (
            num_heads % self.heads_by == num_kv_heads % self.heads_by == num_heads % num_kv_heads == 0
            and hidden_size % (num_heads * self.head_dim(num_heads, num_kv_heads)) == 0
        )


def _demand(sizes: Attention, cuboid: TensorMesh) -> _Demand:
    return _Demand(
        heads_by=head_ranks(cuboid),
        hidden_by=math.lcm(*(ranks(cuboid, axes) for axes in residual_axes(cuboid))),
        kv_features_by=cuboid.y * cuboid.q,
        head_dim_by=2 if sizes.rotary else 1,
    )


class _Search(NamedTuple):
    """Search for legal sizes near the requested ones; `free` names the sizes that may change."""

    requested: _Sizes
    demand: _Demand
    own_kv: bool
    """Whether num_kv_heads is given, instead of following num_heads."""

    def choices(self, free: tuple[str, ...]) -> list[_Sizes]:
        """Return legal sizes that differ only in `free`."""
        legal = (sizes for sizes in self.candidates(free) if self.demand.met(sizes))
        if len(free) > 1:
            first = next(legal, None)
            return [] if first is None else [first]
        (key,) = free
        by_value = {getattr(sizes, key): sizes for sizes in legal}
        return [by_value[value] for value in neighbours(getattr(self.requested, key), sorted(by_value))]

    def candidates(self, free: tuple[str, ...]) -> Iterator[_Sizes]:
        """Yield candidate sizes, the nearest heads first."""
        hidden_size = self.requested.hidden_size
        for num_heads in _nearest_first(self.requested.num_heads, self._heads(free)):
            for num_kv_heads in _nearest_first(self.requested.num_kv_heads, self._kv_heads(num_heads, free)):
                sizes = [hidden_size]
                if "hidden_size" in free:
                    sizes = multiples(hidden_size, num_heads * self.demand.head_dim(num_heads, num_kv_heads))
                for size in _nearest_first(hidden_size, sizes):
                    yield _Sizes(num_heads, num_kv_heads, size)

    def _heads(self, free: tuple[str, ...]) -> list[int]:
        requested, heads_by = self.requested, self.demand.heads_by
        if "num_heads" not in free:
            return [requested.num_heads]
        if "hidden_size" not in free:
            return [size for size in divisors(requested.hidden_size) if size % heads_by == 0]
        fixed_kv = requested.num_kv_heads if self.own_kv and "num_kv_heads" not in free else 1
        return multiples(requested.num_heads, math.lcm(heads_by, fixed_kv))

    def _kv_heads(self, num_heads: int, free: tuple[str, ...]) -> list[int]:
        if not self.own_kv:
            return [num_heads]
        return divisors(num_heads) if "num_kv_heads" in free else [self.requested.num_kv_heads]


def _nearest_first(value: int, sizes: Iterable[int]) -> list[int]:
    """Return at most _MOST_TRIED sizes, the nearest first.

    If there are more sizes than that, one of the nearest is legal, or hidden_size may change too.
    """
    return sorted(sizes, key=lambda size: abs(size - value))[:_MOST_TRIED]
