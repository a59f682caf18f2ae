"""Send tensors of any shapes to one rank, which knows nothing of them: a header goes before them.

    send(values, axis, target=1)                  # there: receive(axis, source=0, device)
    messages = StageMessages((up, down), Chunks(pipe=4), device)    # a pipeline's, which nobody waits for

A pipeline's messages are sent while the sender goes on, and received while the receiver still computes what comes
before, as far ahead as can never hang (`dslpar.layout.simulation.receives`). All of one boundary have one shape: a
header goes before the first one alone, as DeepSpeed's pipeline has it. A link's messages are received in the order in
which they are sent, which the schedule tells: by their shapes, one taken for another would go unseen.

The ways up and down have a process group each. NCCL gives a pair of ranks in a group one communicator, and what is
launched on it runs in order: two ranks that send to each other at once, each before it receives, would wait for ever.
(DeepSpeed blocks in each send; Megatron-LM batches a send and a receive, for which both ranks must be at the same place
of their schedules.)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from dslpar.distributed.collectives import Axis
from dslpar.layout.chunks import Chunks
from dslpar.layout.schedule import Action, Orders, direction, messages, producer

_DTYPES = (
    *(torch.float32, torch.float64, torch.bfloat16, torch.float16),
    *(torch.int64, torch.int32, torch.uint8, torch.bool),
)
_HEADER = 64
"""Numbers of a header, which says what `send` sends: how many tensors, and of each its dtype and shape."""


def send(values: Sequence[Tensor], axis: Axis, target: int) -> None:
    """Send tensors of any shapes to the axis's `target`-th rank, which calls `receive`."""
    for value in (_header(values, values[0].device), *values):
        dist.send(value.contiguous(), axis.peers[target], group=axis.group)


def receive(axis: Axis, source: int, device: torch.device) -> list[Tensor]:
    """Receive what the axis's `source`-th rank sends."""
    received = _empty(_receive_header(axis, source, device), device)
    for value in received:
        dist.recv(value, axis.peers[source], group=axis.group)
    return received


# ---- headers ----

Form = tuple[torch.dtype, Sequence[int]]
"""Dtype and shape of a tensor."""
Forms = Sequence[Form]
"""Of each tensor of a message."""


def forms_of(values: Sequence[Tensor]) -> Forms:
    """Return the dtype and shape of each tensor."""
    return [(value.dtype, tuple(value.shape)) for value in values]


def _empty(forms: Forms, device: torch.device) -> list[Tensor]:
    return [torch.empty(shape, dtype=dtype, device=device) for dtype, shape in forms]


def _header(values: Sequence[Tensor], device: torch.device) -> Tensor:
    header = [len(values)]
    for value in values:
        header += [_DTYPES.index(value.dtype), value.dim(), *value.shape]
    return torch.tensor(header + [0] * (_HEADER - len(header)), device=device)


def _receive_header(axis: Axis, source: int, device: torch.device) -> Forms:
    return _read_header(receive_padded(axis, source, device))


def receive_padded(axis: Axis, source: int, device: torch.device) -> Tensor:
    """Receive a header, unread."""
    padded = torch.zeros(_HEADER, dtype=torch.int64, device=device)
    dist.recv(padded, axis.peers[source], group=axis.group)
    return padded


def _read_header(padded: Tensor) -> Forms:
    num_tensors, *numbers = padded.tolist()
    forms = []
    for _ in range(num_tensors):
        dtype, dims, *numbers = numbers
        forms.append((_DTYPES[dtype], tuple(numbers[:dims])))
        numbers = numbers[dims:]
    return forms


# ---- messages of a pipeline ----


class _Posted(NamedTuple):
    """A receive that was begun."""

    taken_by: Action
    values: list[Tensor]
    works: list[dist.Work]


@dataclass
class _Incoming:
    """What one rank sends to this one, in its order."""

    axis: Axis
    source: int
    expected: deque[Action] = field(default_factory=deque)
    posted: deque[_Posted] = field(default_factory=deque)


Boundary = tuple[str, int]
"""Kind and stage of the action that takes a message in."""


