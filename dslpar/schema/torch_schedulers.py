"""Learning-rate schedulers of DeepSpeed and torch: full names, arguments and their types (`dslpar.schema.types`).

The table is data/lr_schedulers.json. The optimizer and the number of the last step are not among the arguments.

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
    """Full name of the class."""
    args: Mapping[str, str] = {}
    """Keyword argument -> its type."""
    required: Sequence[str] = ()
    """Arguments without a default, except the peak."""
    refused: str = ""
    """Reason why dslpar does not support it; empty if it does."""
    sets_lr: str = ""
    """The argument for the peak, if the scheduler has one; if it is left out, the peak is the optimizer's lr."""


LR_SCHEDULERS: Mapping[str, KnownLRScheduler] = {
    name: KnownLRScheduler(**row) for name, row in load_table("lr_schedulers").items()
}
_BY_DOTTED = {row.dotted: name for name, row in LR_SCHEDULERS.items()}


def short(name: str) -> str:
    """Return the short name for a full name in the table; return any other name unchanged."""
    return _BY_DOTTED.get(name, name)


def named(name: str) -> KnownLRScheduler | None:
    """Return the row of a short or full name; None if the scheduler is not in the table."""
    return LR_SCHEDULERS.get(short(name))
