"""The simulation: times by hand, orders that cannot run, and what a rank holds."""

from __future__ import annotations

import re

import pytest

from dslpar.layout.chunks import Chunks
from dslpar.layout.schedule import Action, Held, Schedule
from dslpar.layout.simulation import DeadlockError, Durations, even_durations, held, simulate

TWO = Chunks(2)


def test_times_of_two_stages() -> None:
    """One micro-batch goes through an uneven pipeline, whose messages take half a second."""
    durations = Durations(forward=[1.0, 2.0], backward=[3.0, 4.0], weights=[5.0, 6.0])
    whole = simulate(Schedule(TWO, 1).orders(), TWO, durations, message=0.5)
    assert {action: tuple(span) for action, span in whole.spans.items()} == {
        ("F", 0, 0): (0.0, 1.0),
        ("F", 1, 0): (1.5, 3.5),
        ("B", 1, 0): (3.5, 13.5),  # unsplit: 4 + 6
        ("B", 0, 0): (14.0, 22.0),
    }
    assert (whole.makespan, whole.busy, whole.bubble) == (22.0, [9.0, 12.0], 1 - 12 / 22)
    split = simulate(Schedule(TWO, 1, split=True).orders(), TWO, durations, message=0.5)
    assert split.spans[Action("B", 1, 0)] == (3.5, 7.5)
    assert split.spans[Action("B", 0, 0)] == (8.0, 11.0)
    assert (split.spans[Action("W", 1, 0)], split.makespan) == ((7.5, 13.5), 16.0)


def test_stages_of_one_rank_need_no_message() -> None:
    chunks = Chunks(pipe=1, num=3)
    timeline = simulate(Schedule(chunks, 2).orders(), chunks, even_durations(3), message=100.0)
    assert (timeline.makespan, timeline.bubble) == (18.0, 0.0)


def test_ranks_that_wait_for_each_other_are_named() -> None:
    orders = Schedule(TWO, 2).orders()
    orders[1] = [Action("F", 1, 1), Action("B", 1, 1), Action("F", 1, 0), Action("B", 1, 0)]
    orders[0] = [Action("F", 0, 0), Action("B", 0, 0), Action("F", 0, 1), Action("B", 0, 1)]
    message = (
        "the orders wait for each other: rank 0 cannot begin B of stage 0, micro-batch 0 before B of stage 1,"
        " micro-batch 0; rank 1 cannot begin F of stage 1, micro-batch 1 before F of stage 0, micro-batch 1"
    )
    with pytest.raises(DeadlockError, match=f"^{re.escape(message)}$"):
        simulate(orders, TWO, even_durations(2))


def test_an_action_that_nobody_runs_is_named() -> None:
    first, last = Schedule(TWO, 1).orders()
    with pytest.raises(DeadlockError, match="before F of stage 0, micro-batch 0, which no rank has in its order"):
        simulate([first[1:], last], TWO, even_durations(2))


def test_an_action_twice_or_elsewhere_is_refused() -> None:
    first, last = Schedule(TWO, 1).orders()
    with pytest.raises(ValueError, match="F of stage 0, micro-batch 0 is twice in the order of rank 0"):
        simulate([[first[0], *first], last], TWO, even_durations(2))
    with pytest.raises(ValueError, match="F of stage 0, micro-batch 0 is in the order of rank 1, which does not hold"):
        simulate([first, first], TWO, even_durations(2))
    with pytest.raises(ValueError, match="F of stage 2, micro-batch 0 is in the order of rank 0"):
        simulate([[Action("F", 2, 0)], []], TWO, even_durations(3))


def test_a_swapped_pair_holds_more() -> None:
    """Memory follows from the order, not from the schedule that produced it."""
    order = Schedule(TWO, 4).order(0)
    assert held(order, TWO) == Held(2.0, 0.0)
    forwards_first = sorted(order, key=lambda action: action.kind, reverse=True)
    assert held(forwards_first, TWO) == Held(4.0, 0.0)  # GPipe's
    assert held(forwards_first, Chunks(1, 2)).total == 2.0
