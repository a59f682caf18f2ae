"""Deliberate mistakes in schedules: the comparison with 1F1B detects each, far beyond its bound.

No mistake raises or hangs by itself: a run would continue with wrong gradients.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.properties.schedules.measure import BOUND, Deviation, run
from tests.properties.schedules.table import NO_MODE, Row
from tests.support import warm

CAUGHT = 1e-3
"""A thousand bounds."""
INTERLEAVED = Row(NO_MODE, 2, ("interleaved", 2), 4)
BOTH = Row(NO_MODE, 2, ("zero_bubble", 2), 4)


def agrees(off: Deviation) -> bool:
    """Return whether a row agrees with 1F1B."""
    return all(value <= most for value, most in zip(off, BOUND, strict=True))


def caught(off: Deviation) -> bool:
    """Return whether norm and gradients are off far beyond rounding."""
    return off.norm > CAUGHT and off.gradient > CAUGHT


def with_and_without(row: Row, mutate: Callable[[], None]) -> tuple[Deviation, Deviation]:
    """Run a row unchanged and mutated, against one 1F1B."""
    calls = []

    def change() -> None:
        calls.append(None)
        if len(calls) == 2:
            mutate()

    true, mutated = run([row, row], change)
    return true, mutated


def ask_the_rank_for_the_last_stage() -> None:
    """Make DeepSpeed take every stage of the last rank for the last stage, as it does by default."""
    from dslpar.engine.pipeline_executor import PipelineExecutor

    init = PipelineExecutor.__init__

    def patched(self: Any, ds_engine: Any, *args: Any) -> None:
        init(self, ds_engine, *args)
        del ds_engine.is_first_stage, ds_engine.is_last_stage

    PipelineExecutor.__init__ = patched  # type: ignore[method-assign]


def receive_in_order_of_use(row: Row) -> None:
    """Make a rank receive in its own order instead of the sender's, once it has all headers.

    A header that is taken for a message fails at once, since the shapes differ. From the second step on, all are alike.
    """
    from dslpar.distributed.point_to_point import StageMessages

    begin, schedule = StageMessages.begin, row.job().schedule

    def patched(self: Any, orders: Any, ahead: Any) -> None:
        begin(self, orders, ahead)
        used, instead = schedule.order(self._rank), {}
        for incoming in self._incoming.values():
            if any(taken_by[:2] not in self._received_forms for taken_by in incoming.expected):
                continue
            sent, incoming.expected = incoming.expected, deque(sorted(incoming.expected, key=used.index))
            instead.update(zip(sent, incoming.expected, strict=True))
        self._ahead = deque([instead.get(each, each) for each in before] for before in self._ahead)

    StageMessages.begin = patched  # type: ignore[method-assign]


def add_to_gradients_by_hand() -> None:
    """Make W add to `weight.grad` without autograd, so that no hook runs."""
    from dslpar.layers.weight_gradients import WeightGradients

    def accumulate(self: Any) -> None:
        with torch.no_grad():
            for weight, gradient in self._in_order():
                weight.grad = gradient if weight.grad is None else weight.grad + gradient

    WeightGradients.accumulate = accumulate  # type: ignore[method-assign]


def test_the_last_stage_by_rank_is_caught() -> None:
    true, mutated = with_and_without(INTERLEAVED, ask_the_rank_for_the_last_stage)
    assert agrees(true), true
    assert caught(mutated), mutated


def test_messages_in_the_order_of_use_are_caught() -> None:
    true, mutated = with_and_without(BOTH, lambda: receive_in_order_of_use(BOTH))
    assert agrees(true), true
    assert caught(mutated), mutated


def test_weight_gradients_added_by_hand_are_caught() -> None:
    """In bf16, ZeRO 1 sums in fp32, in hooks of autograd's own accumulation.

    Sums by hand round in bf16, which norms hardly show. With tied weights, stages would send sums of other dtypes, and
    fail.
    """
    row = BOTH._replace(zero=1, dtype="bf16", tied=False)
    true, mutated = with_and_without(row, add_to_gradients_by_hand)
    assert agrees(true), true
    assert mutated.gradient > CAUGHT, mutated
    assert not agrees(mutated)


def test_dropout_seeded_once_a_step_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """1F1B is mutated, too, so that two schedules are compared, and not two seeds."""
    warm.import_deepspeed()
    from dslpar.engine.engine import Engine

    row = INTERLEAVED._replace(dropout=0.1)
    (true,) = run([row])

    def seed_once_a_step(self: Any, index: int) -> None:
        if getattr(self, "seeded_step", None) != self.steps_done:
            self.seeded_step = self.steps_done
            torch.manual_seed(self.steps_done)

    monkeypatch.setattr(Engine, "_seed_micro_batch", seed_once_a_step)
    (mutated,) = run([row])
    assert agrees(true), true
    assert caught(mutated), mutated
    assert mutated.loss > 1e-4, mutated
