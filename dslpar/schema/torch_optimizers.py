"""Optimizers of torch and DeepSpeed: full names, arguments and their types (`dslpar.schema.types`).

The table is data/optimizers.json. AdamW, Adam and SGD are dslpar sections (`dslpar.schema.sections`).

    >>> named("RMSprop").dotted, elementwise("torch.optim.RMSprop"), elementwise("my_package.MyOptimizer")
    ('torch.optim.RMSprop', True, False)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from dslpar.schema.tables import load_table


class KnownOptimizer(NamedTuple):
    """One row of the table."""

    dotted: str
    """Full name of the class."""
    args: Mapping[str, str] = {}
    """Keyword argument besides lr -> its type."""
    not_elementwise: str = ""
    """Reason why a shard of a tensor cannot be updated by itself; empty if it can."""
    refused: str = ""
    """Reason why dslpar does not support it; empty if it does."""
    offload: bool | None = None
    """True: the optimizer needs offload to the CPU; False: it cannot be offloaded; None: it works with and without."""
    on_cpu: str = ""
    """Full name of the class that replaces this class if it is offloaded; empty if no class does."""

    @property
    def elementwise(self) -> bool:
        """Return whether the update of an element depends only on that element, as ZeRO and tensor parallelism need."""
        return not self.not_elementwise


OPTIMIZERS: Mapping[str, KnownOptimizer] = {
    name: KnownOptimizer(**row) for name, row in load_table("optimizers").items()
}
_OWN = {"torch.optim.AdamW", "torch.optim.Adam", "torch.optim.SGD"}
_BY_DOTTED = {row.dotted: name for name, row in OPTIMIZERS.items() if row.dotted}


def short(name: str) -> str:
    """Return the short name for a full name in the table; return any other name unchanged."""
    return _BY_DOTTED.get(name, name)


def named(name: str) -> KnownOptimizer | None:
    """Return the row of a short or full name; None if the class is not in the table."""
    return OPTIMIZERS.get(short(name))


def elementwise(name: str) -> bool:
    """Return whether shards of a tensor can be updated by themselves; False for a class that is not in the table."""
    row = named(name)
    return name in _OWN or (row is not None and row.elementwise)
