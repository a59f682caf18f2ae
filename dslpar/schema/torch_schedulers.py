"""Learning-rate schedules of DeepSpeed and torch by name: where each lives, its arguments and their kinds.

The kinds are those of dslpar.schema.types; the optimizer and the number of the last step are not among the arguments.

    >>> named("StepLR").required
    ('step_size',)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class KnownSchedule(NamedTuple):
    """One row of the table."""

    dotted: str
    """The class, by its full name."""
    args: Mapping[str, str] = {}
    """Keyword arguments and their kinds."""
    required: tuple[str, ...] = ()
    """Arguments without a default, but for the peak."""
    refused: str = ""
    """Why dslpar does not run it; empty: it does."""
    sets_lr: str = ""
    """The argument that is its peak, of a schedule that has one of its own; left out: the optimizer's lr."""


def _torch(name: str, *required: str, sets_lr: str = "", **args: str) -> KnownSchedule:
    return KnownSchedule(f"torch.optim.lr_scheduler.{name}", args, required, sets_lr=sets_lr)


def _deepspeed(name: str, *required: str, sets_lr: str = "", **args: str) -> KnownSchedule:
    return KnownSchedule(f"deepspeed.runtime.lr_schedules.{name}", args, required, sets_lr=sets_lr)


def _refused(name: str, why: str) -> KnownSchedule:
    return KnownSchedule(f"torch.optim.lr_scheduler.{name}", refused=why)


_WARMUP = {"warmup_num_steps": "Count", "warmup_type": "WarmupType"}
_MOMENTA = {"cycle_momentum": "Flag", "base_momentum": "Fraction", "max_momentum": "Fraction"}
_FUNCTION, _OTHERS = "it needs a function, and configs hold none", "it needs other schedules, and a config names one"

SCHEDULES: Mapping[str, KnownSchedule] = {
    "LRRangeTest": _deepspeed(
        "LRRangeTest",
        sets_lr="lr_range_test_min_lr",
        lr_range_test_min_lr="Positive",
        lr_range_test_step_size="Count",
        lr_range_test_step_rate="Rate",
        lr_range_test_staircase="Flag",
    ),
    "OneCycle": _deepspeed(
        "OneCycle",
        "cycle_min_lr",
        sets_lr="cycle_max_lr",
        cycle_min_lr="Rate",
        cycle_max_lr="Positive",
        decay_lr_rate="Rate",
        cycle_first_step_size="Count",
        cycle_second_step_size="Index",
        cycle_first_stair_count="Index",
        cycle_second_stair_count="Index",
        decay_step_size="Index",
        cycle_momentum="Flag",
        cycle_min_mom="Fraction",
        cycle_max_mom="Fraction",
        decay_mom_rate="Rate",
    ),
    "WarmupLR": _deepspeed(
        "WarmupLR", sets_lr="warmup_max_lr", warmup_min_lr="Rate", warmup_max_lr="Positive", **_WARMUP
    ),
    "WarmupDecayLR": _deepspeed(
        "WarmupDecayLR",
        "total_num_steps",
        sets_lr="warmup_max_lr",
        total_num_steps="Count",
        warmup_min_lr="Rate",
        warmup_max_lr="Positive",
        **_WARMUP,
    ),
    "WarmupCosineLR": _deepspeed(
        "WarmupCosineLR",
        "total_num_steps",
        total_num_steps="Count",
        warmup_min_ratio="Rate",
        cos_min_ratio="Rate",
        **_WARMUP,
    ),
    "StepLR": _torch("StepLR", "step_size", step_size="Count", gamma="Positive"),
    "MultiStepLR": _torch("MultiStepLR", "milestones", milestones="Milestones", gamma="Positive"),
    "ConstantLR": _torch("ConstantLR", factor="Share", total_iters="Index"),
    "LinearLR": _torch("LinearLR", start_factor="PositiveShare", end_factor="Share", total_iters="Index"),
    "ExponentialLR": _torch("ExponentialLR", "gamma", gamma="Positive"),
    "PolynomialLR": _torch("PolynomialLR", total_iters="Count", power="Rate"),
    "CosineAnnealingLR": _torch("CosineAnnealingLR", "T_max", T_max="Count", eta_min="Rate"),
    "CosineAnnealingWarmRestarts": _torch(
        "CosineAnnealingWarmRestarts", "T_0", T_0="Count", T_mult="Count", eta_min="Rate"
    ),
    "CyclicLR": _torch(
        "CyclicLR",
        "base_lr",
        sets_lr="max_lr",
        base_lr="Rate",
        max_lr="Positive",
        step_size_up="Count",
        step_size_down="Count",
        mode="CycleMode",
        gamma="Positive",
        scale_mode="CycleScale",
        **_MOMENTA,
    ),
    "OneCycleLR": _torch(
        "OneCycleLR",
        "total_steps",
        sets_lr="max_lr",
        max_lr="Positive",
        total_steps="Count",
        pct_start="Share",
        anneal_strategy="Anneal",
        div_factor="Positive",
        final_div_factor="Positive",
        three_phase="Flag",
        **_MOMENTA,
    ),
    "ReduceLROnPlateau": _refused("ReduceLROnPlateau", "it needs a metric of the evaluation at each step"),
    "LambdaLR": _refused("LambdaLR", _FUNCTION),
    "MultiplicativeLR": _refused("MultiplicativeLR", _FUNCTION),
    "SequentialLR": _refused("SequentialLR", _OTHERS),
    "ChainedScheduler": _refused("ChainedScheduler", _OTHERS),
}
_BY_DOTTED = {row.dotted: name for name, row in SCHEDULES.items()}


def short(name: str) -> str:
    """The table's name of a schedule that is written in full; any other name as it is."""
    return _BY_DOTTED.get(name, name)


def named(name: str) -> KnownSchedule | None:
    """The row of a name, short or full; None for one that is not in the table."""
    return SCHEDULES.get(short(name))
