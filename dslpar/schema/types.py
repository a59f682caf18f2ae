"""The types of keys, by name. For mypy a type is a Python type; for the reader, a check and a description.

The annotations in `dslpar.schema.sections` and the tables of torch's and DeepSpeed's arguments use these names. `True`
is not a whole number. A float such as `5e8` is a whole number only for `WholeNumber` and `PositiveWholeNumber`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from dslpar.core.mesh import ORDERS

PositiveInt: TypeAlias = int
NonNegativeInt: TypeAlias = int
LayerCount: TypeAlias = int
ExitStatus: TypeAlias = int
ZeroStage: TypeAlias = int
PositiveFloat: TypeAlias = float
NonNegativeFloat: TypeAlias = float
Fraction: TypeAlias = float
PositiveFraction: TypeAlias = float
Choice: TypeAlias = str
Path: TypeAlias = str
TensorMode: TypeAlias = str
DType: TypeAlias = str
ResumeFrom: TypeAlias = str
CompileBackend: TypeAlias = str
CompileComponents: TypeAlias = tuple[str, ...]
CommOverlap: TypeAlias = bool | str
OnDifference: TypeAlias = str
IntList: TypeAlias = tuple[int, ...]
CountList: TypeAlias = tuple[int, ...]
StrList: TypeAlias = tuple[str, ...]
ModuleNames: TypeAlias = str | tuple[str, ...]
MeshShape: TypeAlias = tuple[int, int, int]
AxisOrder: TypeAlias = tuple[str, str, str]
Betas: TypeAlias = tuple[float, float]
ChannelMeans: TypeAlias = float | tuple[float, ...]
ChannelDeviations: TypeAlias = float | tuple[float, ...]
Dict: TypeAlias = Mapping[str, Any]
Dataset: TypeAlias = Any


class ValueType(NamedTuple):
    """The valid values of a key: Python types, a further condition, and a description of both."""

    python_types: tuple[type, ...]
    holds: Callable[[Any], bool]
    """The further condition on a value of these types."""
    description: str
    """The valid values, as messages name them: "a number above 0"."""
    choices: tuple[str, ...] = ()
    """All strings that are valid."""
    refused: Mapping[str, str] = {}
    """Choices of other frameworks that dslpar does not have -> the reason."""
    code: str = "CFG108"
    """The rule that reports an unknown choice."""
    noun: str = ""
    """The word for an unknown choice in its message; empty: the key."""


def one_of(choices: tuple[str, ...], refused: Mapping[str, str] | None = None) -> ValueType:
    """Return the type of a key with choices."""
    description = "one of " + ", ".join(map(repr, choices)) if len(choices) > 1 else repr(choices[0])
    return ValueType((str,), lambda value: value in choices, description, choices, refused or {})


def _whole(low: int, high: int, description: str) -> ValueType:
    return ValueType((int,), lambda value: low <= value < high, description)


def _number(holds: Callable[[float], bool], description: str) -> ValueType:
    return ValueType(_NUMBER, holds, description)


def _list(holds: Callable[[Any], bool], description: str) -> ValueType:
    return ValueType(SEQUENCE, holds, description)


def _per_channel(holds: Callable[[float], bool], description: str) -> ValueType:
    def all_hold(value: Any) -> bool:
        items = value if isinstance(value, SEQUENCE) else [value]
        return bool(items) and all(type(item) in _NUMBER and holds(item) for item in items)

    return ValueType((*_NUMBER, *SEQUENCE), all_hold, description)


def _ints(items: Sequence[object], low: int) -> bool:
    return all(type(item) is int and item >= low for item in items)


def _names(items: Sequence[object]) -> bool:
    return bool(items) and all(type(item) is str and item for item in items)


def _two_positive(items: Any) -> bool:
    return len(items) == 2 and all(type(item) in _NUMBER and 0 < item < _FINITE for item in items)


def _is_resume_from(value: str) -> bool:
    step = value.startswith("step_") and value.removeprefix("step_").isdecimal()
    return step or value in ("newest", "newest_whole", "best") or "/" in value


SEQUENCE = (list, tuple)
COMPILE_COMPONENTS = ("layers", "loss")
SYMMETRIC_MEMORY = "symmetric_memory"
TENSOR_MODES = ("1d", "2d", "2.5d", "3d", "sequence", "cuboid")
_NUMBER = (int, float)
_FINITE = 1e300
TYPES: Mapping[str, ValueType] = {
    "bool": ValueType((bool,), lambda value: True, "True or False"),
    "str": ValueType((str,), lambda value: value != "", "a string"),
    "TensorMode": one_of(TENSOR_MODES)._replace(code="TEN102", noun="mode"),
    "CommOverlap": ValueType(
        (bool, str),
        lambda value: type(value) is bool or value == SYMMETRIC_MEMORY,
        f"True, False or {SYMMETRIC_MEMORY!r}",
        (SYMMETRIC_MEMORY,),
    ),
    "Dict": ValueType((dict,), lambda items: all(type(name) is str for name in items), "a dict"),
    "Dataset": ValueType((dict,), lambda items: True, "a dict with a type"),
    "PositiveInt": _whole(1, 2**31, "a whole number, at least 1 (and below 2**31)"),
    "NonNegativeInt": _whole(0, 2**63, "a whole number, at least 0 (and below 2**63)"),
    "LayerCount": _whole(1, 10_001, "a whole number, at least 1 and at most 10,000"),
    "LayerIndex": _whole(-1, 10_000, "a whole number from 0, or -1 for the last"),
    "ExitStatus": _whole(1, 126, "an exit status, from 1 to 125"),
    "ZeroStage": _whole(0, 4, "a ZeRO stage: 0, 1, 2 or 3"),
    "ScalePower": _whole(0, 63, "a whole number from 0 to 62"),
    "ModuleDepth": _whole(-1, 2**31, "a whole number from 0, or -1 for all"),
    "WholeNumber": _number(lambda value: 0 <= value < 2**63 and value == int(value), "a whole number, such as 5e8"),
    "PositiveWholeNumber": _number(
        lambda value: 1 <= value < 2**63 and value == int(value), "a whole number, at least 1, such as 5e8"
    ),
    "AtLeastOne": _number(lambda value: 1 <= value < _FINITE, "a number, at least 1"),
    "PositiveFloat": _number(lambda value: 0 < value < _FINITE, "a number above 0"),
    "NonNegativeFloat": _number(lambda value: 0 <= value < _FINITE, "a number, at least 0"),
    "NonPositiveFloat": _number(lambda value: -_FINITE < value <= 0, "a number, at most 0"),
    "Path": ValueType((str,), lambda value: value != "", "a path"),
    "Fraction": _number(lambda value: 0 <= value < 1, "a number, at least 0 and below 1"),
    "PositiveFraction": _number(lambda value: 0 < value < 1, "a number above 0 and below 1"),
    "Probability": _number(lambda value: 0 <= value <= 1, "a number from 0 to 1"),
    "PositiveProbability": _number(lambda value: 0 < value <= 1, "a number above 0, at most 1"),
    "IntList": _list(lambda items: all(type(item) is int for item in items), "a list of whole numbers"),
    "CountList": _list(lambda items: _ints(items, 0), "a list of whole numbers, each at least 0"),
    "MeshShape": _list(lambda items: len(items) == 3 and _ints(items, 1), "three whole numbers (x, y, z)"),
    "StrList": _list(lambda items: all(type(item) is str for item in items), "a list of strings"),
    "ModuleNames": ValueType(
        (str, list, tuple),
        lambda names: names == "all-linear" or (type(names) is not str and (not names or _names(names))),
        "a list of names, such as ['q_proj', 'v_proj'], or 'all-linear'",
    ),
    "Milestones": _list(
        lambda items: _ints(items, 1) and list(items) == sorted(items), "a list of rising step numbers"
    ),
    "Betas": _list(
        lambda items: len(items) == 2 and all(type(item) in _NUMBER and 0 <= item < 1 for item in items),
        "two numbers, each at least 0 and below 1",
    ),
    "ChannelMeans": _per_channel(lambda value: -_FINITE < value < _FINITE, "a number, or one for each channel"),
    "ChannelDeviations": _per_channel(lambda value: 0 < value < _FINITE, "a number above 0, or one for each channel"),
    "PositivePair": _list(_two_positive, "two numbers above 0"),
    "Etas": _list(lambda items: _two_positive(items) and items[0] < 1 < items[1], "two numbers, below and above 1"),
    "AdafactorEps": _list(
        lambda items: len(items) == 2 and _two_positive(items if items[0] is not None else (1, items[1])),
        "two numbers above 0, or None for the first",
    ),
    "AxisOrder": _list(
        lambda items: tuple(items) in ORDERS, "('pipe', 'data', 'tensor') or ('data', 'pipe', 'tensor')"
    ),
    "DType": one_of(("fp32", "bf16", "fp16")),
    "CompileBackend": one_of(("inductor", "aot_eager")),
    "OnDifference": one_of(("stop", "report")),
    "CompileComponents": _list(
        lambda items: bool(items) and all(item in COMPILE_COMPONENTS for item in items),
        "a list of 'layers', 'loss', or both",
    ),
    "LogLevel": one_of(("debug", "info", "warning", "error", "critical")),
    "OffloadDevice": one_of(("cpu", "none"), {"nvme": "offload to NVMe is not part of this version of dslpar"}),
    "WarmupType": one_of(("log", "linear")),
    "CycleMode": one_of(("triangular", "triangular2", "exp_range")),
    "ScaleMode": one_of(("cycle", "iterations")),
    "AnnealStrategy": one_of(("cos", "linear")),
    "ResumeFrom": ValueType(
        (str,),
        _is_resume_from,
        "'newest', 'newest_whole', 'best', the name of a checkpoint, such as 'step_000005', or a path with a '/' in it",
    ),
}
