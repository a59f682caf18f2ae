"""Check the order of actions of each pipeline rank: every action runs once, no rank waits forever, messages match.

    >>> from dslpar.layout.chunks import Chunks
    >>> from dslpar.layout.schedule import Schedule
    >>> schedule = Schedule(Chunks(pipe=2), num_micro_batches=2)
    >>> order_problems(schedule, schedule.orders())
    []

An action is the forward (F), backward (B) or weight backward (W) of one micro-batch through one stage. Messages match
if a rank uses them in the order in which its neighbour sends them. The check covers the whole step of all pipeline
ranks. Ranks that differ only in data or tensor coordinates have the same order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from dslpar.dry_run.problem import Problem
from dslpar.layout.chunks import Chunks
from dslpar.layout.schedule import Action, Kind, Link, Orders, Schedule, messages, producer
from dslpar.layout.simulation import DeadlockError, even_durations, simulate


def order_problems(schedule: Schedule, orders: Orders) -> list[Problem]:
    """Return the problems in the orders of all ranks."""
    problems = [*_counts(schedule, orders)]
    try:
        simulate(orders, schedule.chunks, even_durations(schedule.chunks.stages))
    except DeadlockError as error:
        problems.append(Problem("messages", "all ranks", str(error), "the step would hang there"))
    except ValueError as error:
        problems.append(Problem("messages", "all ranks", str(error), "each action runs once, where its stage is"))
    return [*problems, *_message_orders(orders, schedule.chunks)]


def _counts(schedule: Schedule, orders: Orders) -> Iterator[Problem]:
    """Find missing actions. The simulation cannot find them if no other action waits for their result."""
    kinds: tuple[Kind, ...] = ("F", "B", "W") if schedule.split else ("F", "B")
    for pipe, order in enumerate(orders):
        have = Counter(order)
        stages, micros = schedule.chunks.held_by(pipe), range(schedule.num_micro_batches)
        wanted = [Action(kind, stage, micro) for kind in kinds for stage in stages for micro in micros]
        missing = [action for action in wanted if not have[action]]
        if missing:
            what = f"{len(missing)} of {len(wanted)} actions are missing, such as {_named(missing[0])}"
            yield Problem("messages", f"pipe {pipe}", what, "every micro-batch goes through every stage, both ways")


def _message_orders(orders: Orders, chunks: Chunks) -> Iterator[Problem]:
    """Compare, for each pair of ranks and each of F and B, the order of sent messages with the order of their use."""
    used = _uses(orders, chunks)
    for link, sent in messages(orders, chunks).items():
        for kind in ("F", "B"):
            ours = [action for action in sent if action.kind == kind]
            theirs = [action for action in used.get(link, []) if action.kind == kind]
            at = next((index for index, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), None)
            sender, receiver = link
            where = f"pipe {sender} to pipe {receiver}"
            if at is not None:
                what = f"message {at} is sent for {_named(ours[at])}, but {_named(theirs[at])} receives it"
                yield Problem("messages", where, what, "messages have the same shape, so a swap would go unnoticed")
            elif len(ours) != len(theirs):
                what = f"{len(ours)} messages are sent, but {len(theirs)} are received"
                yield Problem("messages", where, what, "one side would wait for the other forever")


def _uses(orders: Orders, chunks: Chunks) -> dict[Link, list[Action]]:
    """Return, for each link (sender, receiver), the actions that need a message from it, in the receiver's order."""
    used: dict[Link, list[Action]] = {}
    for rank, order in enumerate(orders):
        for action in order:
            before = producer(action, chunks)
            if before is not None and chunks.rank_of(before.stage) != rank:
                used.setdefault((chunks.rank_of(before.stage), rank), []).append(action)
    return used


def _named(action: Action) -> str:
    return f"{action.kind} of stage {action.stage}, micro-batch {action.micro}"
