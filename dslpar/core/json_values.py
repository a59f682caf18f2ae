"""Values of somebody else's JSON, each read as the type, and within the bounds, that the program relies on. No torch.

    size = count(layout["world_size"], "layout.world_size", most=MAX_RANKS)    # else InvalidValueError, which names it

A digest shows that a file is as it was written, and not who wrote it: a manifest may be well-signed and say that a
tensor has 10**24 elements. (pydantic and msgspec check the same against classes; six functions need no dependency.)
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Collection
from typing import Any

MAX_DEPTH = 32
"""Of nested values. Python's parser gives up at some hundreds, as far as its stack reaches."""
MAX_COUNT = 2**63 - 1
"""Sizes and numbers of bytes fit into what torch and the system have for them."""


class InvalidValueError(ValueError):
    """A value is not what it must be; the text names it, and says what it should be."""

    def __init__(self, at: str, value: object, expected: str) -> None:
        super().__init__(f"{at} is {reprlib.repr(value)}, not {expected}")


def parse(data: bytes) -> object:
    """Parse JSON. Raises: ValueError: it is none."""
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError("values nested too deeply") from None
    except ValueError:
        raise ValueError("no JSON") from None


def mapping(value: object, at: str, *keys: str) -> dict[str, Any]:
    """Return a mapping that has these keys."""
    if not isinstance(value, dict):
        raise InvalidValueError(at, value, "a mapping")
    if missing := [key for key in keys if key not in value]:
        raise ValueError(f"{at} has no {missing[0]!r}")
    return value


def items(value: object, at: str, length: int | None = None) -> list[Any]:
    """Return a list, of that length if one is given."""
    if not isinstance(value, list) or length not in (None, len(value)):
        raise InvalidValueError(at, value, "a list" if length is None else f"a list of {length}")
    return value


def count(value: object, at: str, least: int = 0, most: int = MAX_COUNT) -> int:
    """Return a whole number in that range."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise InvalidValueError(at, value, f"a whole number from {least} to {most}")
    return value


def number(value: object, at: str) -> int | float | bool:
    """Return a number that a tensor can hold."""
    if not isinstance(value, int | float) or (isinstance(value, int) and abs(value) > MAX_COUNT):
        raise InvalidValueError(at, value, "a number")
    return value


def text(value: object, at: str, among: Collection[str] = ()) -> str:
    """Return a string, one of a choice if there is one."""
    if not isinstance(value, str) or (among and value not in among):
        raise InvalidValueError(at, value, f"one of {', '.join(map(repr, among))}" if among else "a string")
    return value


def plain(value: object, at: str, depth: int = 0) -> object:
    """Return any JSON value that is not nested too deeply."""
    if depth > MAX_DEPTH:
        raise ValueError(f"{at} is nested more than {MAX_DEPTH} deep")
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        plain(item, at, depth + 1)
    return value
