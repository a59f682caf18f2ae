"""Order of a blend: the weights and a sample's position in the run alone determine its part.

    order = BlendOrder([Fraction(7, 10), Fraction(2, 10), Fraction(1, 10)])
    order.locate(12)           # (0, 8): sample 12 of the run is the part's sample 8, both from 0

With two parts, the number of each part's samples in any prefix is its share, rounded (the method of Webster and
Sainte-Lague). More parts form two groups at each node of a Huffman tree of the weights. So in any prefix, each part's
number of samples differs from its share by less than two; with two parts, by at most a half. (Webster's method over all
parts at once takes parts of equal weight in a row: with weights 0.5 and 100 times 0.005 it is 25 samples off.) The
interleaving of torch and Hugging Face draws parts at random, and Megatron-LM's blend fills an array as long as the run.
Here a position is computed from its number, in as many steps as the tree is deep, so a run can resume at any sample.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from decimal import Context, Decimal
from fractions import Fraction
from typing import NamedTuple


class _Fork(NamedTuple):
    """Inner node of the tree: two groups of parts. A group is a fork or the number of a part."""

    left: _Fork | int
    right: _Fork | int
    left_weight: int
    weight: int


class BlendOrder:
    """Order of a blend of parts with these weights. Each must be above 0, and they need not sum to 1."""

    def __init__(self, weights: Sequence[Fraction]) -> None:
        scale = math.lcm(*(weight.denominator for weight in weights))
        self._tree = _huffman([int(weight * scale) for weight in weights])

    def locate(self, number: int) -> tuple[int, int]:
        """Return (the part of the run's sample `number`, the sample's number within the part)."""
        group = self._tree
        while isinstance(group, _Fork):
            before = _of_left(number, group)
            if _of_left(number + 1, group) > before:
                group, number = group.left, before
            else:
                group, number = group.right, number - before
        return group, number

    def counts(self, number: int) -> dict[int, int]:
        """Return {part: number of its samples among the run's first `number` samples}."""
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
    """Return how many of the first `number` samples are in the left group: its share, rounded half up."""
    return (2 * number * fork.left_weight + fork.weight) // (2 * fork.weight)


def _huffman(weights: Sequence[int]) -> _Fork | int:
    """Join the two lightest groups until one is left; among equal weights the oldest come first."""
    # The error bound: a fork weighs at most twice its sibling, since neither of its halves was heavier than the
    # sibling. So it has at most 2/3 of its parent's weight, and inherits at most 2/3 of its parent's error. Each level
    # adds a rounding of 1/2: 1/2 + 2/3 * (1/2 + 2/3 * ...) is 3/2.
    heap: list[tuple[int, int, _Fork | int]] = [(weight, index, index) for index, weight in enumerate(weights)]
    heapq.heapify(heap)
    for order in range(len(weights), 2 * len(weights) - 1):
        (right_weight, _, right), (left_weight, _, left) = heapq.heappop(heap), heapq.heappop(heap)
        fork = _Fork(left, right, left_weight, left_weight + right_weight)
        heapq.heappush(heap, (fork.weight, order, fork))
    return heap[0][2]


def exact_weight(weight: float) -> Fraction:
    """Return a weight as the exact fraction of its decimal notation: 0.7 is 7/10."""
    return Fraction(repr(weight))


def weights_by_size(sizes: Sequence[int], temperature: float) -> list[Fraction]:
    """Return size ** (1 / temperature) per part, as XLM and mT5 blend languages; 1: by size, inf: all equal."""
    if temperature == 1:
        return [Fraction(size) for size in sizes]
    # Decimal powers are equal on every machine. The last bit of a float power is not, and would change the order.
    context = Context(prec=28)
    power = context.divide(Decimal(1), Decimal(repr(temperature)))
    return [Fraction(context.power(Decimal(size), power)) for size in sizes]
