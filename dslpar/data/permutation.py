"""Permutation of any number of samples, computed index by index and never stored.

    permuted(5, 10**12, ("epoch", seed, 0))

It is a Feistel network over two digits, position = left * size + right. Each round adds a hash of one digit to the
other digit. Subtracting the hash undoes it, so it is a permutation for any hash (Black and Rogaway, "Ciphers with
arbitrary finite domains", 2002). If the result is beyond the last sample, the network is applied again.
"""

from __future__ import annotations

from functools import lru_cache
from math import isqrt

from dslpar.layers.parameter import stable_hash

_ROUNDS = 8
_MASK = 2**64 - 1


def permuted(position: int, size: int, key: tuple[object, ...]) -> int:
    """Return the number at `position` of the permutation of `size` numbers that `key` selects."""
    keys = _round_keys(key)
    right_size = isqrt(max(size - 1, 0)) + 1
    left_size = -(-size // right_size)
    while True:
        left, right = divmod(position, right_size)
        for first, second in keys:
            left = (left + _mix(right ^ first)) % left_size
            right = (right + _mix(left ^ second)) % right_size
        position = left * right_size + right
        if position < size:
            return position


@lru_cache(maxsize=64)
def _round_keys(key: tuple[object, ...]) -> tuple[tuple[int, int], ...]:
    numbers = [stable_hash(*key, index) & _MASK for index in range(_ROUNDS)]
    return tuple(zip(numbers[::2], numbers[1::2], strict=True))


def _mix(number: int) -> int:
    """Return splitmix64's 64-bit hash of a number."""
    number = (number ^ (number >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    number = (number ^ (number >> 27)) * 0x94D049BB133111EB & _MASK
    return number ^ (number >> 31)
