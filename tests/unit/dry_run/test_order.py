"""Orders of all schedules agree; a swapped, missing or doubled action and a deadlock are found."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from dslpar.dry_run.order import order_problems
from dslpar.layout.chunks import Chunks
from dslpar.layout.schedule import Action, Schedule

SCHEDULES = {
    f"{pipe} ranks, {chunks} chunks, {count} micro-batches{', split' * split}": Schedule(
        Chunks(pipe, chunks), count, split
    )
    for pipe in (1, 2, 3, 4, 8)
    for chunks in (1, 2, 3)
    for count in (pipe, 2 * pipe, 5 * pipe)
    for split in (False, True)
}


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_all_schedules_agree(schedule: Schedule) -> None:
    assert order_problems(schedule, schedule.orders()) == []


Orders = list[list[Action]]


def _swap_forwards(orders: Orders) -> None:
    orders[1][0], orders[1][1] = orders[1][1], orders[1][0]


def _swap_backwards(orders: Orders) -> None:
    first, second = (orders[2].index(Action("B", 2, micro)) for micro in (0, 1))
    orders[2][first], orders[2][second] = orders[2][second], orders[2][first]


def _backward_first(orders: Orders) -> None:
    at = orders[3].index(Action("B", 3, 0))
    orders[3].insert(0, orders[3].pop(at))


def _leave_out_weights(orders: Orders) -> None:
    orders[1].remove(Action("W", 1, 2))


def _leave_out_forward(orders: Orders) -> None:
    orders[0].remove(Action("F", 0, 7))


def _twice(orders: Orders) -> None:
    orders[0].append(orders[0][0])


def _elsewhere(orders: Orders) -> None:
    orders[0][0] = Action("F", 1, 0)


@pytest.mark.parametrize(
    ("mistake", "found"),
    [
        (
            _swap_forwards,
            "pipe 0 to pipe 1: message 0 is sent for F of stage 1, micro-batch 0, but F of stage 1, micro-",
        ),
        (
            _swap_backwards,
            "pipe 2 to pipe 1: message 0 is sent for B of stage 1, micro-batch 1, but B of stage 1, micro-",
        ),
        (
            _backward_first,
            "rank 3 cannot begin B of stage 3, micro-batch 0 before F of stage 3, micro-batch 0",
        ),
        (_leave_out_weights, "pipe 1: 1 of 24 actions are missing, such as W of stage 1, micro-batch 2"),
        (_leave_out_forward, "pipe 0: 1 of 24 actions are missing, such as F of stage 0, micro-batch 7"),
        (_twice, "all ranks: F of stage 0, micro-batch 0 is twice in the order of rank 0"),
        (_elsewhere, "all ranks: F of stage 1, micro-batch 0 is in the order of rank 0, which does not hold the stage"),
    ],
)
def test_a_mistake_is_found(mistake: Callable[[Orders], None], found: str) -> None:
    schedule = Schedule(Chunks(4), 8, split=True)
    orders = schedule.orders()
    mistake(orders)
    assert any(found in f"{each.where}: {each.what}" for each in order_problems(schedule, orders))