class StageMessages:
    """A rank's messages to and from its neighbours in the pipeline, while it runs its order of a schedule.

    axes: two groups of the pipeline's ranks: of messages to a higher rank, and to a lower one.
    """

    def __init__(self, axes: tuple[Axis, Axis], chunks: Chunks, device: torch.device) -> None:
        self._axes, self._chunks, self._device = axes, chunks, device
        self._rank = axes[0].index
        self._sent_forms: dict[Boundary, Forms] = {}
        self._received_forms: dict[Boundary, Forms] = {}
        self._incoming: dict[int, _Incoming] = {}
        self._ahead: deque[Sequence[Action]] = deque()
        """Of each action that is still to run, what is begun to be received before it."""
        self._buffers: dict[Action, list[Tensor]] = {}
        """For what is begun to be received before the next action."""
        self._arrived: dict[Action, list[Tensor]] = {}
        self._in_flight: deque[tuple[dist.Work, Tensor]] = deque()
        """What is being sent, with what must live until then."""

    def connect(self, orders: Orders) -> None:
        """Open this rank's links by an empty header. Its neighbours call it together.

        NCCL makes the communicator of a pair at its first message, and both wait until it is there: here one pair after
        the other in an order that all ranks share, and with nothing else on the device.
        """
        header = torch.zeros(_HEADER, dtype=torch.int64, device=self._device)  # and the kernel that makes one is loaded
        links = [link for link in messages(orders, self._chunks) if self._rank in link]
        for source, target in sorted(links, key=lambda link: (direction(link), link[0] % 2, link)):
            axis = self._axes[direction((source, target))]
            if source == self._rank:
                dist.send(header, axis.peers[target], group=axis.group)
            else:
                dist.recv(header, axis.peers[source], group=axis.group)
        header.tolist()

    def begin(self, orders: Orders, ahead: Sequence[Sequence[Action]]) -> None:
        """Expect the messages of these orders, of all ranks; those of ranks that are no neighbours may be empty.

        ahead: what is begun to be received before each action of this rank (`layout.simulation.receives`).
        """
        self._incoming, self._ahead = {}, deque(ahead)
        for link, expected in messages(orders, self._chunks).items():
            source, target = link
            if target == self._rank:
                self._incoming[source] = _Incoming(self._axes[direction(link)], source, deque(expected))

    def advance(self) -> None:
        """Begin to receive what comes before this rank's next action. To be called before each, in its order.

        What the action after it will receive has its memory from here on: an allocation may wait for the device, and
        between a message that was sent and the next one's receive nothing may.
        """
        for taken_by in self._ahead.popleft():
            before = producer(taken_by, self._chunks)
            assert before is not None, "an action at an end of the pipeline"
            incoming = self._incoming[self._chunks.rank_of(before.stage)]
            assert incoming.expected[0] == taken_by, (
                "a link's messages are received in the order in which they are sent"
            )
            incoming.posted.append(self._post(incoming))
        for taken_by in self._ahead[0] if self._ahead else ():
            if taken_by[:2] in self._received_forms:
                self._buffers[taken_by] = _empty(self._received_forms[taken_by[:2]], self._device)

    def send(self, values: Sequence[Tensor], taken_by: Action) -> None:
        """Begin to send what an action of a neighbour takes in.

        Raises:
            ValueError: its shapes or dtypes are not those of the first message over this boundary.
        """
        target, boundary = self._chunks.rank_of(taken_by.stage), taken_by[:2]
        axis, forms = self._axes[direction((self._rank, target))], forms_of(values)
        if boundary not in self._sent_forms:
            self._sent_forms[boundary] = forms
            values = [_header(values, self._device), *values]
        elif forms != self._sent_forms[boundary]:
            raise ValueError(_changed(taken_by, self._sent_forms[boundary], forms))
        while self._in_flight and self._in_flight[0][0].is_completed():  # gloo does not say: there, until `finish`
            self._in_flight.popleft()
        for sent in [value.detach().contiguous() for value in values]:  # copied, where need be, before anything is sent
            work = dist.isend(sent, axis.peers[target], group=axis.group)
            assert work is not None, "this rank is in the group"
            self._in_flight.append((work, sent))

    def receive(self, action: Action) -> list[Tensor]:
        """Return what an action takes in, as soon as it is here; `advance` has begun to receive it."""
        before = producer(action, self._chunks)
        assert before is not None, "an action at an end of the pipeline"
        incoming = self._incoming[self._chunks.rank_of(before.stage)]
        while action not in self._arrived:
            posted = incoming.posted.popleft()
            for work in posted.works:
                work.wait()
            self._arrived[posted.taken_by] = posted.values
        return self._arrived.pop(action)

    def finish(self) -> None:
        """Wait until all is sent."""
        while self._in_flight:
            self._in_flight.popleft()[0].wait()
        assert not self._arrived
        assert not any(each.posted or each.expected for each in self._incoming.values()), "a message was not taken in"

    def _post(self, incoming: _Incoming) -> _Posted:
        """Begin to receive the next message; the first over a boundary waits for its header."""
        taken_by, axis = incoming.expected.popleft(), incoming.axis
        if taken_by[:2] not in self._received_forms:
            self._received_forms[taken_by[:2]] = self._receive_forms(taken_by, axis, incoming.source)
        values = self._buffers.pop(taken_by, None) or _empty(self._received_forms[taken_by[:2]], self._device)
        peer = axis.peers[incoming.source]
        works = [dist.irecv(value, peer, group=axis.group) for value in values]
        return _Posted(taken_by, values, [work for work in works if work is not None])

    def _receive_forms(self, taken_by: Action, axis: Axis, source: int) -> Forms:
        """Receive the header of the first message over a boundary; a dry run knows what it says."""
        return _receive_header(axis, source, self._device)


def _changed(taken_by: Action, before: Forms, now: Forms) -> str:
    what = "output" if taken_by.kind == "F" else "gradient"
    of = taken_by.stage - 1 if taken_by.kind == "F" else taken_by.stage + 1

    def shown(forms: Forms) -> str:
        return ", ".join(f"{str(dtype).removeprefix('torch.')}{list(shape)}" for dtype, shape in forms)

    return f"the {what} of stage {of} is {shown(now)}, and was {shown(before)} before: a pipeline's shapes never change"
