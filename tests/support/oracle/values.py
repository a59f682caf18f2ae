"""Legal values of each type of `dslpar.schema.types`, and values that no key should accept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

CPU = "cpu"
LEGAL: Mapping[str, Sequence[Any]] = {
    "PositiveInt": (1, 2, 3, 8),
    "LayerIndex": (0,),
    "LayerCount": (1, 2, 4),
    "NonNegativeInt": (0, 1, 7),
    "WholeNumber": (0, 1, 3, 1000, 5e8, 2**31),
    "PositiveWholeNumber": (1, 3, 1000, 5e8),
    "ScalePower": (0, 8, 16),
    "ModuleDepth": (-1, 0, 2),
    "LogLevel": ("info", "warning", "error"),
    "AtLeastOne": (1, 1.5, 10.0),
    "PositiveFloat": (1e-6, 0.1, 1, 10.0),
    "NonNegativeFloat": (0, 0.0, 0.01, 1, 2.5),
    "Fraction": (0, 0.0, 0.1, 0.9, 0.99),
    "bool": (True, False),
    "str": ("a", "somewhere/below"),
    "StrList": (("a.txt",), ["a.txt", "b"]),
    "Betas": ((0.9, 0.95), [0, 0.5], (0.0, 0.0)),
    "Dict": ({},),
    "OffloadDevice": (CPU, CPU, "none"),
    "Probability": (0, 0.0, 0.5, 1, 1.0),
    "PositiveProbability": (0.1, 1, 1.0),
    "NonPositiveFloat": (-0.8, 0, -1),
    "PositivePair": ((1e-6, 50), [0.1, 1]),
    "Etas": ((0.5, 1.2), [0.1, 3]),
    "AdafactorEps": ((None, 1e-3), [1e-6, 1e-3]),
    "Milestones": ([1, 2], (3,), []),
    "WarmupType": ("log", "linear"),
    "CycleMode": ("triangular", "triangular2", "exp_range"),
    "ScaleMode": ("cycle", "iterations"),
    "AnnealStrategy": ("cos", "linear"),
    "DType": ("fp32", "bf16", "fp16"),
    "ZeroStage": (0, 1, 2, 3),
    "ExitStatus": (1, 75, 125),
    "ResumeFrom": ("newest", "newest_whole", "step_000005"),
}
"""Type -> legal values, including its bounds."""

WRONG: Sequence[Any] = (
    "2", "auto", "", "yes", "cpu", "nvme", "fp8", "fp64", -1, 0, 1, 2.5, 10**400, 2**31, 1e308, True, False,
    [], [1], [0, 1], (1, 2, 3), {}, {"a": 1}, {"enabled": True}, ["a"], -0.5,
)  # fmt: skip
"""Values in the wrong place; some of them fit some keys."""


def legal(rng: Random, type_: str | Sequence[str]) -> Any:
    """Return a legal value of a type, or one of a key's choices."""
    return rng.choice(LEGAL[type_] if isinstance(type_, str) else type_)


def some(
    rng: Random, types: Mapping[str, str | Sequence[str]], most: int, without: Sequence[str] = ()
) -> dict[str, Any]:
    """Return up to `most` of the keys, each with a value of its type."""
    names = [name for name in types if name not in without]
    chosen = rng.sample(names, min(len(names), rng.randint(0, most)))
    return {name: legal(rng, types[name]) for name in chosen}
