"""Replay a rank's messages of a whole step with the pipeline's own `StageMessages`, without computing anything.

All messages over a boundary have one dtype and shape, which a header announces before the first message. In a replay
the header is known from what the stages sent.
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
    """One message of a rank, within an action of its order."""

    action: Action
    kind: str
    """send or receive."""
    peer: int
    """Other end of the message, as an index on the axis "pipe"."""
    form: str
    num_bytes: int


class _KnownForms(StageMessages):
    """Stage messages with known headers."""

    def __init__(self, axes: tuple[Axis, Axis], chunks: Chunks, forms: Mapping[Boundary, Forms]) -> None:
        super().__init__(axes, chunks, META)
        self._forms = forms

    def _receive_forms(self, taken_by: Action, axis: Axis, source: int) -> Forms:
        receive_padded(axis, source, META)
        return self._forms[taken_by[:2]]


def replay(groups: Groups, orders: Orders, chunks: Chunks, forms: Mapping[Boundary, Forms]) -> list[Message]:
    """Return this rank's messages; `orders` must have the orders of all pipeline ranks.

    `forms` has the dtypes and shapes that each action takes in, by its kind and stage.

    Raises:
        LookupError, AssertionError: an action waits for a message that nobody sends, or a sent message is left over.
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
