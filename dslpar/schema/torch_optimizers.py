"""Optimizers of torch and DeepSpeed by name: where each lives, its arguments and their types (`dslpar.schema.types`).

The table is data/optimizers.json. AdamW, Adam and SGD are sections of dslpar's own (`dslpar.schema.sections`).

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
    """The class, by its full name."""
    args: Mapping[str, str] = {}
    """Keyword arguments besides lr, and their types."""
    not_elementwise: str = ""
    """Why a shard of a tensor cannot be updated by itself; empty: it can."""
    refused: str = ""
    """Why dslpar does not run it; empty: it does."""
    offload: bool | None = None
    """Whether it needs the optimizer to be offloaded to the CPU (True), cannot have it so (False), or takes both."""
    on_cpu: str = ""
    """The class in its place where the optimizer is offloaded, by its full name; empty: the same one."""

    @property
    def elementwise(self) -> bool:
        """Whether each element's update looks at that element alone: what ZeRO and tensor parallelism need."""
        return not self.not_elementwise


OPTIMIZERS: Mapping[str, KnownOptimizer] = {
    name: KnownOptimizer(**row) for name, row in load_table("optimizers").items()
}
_OWN = {"torch.optim.AdamW", "torch.optim.Adam", "torch.optim.SGD"}
_BY_DOTTED = {row.dotted: name for name, row in OPTIMIZERS.items() if row.dotted}


def short(name: str) -> str:
    """Return the table's name of a class that is written in full; any other name as it is."""
    return _BY_DOTTED.get(name, name)


def named(name: str) -> KnownOptimizer | None:
    """Return the row of a name, short or full; None for a class that is not in the table."""
    return OPTIMIZERS.get(short(name))


def elementwise(name: str) -> bool:
    """Whether shards of a tensor can be updated alone; False for a class that is not in the table: nobody knows."""
    row = named(name)
    return name in _OWN or (row is not None and row.elementwise)
