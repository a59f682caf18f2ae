"""A rank's messages of a whole step, sent and received by the pipeline's own `StageMessages`; nothing is computed.

All messages over a boundary have one form, which a header says before the first; here it is what the stages have sent.
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
    """The other end, as a rank of the axis "pipe"."""
    form: str
    num_bytes: int


class _KnownForms(StageMessages):
    """Messages whose headers say what is known."""

    def __init__(self, axes: tuple[Axis, Axis], chunks: Chunks, forms: Mapping[Boundary, Forms]) -> None:
        super().__init__(axes, chunks, META)
        self._forms = forms

    def _receive_forms(self, taken_by: Action, axis: Axis, source: int) -> Forms:
        receive_padded(axis, source, META)
        return self._forms[taken_by[:2]]


def replay(groups: Groups, orders: Orders, chunks: Chunks, forms: Mapping[Boundary, Forms]) -> list[Message]:
    """Return the messages of this rank of `orders`, in which those of all ranks must be.

    `forms` are of what each action takes in, by its kind and stage.

    Raises:
        LookupError, AssertionError: an action takes in what nobody sends, or something sent is left over.
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
