"""Schedules of a pipeline: the actions of each rank in order, as data.

    >>> schedule = Schedule(Chunks(pipe=2), num_micro_batches=2)
    >>> [f"{action.kind}{action.micro}" for action in schedule.order(rank=0)]
    ['F0', 'F1', 'B0', 'B1']
    >>> round(schedule.bubble(), 3), schedule.held(rank=0)
    (0.333, Held(total=2.0, deferred=0.0))

An action is one of three: F, the forward of a micro-batch through a stage, B, its backward, or W. If the backward is
split, B computes only the gradient of the stage's inputs, which another rank waits for. W computes the gradients of the
stage's weights, which no rank waits for.

Letters: P ranks, r a rank, v chunks per rank, m micro-batches. F, B and W are also the durations of these actions.

One rule gives four schedules:

| type          | chunks | backward | source                                                                 |
|---------------|--------|----------|------------------------------------------------------------------------|
| `1f1b`        | 1      | whole    | PipeDream-Flush, arXiv 2006.09503                                      |
| `interleaved` | v > 1  | whole    | Megatron-LM, arXiv 2104.04473                                          |
| `zero_bubble` | 1      | split    | ZB-H1, arXiv 2401.10241                                                |
| `zero_bubble` | v > 1  | split    | both, as torch.distributed.pipelining's ScheduleInterleavedZeroBubble  |

A rank takes P micro-batches through each of its chunks in turn, then the next P. It begins with some forwards, then
alternates a forward and a backward, and ends with the remaining backwards. Before the first pair, rank r runs (v-1) P
forwards of all chunks but the last, and P-1-r further forwards, one for each rank after it. The interleaved schedule
has 2 (P-1-r) instead of P-1-r, since a rank would otherwise wait for its neighbour at every chunk. With a split
backward, rank r runs each W r backwards after its B. The last rank begins last and defers the most W. It computes the
deferred W while the pipeline drains.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from dslpar.layout.chunks import Chunks

Kind = Literal["F", "B", "W"]
"""Forward, backward (of inputs only, if it is split), and backward of weights."""


class Action(NamedTuple):
    """Computation of one micro-batch through one stage in one direction."""

    kind: Kind
    stage: int
    micro: int


Orders = Sequence[Sequence[Action]]
"""Actions of each rank, in order."""


class Held(NamedTuple):
    """Peak of the activations that a rank holds; the unit is the activations of one micro-batch in all its chunks."""

    total: float
    """Peak of all activations, held from F to the last action that needs them: B, or W if the backward is split."""
    deferred: float
    """Peak of the activations that wait for W only; it need not occur at the same time as the peak of `total`."""


class Schedule(NamedTuple):
    """Actions of a step on all ranks of a pipeline.

    With several chunks, the number of micro-batches per step must be a multiple of the number of ranks. An evaluation
    may have any number.
    """

    chunks: Chunks
    num_micro_batches: int
    split: bool = False
    """Whether the backward is split into B and W."""

    def order(self, rank: int) -> list[Action]:
        """Return the actions of a rank in a step.

        Raises:
            ValueError: there are several chunks, and the number of micro-batches is not a multiple of the ranks.
        """
        self._check()
        forwards, backwards = list(self._passes(rank)), list(self._passes(rank, backward=True))
        first, deferred = self._first_forwards(rank), rank if self.split else 0
        order = [Action("F", *each) for each in forwards[:first]]
        for done, each in enumerate(backwards):
            order += [Action("F", *later) for later in forwards[first + done : first + done + 1]]
            order.append(Action("B", *each))
            if self.split and done >= deferred:
                order.append(Action("W", *backwards[done - deferred]))
        if self.split:
            order += [Action("W", *each) for each in backwards[max(0, len(backwards) - deferred) :]]
        return order

    def orders(self) -> list[list[Action]]:
        """Return the actions of each rank in a step."""
        return [self.order(rank) for rank in range(self.chunks.pipe)]

    def forward_order(self, rank: int) -> list[Action]:
        """Return the actions of a rank in an evaluation, with any number of micro-batches."""
        return [Action("F", *each) for each in self._passes(rank)]

    def forward_orders(self) -> list[list[Action]]:
        """Return the actions of each rank in an evaluation."""
        return [self.forward_order(rank) for rank in range(self.chunks.pipe)]

    # ---- closed forms, which the tests compare with `dslpar.layout.simulation` ----

    def bubble(self, forward: float = 1.0, backward: float = 1.0, weights: float = 1.0) -> float:
        """Return the share of a step in which a rank is idle, for equal stages and messages that take no time.

        It is (P-1) / (vm+P-1) without a split backward, as in GPipe (arXiv 1811.06965). Megatron-LM's papers divide the
        idle time by the busy time instead.

        `forward`, `backward` and `weights` are the durations F, B and W of a stage. A whole backward takes B + W.

        With a split backward, the first and the last rank wait at different times, and the rank that waits longer
        determines the bubble. The last rank waits for P-1 forwards at the beginning. At the end, P-1 backwards run on
        the other ranks while the last rank computes its P-1 deferred W. The first rank waits once it has run all
        forwards that it may run, until P-1 backwards of the other ranks are done. If F, B and W take equally long, both
        ranks wait equally long.

        Raises:
            ValueError: as `order`; or the backward is split and there are fewer micro-batches than ranks, a case
                without a simple formula.
        """
        self._check()
        (pipe, num), count = self.chunks, self.num_micro_batches
        if not self.split:
            return (pipe - 1) / (count * num + pipe - 1)
        if count < pipe:
            raise ValueError(f"{count} micro-batches over {pipe} ranks: simulate it")
        idle = (pipe - 1) * max(backward, forward + max(backward - weights, 0.0))
        return idle / (idle + count * num * (forward + backward + weights))

    def held(self, rank: int) -> Held:
        """Return the peak of the activations that a rank holds.

        Raises:
            ValueError: as `order`.
        """
        self._check()
        (pipe, num), count = self.chunks, self.num_micro_batches
        if self.split:
            return Held(float(min(pipe, count)), min(rank + 1, count * num) / num)
        return Held(min(self._first_forwards(rank) + 1, count * num) / num, 0.0)

    # ---- the rule ----

    def _passes(self, rank: int, backward: bool = False) -> Iterator[tuple[int, int]]:
        """Yield (stage, micro-batch) in a rank's order for one direction."""
        held = self.chunks.held_by(rank)
        for begin in range(0, self.num_micro_batches, self.chunks.pipe):
            for stage in reversed(held) if backward else held:
                for micro in range(begin, min(begin + self.chunks.pipe, self.num_micro_batches)):
                    yield stage, micro

    def _first_forwards(self, rank: int) -> int:
        """Return the number of forwards before the first pair of a forward and a backward."""
        pipe, num = self.chunks
        hops = 2 if num > 1 and not self.split else 1
        return min((num - 1) * pipe + hops * (pipe - 1 - rank), self.num_micro_batches * num)

    def _check(self) -> None:
        if self.chunks.num > 1 and self.num_micro_batches % self.chunks.pipe:
            raise ValueError(
                f"{self.num_micro_batches} micro-batches are not a multiple of {self.chunks.pipe} ranks, each of which"
                f" has {self.chunks.num} chunks"
            )


