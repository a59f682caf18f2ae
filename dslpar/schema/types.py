"""Kinds of values that a field may have: the Python types, what else must hold, and words for it.

The annotations of `dslpar.schema.sections` name these kinds; `True` is no whole number, and a float is none either.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from dslpar.core.mesh import ORDERS
from dslpar.schema.sections import OTHER_PIPELINE_SCHEDULES, PIPELINE_SCHEDULES, SCHEDULES


class Kind(NamedTuple):
    """A kind of value: its Python types, what else must hold, and words for it."""

    types: tuple[type, ...]
    holds: Callable[[Any], bool]
    words: str
    names: tuple[str, ...] = ()
    """The choices, of a kind that has some."""
    refused: Mapping[str, str] = {}
    """Choices that others have and dslpar has not, and why."""


def _of_ints(low: int) -> Callable[[Any], bool]:
    return lambda items: all(type(item) is int and item >= low for item in items)


def _choice(*names: str, **refused: str) -> Kind:
    words = "one of " + ", ".join(map(repr, names)) if len(names) > 1 else repr(names[0])
    return Kind((str,), lambda value: value in names, words, names, refused)


def _finite(low: float, high: float = 1e300, *, open_low: bool = False) -> Callable[[Any], bool]:
    return lambda value: (low < value if open_low else low <= value) and value < high


def _of_numbers(length: int) -> Callable[[Any], bool]:
    return lambda items: len(items) == length and all(type(item) in _NUMBER and 0 < item < 1e300 for item in items)


def _names_a_step(value: str) -> bool:
    return value.startswith("step_") and value.removeprefix("step_").isdecimal()


SEQUENCE = (list, tuple)
_NUMBER = (int, float)
KINDS: Mapping[str, Kind] = {
    "Count": Kind((int,), lambda value: 1 <= value < 2**31, "a whole number, at least 1 (and below 2**31)"),
    "Status": Kind((int,), lambda value: 1 <= value <= 125, "an exit status, from 1 to 125"),
    "LayerIndex": Kind((int,), lambda value: -1 <= value < 10_000, "a whole number from 0, or -1 for the last"),
    "Layers": Kind((int,), lambda value: 1 <= value <= 10_000, "a whole number, at least 1 and at most 10,000"),
    "Index": Kind((int,), lambda value: 0 <= value < 2**63, "a whole number, at least 0 (and below 2**63)"),
    "Size": Kind(_NUMBER, lambda value: 0 <= value < 2**63 and value == int(value), "a whole number, such as 5e8"),
    "FromOne": Kind(_NUMBER, _finite(1), "a number, at least 1"),
    "Positive": Kind(_NUMBER, _finite(0, open_low=True), "a number above 0"),
    "Rate": Kind(_NUMBER, _finite(0), "a number, at least 0"),
    "Fraction": Kind(_NUMBER, _finite(0, 1), "a number, at least 0 and below 1"),
    "Flag": Kind((bool,), lambda value: True, "True or False"),
    "Text": Kind((str,), lambda value: value != "", "a text"),
    "Mode": Kind((str,), lambda value: True, "the name of a mode, such as '1d'"),
    "Ids": Kind(SEQUENCE, lambda items: all(type(item) is int for item in items), "a list of whole numbers"),
    "Counts": Kind(SEQUENCE, _of_ints(0), "a list of whole numbers, each at least 0"),
    "Shape": Kind(SEQUENCE, lambda items: len(items) == 3 and _of_ints(1)(items), "three whole numbers (x, y, z)"),
    "Texts": Kind(SEQUENCE, lambda items: all(type(item) is str for item in items), "a list of texts"),
    "Betas": Kind(
        SEQUENCE,
        lambda items: len(items) == 2 and all(type(item) in _NUMBER and 0 <= item < 1 for item in items),
        "two numbers, each at least 0 and below 1",
    ),
    "Order": Kind(
        SEQUENCE,
        lambda items: tuple(items) in ORDERS,
        "('pipe', 'data', 'tensor') or ('data', 'pipe', 'tensor')",
    ),
    "Table": Kind((dict,), lambda items: all(type(key) is str for key in items), "a dict"),
    "ResidualKind": _choice("replicated", "sequence", "hidden", "batch"),
    "InnerKind": _choice("batch", "heads"),
    "KeepKind": _choice("x", "w", "both", "none"),
    "ImplKind": _choice("ring", "ulysses"),
    "NormKind": _choice("layernorm", "rmsnorm"),
    "ActivationKind": _choice("gelu", "swiglu"),
    "PositionsKind": _choice("learned", "rotary"),
    "Schedule": _choice(*SCHEDULES),
    "PipelineScheduleKind": _choice(*PIPELINE_SCHEDULES, **OTHER_PIPELINE_SCHEDULES),
    "PositiveSize": Kind(
        _NUMBER, lambda value: 1 <= value < 2**63 and value == int(value), "a whole number, at least 1, such as 5e8"
    ),
    "ScalePower": Kind((int,), lambda value: 0 <= value <= 62, "a whole number from 0 to 62"),
    "Depth": Kind((int,), lambda value: -1 <= value < 2**31, "a whole number from 0, or -1 for all"),
    "LogLevel": _choice("debug", "info", "warning", "error", "critical"),
    "Device": _choice("cpu", "none", nvme="offload to NVMe is not part of this version of dslpar"),
    "Share": Kind(_NUMBER, lambda value: 0 <= value <= 1, "a number from 0 to 1"),
    "PositiveShare": Kind(_NUMBER, lambda value: 0 < value <= 1, "a number above 0, at most 1"),
    "NotPositive": Kind(_NUMBER, lambda value: -1e300 < value <= 0, "a number, at most 0"),
    "Pair": Kind(SEQUENCE, _of_numbers(2), "two numbers above 0"),
    "Etas": Kind(
        SEQUENCE, lambda items: _of_numbers(2)(items) and items[0] < 1 < items[1], "two numbers, below and above 1"
    ),
    "AdafactorEps": Kind(
        SEQUENCE,
        lambda items: len(items) == 2 and _of_numbers(2)(items if items[0] is not None else (1, items[1])),
        "two numbers above 0, or None for the first",
    ),
    "Milestones": Kind(
        SEQUENCE, lambda items: _of_ints(1)(items) and list(items) == sorted(items), "a list of rising step numbers"
    ),
    "WarmupType": _choice("log", "linear"),
    "CycleMode": _choice("triangular", "triangular2", "exp_range"),
    "CycleScale": _choice("cycle", "iterations"),
    "Anneal": _choice("cos", "linear"),
    "DType": _choice("fp32", "bf16", "fp16"),
    "ZeroStage": Kind((int,), lambda value: 0 <= value <= 3, "a ZeRO stage: 0, 1, 2 or 3"),
    "ResumeFrom": Kind(
        (str,),
        lambda value: value in ("newest", "newest_whole") or "/" in value or _names_a_step(value),
        "'newest', 'newest_whole', the name of a checkpoint, such as 'step_000005', or a path with a '/' in it",
    ),
}
