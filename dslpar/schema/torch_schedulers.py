"""Learning-rate schedulers of DeepSpeed and torch by name: where each lives, its arguments and their types.

The table is data/lr_schedulers.json, the types are those of `dslpar.schema.types`; the optimizer and the number of the
last step are not among the arguments.

    >>> named("StepLR").required
    ['step_size']
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from dslpar.schema.tables import load_table


class KnownLRScheduler(NamedTuple):
    """One row of the table."""

    dotted: str
    """The class, by its full name."""
    args: Mapping[str, str] = {}
    """Keyword arguments and their types."""
    required: Sequence[str] = ()
    """Arguments without a default, but for the peak."""
    refused: str = ""
    """Why dslpar does not run it; empty: it does."""
    sets_lr: str = ""
    """The argument that is its peak, of a scheduler that has one of its own; left out: the optimizer's lr."""


LR_SCHEDULERS: Mapping[str, KnownLRScheduler] = {
    name: KnownLRScheduler(**row) for name, row in load_table("lr_schedulers").items()
}
_BY_DOTTED = {row.dotted: name for name, row in LR_SCHEDULERS.items()}


def short(name: str) -> str:
    """Return the table's name of a scheduler that is written in full; any other name as it is."""
    return _BY_DOTTED.get(name, name)


def named(name: str) -> KnownLRScheduler | None:
    """Return the row of a name, short or full; None for one that is not in the table."""
    return LR_SCHEDULERS.get(short(name))
