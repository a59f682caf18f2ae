"""The table with what most of its rows leave out: layers that torch compiles, and collectives cut under products.

    OVERLAPPED           # name -> Layout: each row with something to overlap, overlapped
    COMPILED             # each row of our transformers, compiled; of other models those of few ranks
    SYMMETRIC            # of rows whose tokens are in pieces, which come through symmetric memory: a covering
    BOTH                 # of what may be both, rows in which every pair of cover.py's `MEET` is met

Each row has its name in the table. Those that are so in the table itself are left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Set

from dslpar.models.gpt.section import GPT
from dslpar.schema.types import SYMMETRIC_MEMORY
from tests.properties.invariance.cover import FEW_RANKS, covering, small
from tests.properties.invariance.layouts import LAYOUTS, MODELS, Layout

OPTIONS = ("compiled", "overlap")
NOT_RECOMPUTED = ("transformers' T5",)
"""Models whose compiled layers save tensors in another order when they are recomputed: torch's checkpoint raises."""


def is_ours(layout: Layout) -> bool:
    """Whether the model is made of dslpar.layers' blocks, which are whole graphs."""
    return isinstance(MODELS[layout.model](layout.tied), GPT)


def can(layout: Layout, options: Set[str]) -> bool:
    """Whether a row may run so: overlapped where there is something to overlap; compiled, but not at ZeRO 3."""
    group = layout.parallel.get("tensor")
    if "overlap" in options and (group is None or group.mode == "sequence"):
        return False
    is_refused = layout.recompute and layout.model in NOT_RECOMPUTED
    return "compiled" not in options or (layout.zero < 3 and not is_refused)


def with_options(layouts: Mapping[str, Layout], *options: str) -> dict[str, Layout]:
    """The rows that may run so, by their names; without those that the table has itself."""
    rows = {name: row for name, row in layouts.items() if can(row, set(options))}
    made = {name: row._replace(**dict.fromkeys(options, True)) for name, row in rows.items()}
    return {name: row for name, row in made.items() if row not in layouts.values()}


OVERLAPPED = with_options(LAYOUTS, "overlap")
COMPILED = {
    name: row for name, row in with_options(LAYOUTS, "compiled").items() if is_ours(row) or row.world <= FEW_RANKS
}
_IN_PIECES_OF_TOKENS = {
    name: row._replace(overlap=SYMMETRIC_MEMORY)
    for name, row in OVERLAPPED.items()
    if row.job().mesh.tensor.token_axes and "LoRA" not in name
}
"""Without those of adapters, whose products are whole."""
SYMMETRIC = {name: _IN_PIECES_OF_TOKENS[name] for name in covering(small(_IN_PIECES_OF_TOKENS))}
_BOTH = {name: row for name, row in with_options(LAYOUTS, *OPTIONS).items() if is_ours(row)}
BOTH = {name: _BOTH[name] for name in covering(small(_BOTH))}
