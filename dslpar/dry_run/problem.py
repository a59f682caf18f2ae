"""Problem that a dry run finds: where, what, and why it is wrong; `check` names the check that found it."""

from __future__ import annotations

from typing import Literal, NamedTuple

Check = Literal["layers", "tiling", "boundary", "collectives", "messages"]


class Problem(NamedTuple):
    """One problem."""

    check: Check
    where: str
    """'stage 1', 'blocks.0.mlp.up.weight', 'pipe 0 to pipe 1'."""
    what: str
    why: str

    def __str__(self) -> str:
        return f"{self.check}: {self.where}: {self.what}\n    {self.why}"
