"""Send tensors of any shapes to one rank, after a header with their dtypes and shapes.

    send(values, axis, target=1)                  # there: receive(axis, source=0, device)
    messages = StageMessages((up, down), Chunks(pipe=4), device)    # a pipeline's, which nobody waits for

In a pipeline, the sender continues while its message is sent. The receiver posts receives while it still computes
earlier actions, as far ahead as is safe from deadlock (`dslpar.layout.simulation.receives`). All messages over one
stage boundary, in one direction, have the same shapes. Only the first one has a header, as in DeepSpeed's pipeline. A
link is a pair of (sending, receiving) ranks. Its messages are received in the order in which they are sent, which the
schedule determines. Since their shapes are equal, a mix-up would go unnoticed.

Messages up and down the pipeline have separate process groups. NCCL gives a pair of ranks one communicator per group,
and work on it runs in order. Two ranks that both send before they receive would hang. (DeepSpeed blocks in each send.
Megatron-LM batches a send with a receive, for which both ranks must be at the same place in their schedules.)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from dslpar.core.catalog import raise_finding
from dslpar.distributed.collectives import Axis
from dslpar.layout.chunks import Chunks
from dslpar.layout.schedule import Action, Orders, direction, messages, producer

_DTYPES = (
    *(torch.float32, torch.float64, torch.bfloat16, torch.float16),
    *(torch.int64, torch.int32, torch.uint8, torch.bool),
)
_HEADER = 64
"""Length of a header: the number of tensors that `send` sends, then each tensor's dtype and shape."""


def send(values: Sequence[Tensor], axis: Axis, target: int) -> None:
    """Send tensors of any shapes to the axis's `target`-th rank, which calls `receive`."""
    for value in (_header(values, values[0].device), *values):
        dist.send(value.contiguous(), axis.peers[target], group=axis.group)


def receive(axis: Axis, source: int, device: torch.device) -> list[Tensor]:
    """Receive the tensors that rank `source` of the axis sends."""
    received = _empty(_receive_header(axis, source, device), device)
    for value in received:
        dist.recv(value, axis.peers[source], group=axis.group)
    return received


# ---- headers ----

Form = tuple[torch.dtype, Sequence[int]]
"""Dtype and shape of a tensor."""
Forms = Sequence[Form]
"""Forms of a message's tensors."""


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
    """Receive a header without parsing it."""
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
    """A posted receive of one message."""

    taken_by: Action
    """The action whose input the message is."""
    values: list[Tensor]
    """Buffers for the message's tensors."""
    works: list[dist.Work]


@dataclass
class _Incoming:
    """Messages from one rank to this rank, in order."""

    axis: Axis
    source: int
    expected: deque[Action] = field(default_factory=deque)
    """Actions of this rank whose inputs are still to be posted, in the order of sending."""
    posted: deque[_Posted] = field(default_factory=deque)
    """Receives that are posted and not waited for yet."""


Boundary = tuple[str, int]
"""Kind and stage of the action that receives a message."""


