"""Learning rates of the first, the peak and the last step, for every curve and edge case."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dslpar.layout.lr_scheduler import CURVES, learning_rate
from dslpar.schema import sections
from dslpar.schema.sections import LRScheduler

LR = 3e-4


def rates(num_steps: int, **scheduler: object) -> list[float]:
    made = LRScheduler(**scheduler)  # type: ignore[arg-type]
    return [learning_rate(made, LR, num_steps, step) for step in range(num_steps)]


def test_every_curve_of_the_language_is_there() -> None:
    assert tuple(CURVES) == sections.LR_SCHEDULERS


def test_constant_is_lr_to_the_bit() -> None:
    assert rates(5) == [LR] * 5
    assert rates(5, min_lr=1e-5) == [LR] * 5


@pytest.mark.parametrize("curve", CURVES)
def test_the_warm_up_rises_by_steps_of_lr_over_w(curve: str) -> None:
    assert rates(9, type=curve, warmup_steps=4)[:4] == [LR * (t + 1) / 4 for t in range(4)]


@pytest.mark.parametrize("curve", ["linear", "cosine"])
@pytest.mark.parametrize("warmup", [0, 1, 5])
def test_the_peak_is_lr_and_the_last_step_uses_min_lr(curve: str, warmup: int) -> None:
    used = rates(20, type=curve, warmup_steps=warmup, min_lr=1e-5)
    assert max(used) == used[max(warmup - 1, 0)] == pytest.approx(LR, rel=1e-12)
    assert used[-1] == pytest.approx(1e-5, rel=1e-9)


def test_half_way_both_curves_stand_in_the_middle() -> None:
    middle = (LR + 1e-5) / 2
    assert rates(21, type="linear", min_lr=1e-5)[10] == pytest.approx(middle, rel=1e-12)
    assert rates(21, type="cosine", min_lr=1e-5)[10] == pytest.approx(middle, rel=1e-12)
    assert rates(21, type="cosine", min_lr=1e-5)[5] > rates(21, type="linear", min_lr=1e-5)[5]


def test_a_run_of_one_step_uses_lr() -> None:
    assert rates(1, type="cosine") == [LR]


def test_a_run_shorter_than_its_warm_up_never_leaves_it() -> None:
    assert rates(2, type="linear", warmup_steps=4) == [LR / 4, LR / 2]


def test_after_the_last_step_min_lr_stays() -> None:
    assert learning_rate(LRScheduler(type="linear", min_lr=1e-5), LR, 10, 50) == 1e-5


@pytest.mark.parametrize("curve", ["linear", "cosine"])
def test_a_decay_may_be_shorter_or_longer_than_the_run(curve: str) -> None:
    """nanoGPT's lr_decay_iters: each step's rate depends on it, and no longer on the number of steps."""
    of_12 = rates(12, type=curve, warmup_steps=3, min_lr=1e-5)
    shorter = rates(20, type=curve, warmup_steps=3, min_lr=1e-5, decay_steps=12)
    assert shorter == [*of_12, *[of_12[-1]] * 8]
    assert rates(7, type=curve, warmup_steps=3, min_lr=1e-5, decay_steps=12) == of_12[:7]


@given(st.sampled_from(list(CURVES)), st.integers(0, 30), st.integers(1, 40), st.floats(0, LR))
def test_rates_rise_then_fall_between_bounds(curve: str, warmup: int, num_steps: int, min_lr: float) -> None:
    used = rates(num_steps, type=curve, warmup_steps=warmup, min_lr=min_lr)
    assert all(rate <= LR * (1 + 1e-12) for rate in used)
    rising, falling = used[:warmup], used[max(warmup - 1, 0) :]
    assert rising == sorted(rising)
    assert all(a >= b - 1e-18 for a, b in pairwise(falling))
    assert all(rate >= min_lr * (1 - 1e-12) for rate in falling)