# Messages between ranks -------------------------------------------------------------------------------------------

Link = tuple[int, int]
"""Sender and receiver, as ranks of the axis "pipe"."""


def producer(action: Action, chunks: Chunks) -> Action | None:
    """Return the neighbouring stage's action whose result this action consumes, or None."""
    kind, stage, micro = action
    if kind == "F" and stage > 0:
        return Action("F", stage - 1, micro)
    return Action("B", stage + 1, micro) if kind == "B" and stage < chunks.last else None


def consumer(action: Action, chunks: Chunks) -> Action | None:
    """Return the neighbouring stage's action that consumes this action's result, or None; the inverse of `producer`."""
    kind, stage, micro = action
    if kind == "F" and stage < chunks.last:
        return Action("F", stage + 1, micro)
    return Action("B", stage - 1, micro) if kind == "B" and stage > 0 else None


def messages(orders: Orders, chunks: Chunks) -> dict[Link, list[Action]]:
    """Return the messages over each link in the sender's order, each as the action that consumes it.

    The receiver must receive in this order: all messages have the same shape, so a mix-up would go unnoticed. With 3 or
    more ranks, the receiver also uses the messages in this order. With 2 ranks, each link carries both activations and
    gradients, which the receiver uses in the order of its own actions.

        >>> messages(Schedule(Chunks(pipe=2), num_micro_batches=1).orders(), Chunks(pipe=2))
        {(0, 1): [Action(kind='F', stage=1, micro=0)], (1, 0): [Action(kind='B', stage=0, micro=0)]}
    """
    sent: dict[Link, list[Action]] = {}
    for rank, order in enumerate(orders):
        for action in order:
            taken_by = consumer(action, chunks)
            if taken_by is not None and chunks.rank_of(taken_by.stage) != rank:
                sent.setdefault((rank, chunks.rank_of(taken_by.stage)), []).append(taken_by)
    return sent


def direction(link: Link) -> int:
    """Return which of two process groups a link uses: 0 to a higher rank, 1 to a lower rank.

    With both directions in one group, NCCL would use one communicator. Two ranks that send to each other at the same
    time would then deadlock, each waiting for the other to receive.
    """
    sender, receiver = link
    return int(sender > receiver)
