"""Simulation of a pipeline's schedule: the time of each action, the idle time of ranks, the activations they hold.

    >>> schedule = Schedule(Chunks(pipe=4), num_micro_batches=8)
    >>> timeline = simulate(schedule.orders(), schedule.chunks, even_durations(schedule.chunks.stages))
    >>> timeline.makespan, round(timeline.bubble, 3)
    (33.0, 0.273)

An order is the list of actions that one rank runs (`dslpar.layout.schedule`). `simulate` accepts any orders, so that
tests can verify the closed forms of schedules, and other schedules can be compared. Stages may take different times,
and messages may take time. Messages over one link are assumed not to wait for each other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from dslpar.layout.chunks import Chunks
from dslpar.layout.schedule import Action, Held, Orders, Schedule, messages, producer

__all__ = ["Chunks", "DeadlockError", "Durations", "Schedule", "Span", "Timeline", "even_durations"]
__all__ += ["held", "receives", "simulate"]


class DeadlockError(ValueError):
    """The orders make ranks wait for each other, or for an action that is in no rank's order."""


class Durations(NamedTuple):
    """Durations of each stage's actions. In an order without W, the backward takes `backward` plus `weights`."""

    forward: Sequence[float]
    backward: Sequence[float]
    weights: Sequence[float]

    def of(self, action: Action, split: bool) -> float:
        """Return the duration of an action."""
        kind, stage, _ = action
        if kind == "F":
            return self.forward[stage]
        if kind == "W":
            return self.weights[stage]
        return self.backward[stage] + (0.0 if split else self.weights[stage])


def even_durations(stages: int, forward: float = 1.0, backward: float = 1.0, weights: float = 1.0) -> Durations:
    """Return durations of equal stages. F, B and W are equal by default, as are the three products of a matmul."""
    return Durations([forward] * stages, [backward] * stages, [weights] * stages)


class Span(NamedTuple):
    """Start and end of an action."""

    start: float
    end: float


class Timeline(NamedTuple):
    """Step on all ranks; the first action starts at time 0."""

    orders: Orders
    spans: Mapping[Action, Span]

    @property
    def makespan(self) -> float:
        """Time at which the last action ends."""
        return max((span.end for span in self.spans.values()), default=0.0)

    @property
    def busy(self) -> list[float]:
        """Time for which each rank computes."""
        return [sum(self.spans[action].end - self.spans[action].start for action in order) for order in self.orders]

    @property
    def bubble(self) -> float:
        """Share of the step in which the busiest rank is idle."""
        return 1.0 - max(self.busy) / self.makespan


def simulate(orders: Orders, chunks: Chunks, durations: Durations, message: float = 0.0) -> Timeline:
    """Run all actions as early as their ranks' orders allow; `message` is the time of a message between ranks.

    Raises:
        DeadlockError: the orders cannot be completed.
        ValueError: an action is twice in the orders, or on a rank that does not hold its stage.
    """
    _check(orders, chunks)
    splits = [any(action.kind == "W" for action in order) for order in orders]
    spans: dict[Action, Span] = {}
    done, free = [0] * len(orders), [0.0] * len(orders)
    waiting: dict[Action, list[int]] = {}
    runnable = list(range(len(orders)))
    far = message if chunks.pipe > 1 else 0.0  # with one rank, neighbouring stages are on the same rank
    while runnable:
        rank = runnable.pop()
        while done[rank] < len(orders[rank]):
            action = orders[rank][done[rank]]
            needed = _needed(action, chunks)
            missing = [each for each in needed if each not in spans]
            if missing:
                waiting.setdefault(missing[0], []).append(rank)
                break
            ready = [spans[each].end + (0.0 if each.stage == action.stage else far) for each in needed]
            start = max([free[rank], *ready])
            free[rank] = start + durations.of(action, splits[rank])
            spans[action] = Span(start, free[rank])
            done[rank] += 1
            runnable += waiting.pop(action, ())
    if waiting:
        raise DeadlockError(_deadlock(orders, done, waiting))
    return Timeline(orders, spans)


