"""Problem of a layout that a dry run finds, with its place and the reason why it is wrong."""

from __future__ import annotations

from typing import Literal, NamedTuple

Check = Literal["layers", "tiling", "boundary", "collectives", "messages"]


class Problem(NamedTuple):
    """One problem."""

    check: Check
    """Name of the check that found it."""
    where: str
    """'stage 1', 'blocks.0.mlp.up.weight', 'pipe 0 to pipe 1'."""
    what: str
    """The facts: '3 messages are sent and 2 received'."""
    why: str
    """The rule that they break, or the consequence."""

    def __str__(self) -> str:
        return f"{self.check}: {self.where}: {self.what}\n    {self.why}"
