"""torch.nn layers with one input and one output tensor, by name, from data/layers.json; no losses and no containers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from dslpar.schema.tables import load_table


class KnownLayer(NamedTuple):
    """One row of the table."""

    parameters: bool
    """Whether it has trainable parameters, unless its arguments turn them off."""
    required: Sequence[str] | None = None
    """Arguments without a default; None if it accepts any arguments."""
    optional: Sequence[str] = ()


LAYERS: Mapping[str, KnownLayer] = {name: KnownLayer(**row) for name, row in load_table("layers").items()}
