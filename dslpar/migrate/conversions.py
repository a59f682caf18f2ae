"""Conversions of values shared by several sources; `dslpar.migrate.table` explains how rows name them."""

from __future__ import annotations

import ast
import functools
import math
from collections.abc import Callable

from dslpar.migrate.table import Conversion, Outcome, Row, View, changed, dropped, needed


def only(value: object, view: View, row: Row) -> Outcome:
    """Drop the value that dslpar's behaviour matches; any other value needs the author.

    The row's argument is "VALUE else TEXT", in which TEXT is the message to the author.
    """
    right, _, otherwise = row.argument.partition(" else ")
    return dropped(row.why) if value == ast.literal_eval(right) else needed(otherwise, row.to)


def on(value: object, view: View, row: Row) -> Outcome:
    """Turn True into VALUE and drop False; the row's argument is "VALUE: WHY"."""
    to, _, why = row.argument.partition(": ")
    if value is True:
        return changed(row.to, ast.literal_eval(to), why)
    return dropped("off") if value is False else needed(f"it is {value!r}, neither True nor False: choose one", row.to)


def number(convert: Callable[[float, View, Row], object]) -> Conversion:
    """Decorate a conversion of numbers; any other value needs the author."""

    @functools.wraps(convert)
    def checked(value: object, view: View, row: Row) -> object:
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            return convert(value, view, row)
        return needed(f"it is {value!r}, not a number: choose one", row.to)

    return checked


@number
def exponent(value: float, view: View, row: Row) -> object:
    """Take log2 of a loss scale."""
    power = int(value).bit_length() - 1
    if value < 1 or 2**power != value:
        return needed(f"DeepSpeed starts from a power of two, which {value!r} is not: choose one", row.to)
    return power


def clip(value: object, view: View, row: Row) -> Outcome:
    """Keep a bound of the gradient norm, and drop 0, which means no bound."""
    return dropped("0 turns clipping off, as does leaving the key out") if value == 0 else row.as_is(value)


def one_dropout(value: object, all_of_them: list[object], row: Row) -> Outcome:
    """Merge several dropout probabilities into dslpar's single one, if they are equal."""
    if any(item != value for item in all_of_them):
        different = f"dslpar has one dropout probability, but the source sets different ones, {all_of_them}"
        return needed(f"{different}: choose one", row.to)
    return changed(row.to, value, "one probability for embedding, attention and outputs")


def chunks(value: object, has_pipeline: bool, row: Row) -> Outcome:
    """Convert the number of stages per rank of a pipeline; more than one implies the interleaved schedule."""
    if type(value) is not int or value < 1:
        return needed(f"it is {value!r}, not a number of stages: choose one", row.to)
    if not has_pipeline:
        return dropped("without a pipeline it has no effect")
    if value == 1:
        return dropped("1 stage per rank, as in '1f1b'")
    return changed(row.to, value, "the number of stages per rank", {"schedule.type": "interleaved"})