class StageMessages:
    """A rank's messages to and from its pipeline neighbours, while it runs its part of a schedule.

    axes: two groups of the pipeline's ranks, one for messages to a higher rank and one for messages to a lower rank.
    """

    def __init__(self, axes: tuple[Axis, Axis], chunks: Chunks, device: torch.device) -> None:
        self._axes, self._chunks, self._device = axes, chunks, device
        self._rank = axes[0].index
        self._sent_forms: dict[Boundary, Forms] = {}
        self._received_forms: dict[Boundary, Forms] = {}
        self._incoming: dict[int, _Incoming] = {}
        self._ahead: deque[Sequence[Action]] = deque()
        """For each action still to run, the receives to post before it."""
        self._buffers: dict[Action, list[Tensor]] = {}
        """Memory for the receives to post before the next action."""
        self._arrived: dict[Action, list[Tensor]] = {}
        self._in_flight: deque[tuple[dist.Work, Tensor]] = deque()
        """Messages being sent, with the tensors that must stay alive until then."""

    def connect(self, orders: Orders) -> None:
        """Open this rank's links with an empty header. Neighbours must call it together.

        NCCL makes a pair's communicator at the pair's first message, and both ranks wait for each other. Here pairs
        connect one by one, in the same order on all ranks, while the device has no other work.
        """
        header = torch.zeros(_HEADER, dtype=torch.int64, device=self._device)  # loads the kernel that makes one
        links = [link for link in messages(orders, self._chunks) if self._rank in link]
        for source, target in sorted(links, key=lambda link: (direction(link), link[0] % 2, link)):
            axis = self._axes[direction((source, target))]
            if source == self._rank:
                dist.send(header, axis.peers[target], group=axis.group)
            else:
                dist.recv(header, axis.peers[source], group=axis.group)
        header.tolist()

    def begin(self, orders: Orders, ahead: Sequence[Sequence[Action]]) -> None:
        """Begin a step, or an evaluation.

        orders: all ranks' actions, in order; empty for ranks that are not this rank's neighbours.
        ahead: the receives to post before each action of this rank (`layout.simulation.receives`).
        """
        self._incoming, self._ahead = {}, deque(ahead)
        for link, expected in messages(orders, self._chunks).items():
            source, target = link
            if target == self._rank:
                self._incoming[source] = _Incoming(self._axes[direction(link)], source, deque(expected))

    def advance(self) -> None:
        """Post the receives that come before this rank's next action. Call it before each action, in order.

        It also allocates memory for the receives to post before the action after that. An allocation may wait for the
        device, and nothing may wait between a send and the next receive.
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
        """Begin sending the input of a neighbour's action.

        Raises:
            DslparError: shapes or dtypes differ from those of the first message over this boundary. Only this rank
                raises it, and the other ranks are ended by its monitor.
        """
        target, boundary = self._chunks.rank_of(taken_by.stage), taken_by[:2]
        axis, forms = self._axes[direction((self._rank, target))], forms_of(values)
        if boundary not in self._sent_forms:
            self._sent_forms[boundary] = forms
            values = [_header(values, self._device), *values]
        elif forms != self._sent_forms[boundary]:
            hint = (
                "pad all batches to one length, with labels of -100 where nothing is to be learned, and do not let the"
                " last batch be smaller; or train without a pipeline, parallel.pipeline=1"
            )
            raise_finding(
                "PIP213", _changed(taken_by, self._sent_forms[boundary], forms), hint, key="parallel.pipeline"
            )
        while self._in_flight and self._in_flight[0][0].is_completed():  # gloo does not report it: kept until `finish`
            self._in_flight.popleft()
        for sent in [value.detach().contiguous() for value in values]:  # any copies are made before the first send
            work = dist.isend(sent, axis.peers[target], group=axis.group)
            assert work is not None, "this rank is in the group"
            self._in_flight.append((work, sent))

    def receive(self, action: Action) -> list[Tensor]:
        """Wait for and return an action's input, whose receive `advance` has posted."""
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
        """Wait until all messages are sent."""
        while self._in_flight:
            self._in_flight.popleft()[0].wait()
        assert not self._arrived
        assert not any(each.posted or each.expected for each in self._incoming.values()), "a message was not taken in"

    def _post(self, incoming: _Incoming) -> _Posted:
        """Post the receive of the next message; for the first one over a boundary, wait for its header."""
        taken_by, axis = incoming.expected.popleft(), incoming.axis
        if taken_by[:2] not in self._received_forms:
            self._received_forms[taken_by[:2]] = self._receive_forms(taken_by, axis, incoming.source)
        values = self._buffers.pop(taken_by, None) or _empty(self._received_forms[taken_by[:2]], self._device)
        peer = axis.peers[incoming.source]
        works = [dist.irecv(value, peer, group=axis.group) for value in values]
        return _Posted(taken_by, values, [work for work in works if work is not None])

    def _receive_forms(self, taken_by: Action, axis: Axis, source: int) -> Forms:
        """Receive the header of the first message over a boundary; a dry run overrides this."""
        return _receive_header(axis, source, self._device)


def _changed(taken_by: Action, before: Forms, now: Forms) -> str:
    what = "output" if taken_by.kind == "F" else "gradient"
    of = taken_by.stage - 1 if taken_by.kind == "F" else taken_by.stage + 1

    def shown(forms: Forms) -> str:
        return ", ".join(f"{str(dtype).removeprefix('torch.')}{list(shape)}" for dtype, shape in forms)

    change = f"changed from {shown(before)} to {shown(now)}"
    return f"the {what} of stage {of} {change}: shapes in a pipeline must stay the same"
