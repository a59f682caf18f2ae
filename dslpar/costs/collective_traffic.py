"""Traffic of ring collectives: elements that a rank sends, and their sums by collective and axis.

Elements sent per rank in a group of n ranks:

==============  ====================================  ===============
collective      E counts                              sent per rank
==============  ====================================  ===============
all_gather      the gathered result                   (n-1)/n * E
reduce_scatter  a rank's input                        (n-1)/n * E
all_to_all      a rank's input                        (n-1)/n * E
all_reduce      a rank's input                        2 (n-1)/n * E
send            the message                           E
==============  ====================================  ===============

A group is named by the letters of its axes that have more than one rank, such as "y" or "d q" (docs/architecture.md,
"The cuboid"). Numbers of elements are exact, so they may be fractions. Multiply them by the element size for bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from dslpar.core.mesh import TENSOR_AXES, TensorMesh
from dslpar.layout.divisors import ranks
from dslpar.layout.sharding import Letters

if TYPE_CHECKING:
    from fractions import Fraction

Key = tuple[str, str]
"""(collective, axis): ("all_gather", "y")."""
Number: TypeAlias = "int | float | Fraction"
"""A number of elements: exact as int or Fraction, or a float in a search over many layouts, where floats are faster."""


def ratio(number: Number, by: int) -> Number:
    """Divide a number, exactly unless it is a float."""
    if isinstance(number, float):
        return number / by
    if not number % by:
        return number // by  # as exact as a fraction, and many times faster
    from fractions import Fraction  # imports `decimal`: a twelfth of the start-up time, and most sizes divide evenly

    return Fraction(number, by)


class Traffic(Mapping[Key, Number]):
    """Elements that a rank sends, by (collective, axis), without zeros; supports `+`, `-`, and `*` by a number.

    `calls` has the number of collectives by the same keys. The forecast needs it because each call has a latency.
    """

    __slots__ = ("_elements", "calls")

    def __init__(self, elements: Mapping[Key, Number] = {}, calls: Mapping[Key, Number] | None = None) -> None:
        if not all(elements.values()):
            elements = {key: number for key, number in elements.items() if number}
        self._elements = elements
        self.calls: Mapping[Key, Number] = dict.fromkeys(self._elements, 1) if calls is None else calls

    def __getitem__(self, key: Key) -> Number:
        return self._elements[key]

    def __iter__(self) -> Iterator[Key]:
        return iter(self._elements)

    def __len__(self) -> int:
        return len(self._elements)

    def __hash__(self) -> int:
        return hash(frozenset(self._elements.items()))

    def __repr__(self) -> str:
        return f"Traffic({{{', '.join(f'{key}: {number}' for key, number in sorted(self.items()))}}})"

    @classmethod
    def sum(cls, *parts: Traffic) -> Traffic:
        """Add up several `Traffic`s, without intermediate sums."""
        parts = tuple([part for part in parts if part._elements])
        if len(parts) < 2:
            return parts[0] if parts else NOTHING
        elements, calls = dict(parts[0]._elements), dict(parts[0].calls)
        for part in parts[1:]:
            for key, number in part._elements.items():
                elements[key] = elements.get(key, 0) + number
                calls[key] = calls.get(key, 0) + part.calls.get(key, 0)
        return cls(elements, calls)

    def __add__(self, other: Traffic) -> Traffic:
        if not other._elements:
            return self
        return Traffic.sum(self, other) if self._elements else other

    def __sub__(self, other: Traffic) -> Traffic:
        return self + other * -1

    def __mul__(self, times: Number) -> Traffic:
        return Traffic(
            {key: number * times for key, number in self.items()},
            {key: number * times for key, number in self.calls.items()},
        )

    @property
    def total(self) -> Number:
        """Elements over all collectives and axes."""
        return sum(self._elements.values())

    def of(self, axis: str) -> Number:
        """Return the elements over all collectives of one axis."""
        return sum(number for (_, name), number in self.items() if name == axis)

    def by_axis(self) -> dict[str, Number]:
        """Return the elements of every axis."""
        return {axis: self.of(axis) for axis in sorted({axis for _, axis in self})}


NOTHING = Traffic()


class LayerTraffic(NamedTuple):
    """Traffic of a rank for a layer or several, in the forward and in the backward."""

    forward: Traffic = NOTHING
    backward: Traffic = NOTHING

    def __add__(self, other: LayerTraffic) -> LayerTraffic:  # type: ignore[override]
        return LayerTraffic(forward=self.forward + other.forward, backward=self.backward + other.backward)

    def __mul__(self, times: int) -> LayerTraffic:  # type: ignore[override]
        return LayerTraffic(forward=self.forward * times, backward=self.backward * times)

    @property
    def both(self) -> Traffic:
        """Forward and backward together."""
        return self.forward + self.backward

    @property
    def total(self) -> Number:
        """Elements of forward and backward, over all collectives and axes."""
        return self.both.total


# Collectives ------------------------------------------------------------------------------------------------------


def all_gather(tensor: TensorMesh, letters: Letters, whole: Number) -> Traffic:
    """Count an all-gather whose result has `whole` elements."""
    return _ring("all_gather", tensor, letters, whole)


def reduce_scatter(tensor: TensorMesh, letters: Letters, whole: Number) -> Traffic:
    """Count a reduce-scatter of `whole` elements per rank."""
    return _ring("reduce_scatter", tensor, letters, whole)


def all_reduce(tensor: TensorMesh, letters: Letters, elements: Number) -> Traffic:
    """Count an all-reduce of `elements` per rank: a reduce-scatter and an all-gather."""
    return _ring("all_reduce", tensor, letters, 2 * elements)


def all_to_all(tensor: TensorMesh, letters: Letters, elements: Number) -> Traffic:
    """Count an all-to-all of `elements` per rank, of which each rank receives an equal part."""
    return _ring("all_to_all", tensor, letters, elements)


def exchange_of_rows(tensor: TensorMesh, elements: Number) -> Traffic:
    """Count an all-to-all over the ranks that hold a mixture's experts: "e" and the tensor axes."""
    return _ring("all_to_all", tensor, EXPERT_AXES, elements)


EXPERT_AXES = ("e", *TENSOR_AXES)


def _ring(collective: str, tensor: TensorMesh, letters: Letters, elements: Number) -> Traffic:
    size = ranks(tensor, letters)
    if size == 1:
        return NOTHING
    name = " ".join([letter for letter in EXPERT_AXES if letter in letters and getattr(tensor, letter) > 1])
    return Traffic({(collective, name): ratio(elements, size) * (size - 1)})
