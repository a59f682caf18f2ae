"""Bounds of the config language: steps, sizes and depth, so that no file can hang the evaluator or fill memory.

Every operation pays from a budget of steps, as in Starlark and Lua. An operation also pays for the *size* of what it
reads and makes, so that the budget also bounds `'x' * 10**10`.

The weight of a value is its size with every shared part written out, since comparing, hashing, printing and exporting
the value cost that much. A "billion laughs" of shared lists is small in memory and has a huge weight.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

from dslpar.language.errors import BudgetError, ConfigError

Item = TypeVar("Item")

MAX_SOURCE_BYTES = 256 * 1024
MAX_TOKENS = 40_000
"""Tokens in one source; each takes up to a kilobyte after parsing."""
MAX_TOTAL_BYTES = 1024 * 1024
"""Size of all files of one config together."""
MAX_IMPORTS = 200
MAX_IMPORT_DEPTH = 20
MAX_NESTING = 150
"""Nested levels of syntax."""
MAX_STEPS = 200_000
MAX_ITEMS = 50_000
MAX_TEXT = 100_000
MAX_BITS = 4_096
MAX_KEY_BITS = 60
MAX_DEPTH = 50
"""Nested levels of containers."""
MAX_WEIGHT = 200_000
"""Weight of one value."""
MAX_NODES = 50_000
"""Values in the finished tree."""
MAX_FINDINGS = 100
MAX_SUGGESTED = 100
"""Number of the author's names that a misspelt one is compared with; each comparison takes as long as a step."""


def limit_error(message: str, hint: str = "") -> ConfigError:
    """Make the error of an exceeded bound."""
    return ConfigError("CFG005", message, hint)


class Budget:
    """The remaining steps of one evaluation, which all its files share."""

    __slots__ = ("left",)

    def __init__(self, steps: int = MAX_STEPS) -> None:
        self.left = steps

    def spend(self, steps: int) -> None:
        """Pay for work that is about to be done."""
        self.left -= steps
        if self.left < 0:
            raise BudgetError(f"the config needs more than {MAX_STEPS:,} steps to evaluate")

    def metered(self, iterable: Iterable[Item]) -> Iterator[Item]:
        """Yield the items, paying for each as it is taken, so that C code can consume `range(10**12)` safely."""
        for count, item in enumerate(iterable):
            self.spend(1)
            if count >= MAX_ITEMS:
                raise limit_error(f"more than {MAX_ITEMS:,} items")
            yield item

    def weigh(self, *values: object) -> None:
        """Pay for reading all values, counting shared parts each time; refuse values that are too big or too deep."""
        # The divisors make all steps take about equally long: in the time of one step, C code reads eight items or a
        # few lines of text.
        for value in values:
            if isinstance(value, CONTAINERS):
                self.spend(_weight(value, {}, 0) // 8)
            elif isinstance(value, str):
                self.spend(len(value) // 256)

    def weigh_keys(self, *keys: object) -> None:
        """Pay for hashing, and refuse ints big enough to collide on purpose (CPython hashes ints modulo 2**61 - 1)."""
        for key in keys:
            self.weigh(key)
            if isinstance(key, tuple):
                self.weigh_keys(*key)
            elif isinstance(key, int) and key.bit_length() > MAX_KEY_BITS:
                raise limit_error(f"an int of more than {MAX_KEY_BITS} bits as a key")

    def take_all(self, iterable: Iterable[Item]) -> list[Item]:
        """List all items of an iterable and pay for them; their order must be the same in every process."""
        return list(self.metered(in_fixed_order(iterable)))

    def dict_of(self, pairs: Iterable[tuple[Item, Item]]) -> dict[Item, Item]:
        """Make `dict(pairs)`, and pay for it."""
        made = dict(self.take_all(pairs))
        self.weigh_keys(*made)
        return made


CONTAINERS = (list, tuple, dict, set)


def _weight(value: object, known: dict[int, int], depth: int) -> int:
    if isinstance(value, str):
        return 1 + len(value) // 16
    if not isinstance(value, CONTAINERS):
        return 1 + value.bit_length() // 64 if isinstance(value, int) else 1
    # A shared part is walked once but counted each time: this takes time linear in the memory, not in the weight.
    if id(value) in known:
        return known[id(value)]
    if depth >= MAX_DEPTH:
        raise limit_error(f"a container that contains itself, or is nested more than {MAX_DEPTH} levels deep")
    weight = 1 + sum(_weight(item, known, depth + 1) for item in value)
    if isinstance(value, dict):
        weight += sum(_weight(item, known, depth + 1) for item in value.values())
    if weight > MAX_WEIGHT:
        raise limit_error("a value too big to read through", "choose less to share: written out in full, it is too big")
    known[id(value)] = weight
    return weight


def check_size(value: Item) -> Item:
    """Return the value. Raises ConfigError if it exceeds the bounds of its type."""
    if isinstance(value, str):
        if len(value) > MAX_TEXT:
            raise limit_error(f"a string of {len(value):,} characters; at most {MAX_TEXT:,}")
        if not value.isascii():
            check_text(value)
    elif isinstance(value, int):
        check_bits(value.bit_length())
    elif isinstance(value, CONTAINERS):
        check_items(len(value))
    return value


def check_text(value: str) -> None:
    """Refuse lone surrogates, which can be neither printed nor saved."""
    try:
        value.encode()
    except UnicodeEncodeError as error:
        message = f"a string that is not text: {error.reason}"
        raise ConfigError("CFG004", message, "write the value itself: the character") from None


def check_bits(bits: int) -> None:
    if bits > MAX_BITS:
        raise limit_error(f"an int of more than {MAX_BITS:,} bits")


def check_items(count: int) -> None:
    if count > MAX_ITEMS:
        raise limit_error(f"a container of {count:,} items; at most {MAX_ITEMS:,}")


def check_length(count: int) -> None:
    if count > MAX_TEXT:
        raise limit_error(f"a string of {count:,} characters; at most {MAX_TEXT:,}")


def in_fixed_order(value: Item) -> Item:
    """Return the value. Raises ConfigError for a set whose order differs per process: all ranks need the same order."""
    if isinstance(value, set) and not all(isinstance(item, (int, float)) for item in value):
        hint = "write `sorted(...)` around it"
        raise ConfigError("CFG004", "the order of this set differs from process to process", hint)
    return value
