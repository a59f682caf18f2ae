"""Replay a rank's messages between stages for a whole step, without computing anything.

The replay uses the class that training uses, `StageMessages`. All messages over a boundary between two stages have one
dtype and shape (a form). In training a header announces it before the first message. In a replay the forms are known
from the dry run of the stages.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from dslpar.distributed.collectives import Axis
from dslpar.distributed.groups import Groups
from dslpar.distributed.point_to_point import Boundary, Forms, StageMessages, receive_padded
from dslpar.dry_run.recorder import Call, recording
from dslpar.dry_run.stage import META, empty
from dslpar.layout.chunks import Chunks
from dslpar.layout.schedule import Action, Orders, consumer, producer
from dslpar.layout.simulation import receives


class Message(NamedTuple):
    """One message that a rank sends or receives."""

    action: Action
    """The action of the schedule during which the rank sends or receives it."""
    kind: str
    """"send" or "receive"."""
    peer: int
    """Pipeline rank at the other end of the message."""
    form: str
    """Dtype and shape: 'bf16[2, 128, 512]'."""
    num_bytes: int
    """Bytes that this rank sends; 0 for a receive."""


class _KnownForms(StageMessages):
    """`StageMessages` that receive headers without reading them, because the forms are known."""

    def __init__(self, axes: tuple[Axis, Axis], chunks: Chunks, forms: Mapping[Boundary, Forms]) -> None:
        super().__init__(axes, chunks, META)
        self._forms = forms

    def _receive_forms(self, taken_by: Action, axis: Axis, source: int) -> Forms:
        receive_padded(axis, source, META)
        return self._forms[taken_by[:2]]


def replay(groups: Groups, orders: Orders, chunks: Chunks, forms: Mapping[Boundary, Forms]) -> list[Message]:
    """Return this rank's messages in a step.

    `orders` has the actions of all pipeline ranks in order. `forms` has the forms of the tensors that an action
    receives from another stage, by the action's kind and stage.

    Raises:
        LookupError, AssertionError: an action waits for a message that no rank sends, or no action receives a message.
    """
    pipe = groups.coord["pipe"]
    ways = groups.second("pipe", "pipe_up"), groups.second("pipe", "pipe_down")
    passing = _KnownForms(ways, chunks, forms)
    found: list[Message] = []
    with recording(groups) as calls:
        passing.begin(orders, receives(orders, chunks, pipe))
        for action in orders[pipe]:
            passing.advance()
            if producer(action, chunks) is not None:
                passing.receive(action)
            taken_by = consumer(action, chunks)
            if taken_by is not None:
                passing.send([empty(form) for form in forms[taken_by[:2]]], taken_by)
            found += [_message(action, call, pipe, chunks.pipe) for call in calls]
            calls.clear()
        passing.finish()
    return found


def _message(action: Action, call: Call, pipe: int, size: int) -> Message:
    return Message(action, call.kind, (pipe + call.step) % size, call.form, int(call.num_bytes))