def receives(orders: Orders, chunks: Chunks, rank: int) -> list[list[Action]]:
    """Return the messages that a rank begins to receive before each action of its order.

    A message is named by the action that consumes it. The orders are simulated with actions that take equally long. A
    receive begins before the first action that starts at or after the time of sending. So no rank computes while it has
    begun to receive a message that is sent only later: every message that was begun completes, whatever the rank does
    next.

    This is required: when CUDA loads a kernel at its first use, a rank may wait until all of its launched work has run
    (CUDA's programming guide, "Lazy Loading"). If two ranks had each begun to receive what the other sends later, both
    would wait forever. This happened on a GPU in the second backward, which adds gradients with a separate kernel.
    Megatron-LM also sends and receives a message at the same point of the schedule, in batches.

        >>> schedule = Schedule(Chunks(2), 2)
        >>> ahead = receives(schedule.orders(), schedule.chunks, rank=1)
        >>> [[f"{each.kind}{each.micro}" for each in messages] for messages in ahead]  # before F0, B0, F1 and B1
        [['F0'], ['F1'], [], []]
    """
    spans = simulate(orders, chunks, even_durations(chunks.stages)).spans
    sent = [
        (spans[source].end, each)
        for (_, receiver), listed in messages(orders, chunks).items()
        if receiver == rank
        for each in listed
        if (source := producer(each, chunks)) is not None
    ]
    # The sort is stable, so the messages of a link stay in order.
    coming = deque(each for _, each in sorted(sent, key=lambda pair: pair[0]))
    times = deque(sorted(end for end, _ in sent))
    before: list[list[Action]] = []
    for action in orders[rank]:
        before.append([])
        while times and times[0] <= spans[action].start:
            times.popleft()
            before[-1].append(coming.popleft())
    return before


def held(order: Sequence[Action], chunks: Chunks) -> Held:
    """Return the peak of the activations that a rank holds in this order; the unit is one micro-batch in all chunks."""
    split = any(action.kind == "W" for action in order)
    forward = deferred = most = most_deferred = 0
    for action in order:
        if action.kind == "F":
            forward += 1
        elif action.kind == "B":
            forward -= 1
            deferred += split
        else:
            deferred -= 1
        most, most_deferred = max(most, forward + deferred), max(most_deferred, deferred)
    return Held(most / chunks.num, most_deferred / chunks.num)


def _needed(action: Action, chunks: Chunks) -> list[Action]:
    """Return the actions, of any rank, that must have run before an action."""
    kind, stage, micro = action
    if kind == "W":
        return [Action("B", stage, micro)]
    own = [Action("F", stage, micro)] if kind == "B" else []
    neighbour = producer(action, chunks)
    return own if neighbour is None else [*own, neighbour]


def _check(orders: Orders, chunks: Chunks) -> None:
    for rank, order in enumerate(orders):
        listed = set[Action]()
        held_here = set(chunks.held_by(rank))
        for action in order:
            if action.stage not in held_here:
                raise ValueError(f"{_named(action)} is in the order of rank {rank}, which does not hold the stage")
            if action in listed:
                raise ValueError(f"{_named(action)} is twice in the order of rank {rank}")
            listed.add(action)


def _deadlock(orders: Orders, done: Sequence[int], waiting: Mapping[Action, Sequence[int]]) -> str:
    known = {action for order in orders for action in order}
    stuck = [
        f"rank {rank} cannot begin {_named(orders[rank][done[rank]])} before {_named(missing)}"
        + ("" if missing in known else ", which no rank has in its order")
        for missing, ranks in waiting.items()
        for rank in ranks
    ]
    return "the orders wait for each other: " + "; ".join(sorted(stuck))


def _named(action: Action) -> str:
    return f"{action.kind} of stage {action.stage}, micro-batch {action.micro}"
