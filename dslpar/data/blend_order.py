"""Which part of a blend each sample of a run is of: by the weights and its place in the run alone.

    order = BlendOrder([Fraction(7, 10), Fraction(2, 10), Fraction(1, 10)])
    order.locate(12)           # (0, 8): sample 12 of the run is the part's sample 8, both from 0

Between two parts, each prefix has of both as near to its share as whole samples can be (Webster's method, which
Sainte-Lague has too); more of them are two groups of parts, by a Huffman tree of the weights. So no prefix has two
samples more or fewer of a part than its share; two parts stay within a half. (Webster's method over all parts at once
takes equal ones in a row: of weights 0.5 and 100 times 0.005 it is 25 samples off.) torch's and Hugging Face's
interleaving draw, and Megatron-LM's blend fills an array as long as the run; here a place is found from its number,
in as many steps as the tree is deep, so a run goes on from any sample.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from decimal import Context, Decimal
from fractions import Fraction
from typing import NamedTuple


class _Fork(NamedTuple):
    """Two groups of parts; a group is a fork, or the number of a part."""

    left: _Fork | int
    right: _Fork | int
    left_weight: int
    weight: int


class BlendOrder:
    """The order of a blend of parts with these weights, each above 0; they need not sum up to 1."""

    def __init__(self, weights: Sequence[Fraction]) -> None:
        scale = math.lcm(*(weight.denominator for weight in weights))
        self._tree = _huffman([int(weight * scale) for weight in weights])

    def locate(self, number: int) -> tuple[int, int]:
        """Return the part of a run's sample, and which of that part's it is."""
        group = self._tree
        while isinstance(group, _Fork):
            before = _of_left(number, group)
            if _of_left(number + 1, group) > before:
                group, number = group.left, before
            else:
                group, number = group.right, number - before
        return group, number

    def counts(self, number: int) -> dict[int, int]:
        """Return by part how many of a run's first `number` samples are its own."""
        found: dict[int, int] = {}
        groups: list[tuple[_Fork | int, int]] = [(self._tree, number)]
        while groups:
            group, count = groups.pop()
            if isinstance(group, _Fork):
                left = _of_left(count, group)
                groups += [(group.left, left), (group.right, count - left)]
            else:
                found[group] = count
        return found


def _of_left(number: int, fork: _Fork) -> int:
    """Return how many of the first samples are of the left group: its share, rounded, a half upwards."""
    return (2 * number * fork.left_weight + fork.weight) // (2 * fork.weight)


def _huffman(weights: Sequence[int]) -> _Fork | int:
    """Join the two lightest groups until one is left; of equal ones those that were there first."""
    # A group that is no part weighs at most twice its sibling (either of its own two was no heavier), so at most 2/3 of
    # both: of an error above it at most 2/3 comes down, and 1/2 + 2/3 * (1/2 + 2/3 * ...) is 3/2.
    heap: list[tuple[int, int, _Fork | int]] = [(weight, index, index) for index, weight in enumerate(weights)]
    heapq.heapify(heap)
    for order in range(len(weights), 2 * len(weights) - 1):
        (right_weight, _, right), (left_weight, _, left) = heapq.heappop(heap), heapq.heappop(heap)
        fork = _Fork(left, right, left_weight, left_weight + right_weight)
        heapq.heappush(heap, (fork.weight, order, fork))
    return heap[0][2]


def exact_weight(weight: float) -> Fraction:
    """Return a weight as its author wrote it: 0.7 is 7/10."""
    return Fraction(repr(weight))


def weights_by_size(sizes: Sequence[int], temperature: float) -> list[Fraction]:
    """Return size ** (1 / temperature) for each part, as XLM and mT5 blend languages: 1 is by size, inf all equal."""
    if temperature == 1:
        return [Fraction(size) for size in sizes]
    # Decimals are the same on every machine; the last bit of a float's power is not, nor is then the order.
    context = Context(prec=28)
    power = context.divide(Decimal(1), Decimal(repr(temperature)))
    return [Fraction(context.power(Decimal(size), power)) for size in sizes]
