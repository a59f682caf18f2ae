"""Values of each kind of `dslpar.schema.types`: some that it holds, and some that no key should take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

CPU = "cpu"
LEGAL: Mapping[str, Sequence[Any]] = {
    "Count": (1, 2, 3, 8),
    "LayerIndex": (0,),
    "Layers": (1, 2, 4),
    "Index": (0, 1, 7),
    "Size": (0, 1, 3, 1000, 5e8, 2**31),
    "PositiveSize": (1, 3, 1000, 5e8),
    "ScalePower": (0, 8, 16),
    "Depth": (-1, 0, 2),
    "LogLevel": ("info", "warning", "error"),
    "FromOne": (1, 1.5, 10.0),
    "Positive": (1e-6, 0.1, 1, 10.0),
    "Rate": (0, 0.0, 0.01, 1, 2.5),
    "Fraction": (0, 0.0, 0.1, 0.9, 0.99),
    "Flag": (True, False),
    "Text": ("a", "somewhere/below"),
    "Texts": (("a.txt",), ["a.txt", "b"]),
    "Betas": ((0.9, 0.95), [0, 0.5], (0.0, 0.0)),
    "Table": ({},),
    "ResidualKind": ("replicated", "sequence", "hidden", "batch"),
    "InnerKind": ("batch", "heads"),
    "KeepKind": ("x", "w", "both", "none"),
    "ImplKind": ("ring", "ulysses"),
    "NormKind": ("layernorm", "rmsnorm"),
    "ActivationKind": ("gelu", "swiglu"),
    "PositionsKind": ("learned", "rotary"),
    "Schedule": ("constant", "linear", "cosine"),
    "PipelineScheduleKind": ("1f1b",),
    "Device": (CPU, CPU, "none"),
    "Share": (0, 0.0, 0.5, 1, 1.0),
    "PositiveShare": (0.1, 1, 1.0),
    "NotPositive": (-0.8, 0, -1),
    "Pair": ((1e-6, 50), [0.1, 1]),
    "Etas": ((0.5, 1.2), [0.1, 3]),
    "AdafactorEps": ((None, 1e-3), [1e-6, 1e-3]),
    "Milestones": ([1, 2], (3,), []),
    "WarmupType": ("log", "linear"),
    "CycleMode": ("triangular", "triangular2", "exp_range"),
    "CycleScale": ("cycle", "iterations"),
    "Anneal": ("cos", "linear"),
    "DType": ("fp32", "bf16", "fp16"),
    "ZeroStage": (0, 1, 2, 3),
    "Status": (1, 75, 125),
    "ResumeFrom": ("newest", "newest_whole", "step_000005"),
}
"""Kind -> values that it holds, at its bounds too."""

WRONG: Sequence[Any] = (
    "2", "auto", "", "yes", "cpu", "nvme", "fp8", "fp64", -1, 0, 1, 2.5, 10**400, 2**31, 1e308, True, False,
    [], [1], [0, 1], (1, 2, 3), {}, {"a": 1}, {"enabled": True}, ["a"], -0.5,
)  # fmt: skip
"""What may stand where it should not; some of it fits some keys."""


def legal(rng: Random, kind: str) -> Any:
    """A value that the kind holds."""
    return rng.choice(LEGAL[kind])


def some(rng: Random, kinds: Mapping[str, str], most: int, without: Sequence[str] = ()) -> dict[str, Any]:
    """Up to `most` of the keys, each with a value of its kind."""
    names = [name for name in kinds if name not in without]
    chosen = rng.sample(names, min(len(names), rng.randint(0, most)))
    return {name: legal(rng, kinds[name]) for name in chosen}
