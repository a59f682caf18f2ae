"""Validation of values from untrusted JSON: each function checks the type and bounds of one value. No torch import.

    size = count(layout["world_size"], "layout.world_size", most=MAX_RANKS)    # else InvalidValueError, which names it

A digest proves that a file is unchanged, but not who wrote it: a manifest with a valid digest may claim that a tensor
has 10**24 elements. (pydantic and msgspec check the same against classes; six functions need no dependency.)
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Collection
from typing import Any

MAX_DEPTH = 32
"""Maximum nesting of values. Python's parser fails at some hundreds of levels, depending on its stack."""
MAX_COUNT = 2**63 - 1
"""The largest count: sizes and numbers of bytes must fit in the 64-bit integers of torch and the system."""


class InvalidValueError(ValueError):
    """A value is invalid; the message names it and what was expected."""

    def __init__(self, at: str, value: object, expected: str) -> None:
        super().__init__(f"{at} is {reprlib.repr(value)}, not {expected}")


def parse(data: bytes) -> object:
    """Parse JSON. Raises ValueError if the data is not JSON, or is nested too deeply."""
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError("values nested too deeply") from None
    except ValueError:
        raise ValueError("not valid JSON") from None


def mapping(value: object, at: str, *keys: str) -> dict[str, Any]:
    """Return `value` if it is a mapping with these keys."""
    if not isinstance(value, dict):
        raise InvalidValueError(at, value, "a mapping")
    if missing := [key for key in keys if key not in value]:
        raise ValueError(f"{at} has no {missing[0]!r}")
    return value


def items(value: object, at: str, length: int | None = None) -> list[Any]:
    """Return `value` if it is a list, of this length if one is given."""
    if not isinstance(value, list) or length not in (None, len(value)):
        raise InvalidValueError(at, value, "a list" if length is None else f"a list of {length}")
    return value


def count(value: object, at: str, least: int = 0, most: int = MAX_COUNT) -> int:
    """Return `value` if it is a whole number from `least` to `most`."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise InvalidValueError(at, value, f"a whole number from {least} to {most}")
    return value


def number(value: object, at: str) -> int | float | bool:
    """Return `value` if it is a number that a tensor can hold."""
    if not isinstance(value, int | float) or (isinstance(value, int) and abs(value) > MAX_COUNT):
        raise InvalidValueError(at, value, "a number")
    return value


def text(value: object, at: str, among: Collection[str] = ()) -> str:
    """Return `value` if it is a string, and one of `among` if that is not empty."""
    if not isinstance(value, str) or (among and value not in among):
        raise InvalidValueError(at, value, f"one of {', '.join(map(repr, among))}" if among else "a string")
    return value


def plain(value: object, at: str, depth: int = 0) -> object:
    """Return `value` if it is not nested too deeply; any JSON value is allowed."""
    if depth > MAX_DEPTH:
        raise ValueError(f"{at} is nested more than {MAX_DEPTH} deep")
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        plain(item, at, depth + 1)
    return value
