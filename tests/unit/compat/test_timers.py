"""Histories of ColossalAI's timers, and calls in the wrong order."""

from __future__ import annotations

import pytest

from dslpar.compat.timers import MultiTimer, Timer


def test_histories() -> None:
    timers = MultiTimer()
    for _ in range(2):
        timers.start("step")
        assert timers.get_timer("step").lap() >= 0
        timers.stop("step", keep_in_history=True)
    timer = dict(timers)["step"]
    assert timer.get_history_sum() == pytest.approx(2 * timer.get_history_mean())
    assert timer.get_elapsed_time() >= 0
    timers.reset()
    assert not timer.has_history


def test_switched_off_it_does_nothing() -> None:
    timers = MultiTimer(on=False)
    timers.start("step")
    assert timers.stop("step") is None
    assert not dict(timers)
    assert not timers.is_on()


def test_calls_in_the_wrong_order() -> None:
    timer = Timer()
    with pytest.raises(RuntimeError, match="call start"):
        timer.stop()
    with pytest.raises(RuntimeError, match="no history"):
        timer.get_history_mean()
    timer.start()
    with pytest.raises(RuntimeError, match="running"):
        timer.get_elapsed_time()
