"""Rows of the proof that `make test` runs: a sample that covers every feature; `make prove` runs all rows.

    for layout, cases in PROOF.items(): ...       # {'1d-2': ('inward', 'outward', ...), ...}

A row is a layout and a case. The sample is greedy: the row with the most that is new for its number of ranks, the first
of equals; so it is the same everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping

from dslpar.core.mesh import Tensor
from tests.distributed.layers.cases import CASES, FAMILIES
from tests.support.layouts import CUBOIDS, LAYOUTS, kept, mode_of
from tests.support.sampling import greedy_cover

KEPT = kept(["2d-4", "3d-8", "1d-sequence-2", "cuboid-1-2-3-hidden-heads"])
LONG = ("cuboid-3-2-2-hidden-heads", "cuboid-3-2-2-batch-batch")
"""Of twelve ranks with x the longest side; each residual and inner is seen in (2, 3, 2) already."""
SIDES = {name: tensor for name, tensor in CUBOIDS.items() if name in LONG or tensor.shape != (3, 2, 2)}
PROVEN = LAYOUTS | SIDES | {name: tensor for name, tensor in KEPT.items() if tensor not in LAYOUTS.values()}
"""All layouts of the proof."""

Sample = Mapping[str, tuple[str, ...]]
Seen = Callable[[Tensor, str], set[Hashable]]


def seen(tensor: Tensor, case: str) -> set[Hashable]:
    """Each case in each mode, with each `keep`, each way to keep the residual and the inner activations; and some model
    with each choice of these together, and on each number of ranks of a mode.
    """
    mode, held = mode_of(tensor), {"residual": tensor.residual, "inner": tensor.inner}
    pairs = {(what, value, case) for what, value in ({"mode": mode, "keep": tensor.keep} | held).items()}
    return pairs | ({(mode, tensor.size), (mode, *held.values())} if FAMILIES[case] == "models" else set())


def seen_after_steps(tensor: Tensor, case: str) -> set[Hashable]:
    """Each case, and a layer and a model in each mode: what is left to see is that copies stay together."""
    return {case, (mode_of(tensor), FAMILIES[case] == "models"), tensor.size}


def covering(layouts: Mapping[str, Tensor], seen: Seen) -> Sample:
    """Rows in which all is seen that is seen in all rows: {layout: cases}."""
    found = {(name, case.__name__): seen(tensor, case.__name__) for name, tensor in layouts.items() for case in CASES}
    chosen = greedy_cover(found, lambda row: layouts[row[0]].size)
    rows = {name: tuple(case for row, case in chosen if row == name) for name in layouts}
    return {name: cases for name, cases in rows.items() if cases}


def seen_in(layouts: Mapping[str, Tensor], sample: Sample, seen: Seen) -> set[Hashable]:
    """What is seen in the rows of a sample."""
    return set().union(*(seen(layouts[name], case) for name, cases in sample.items() for case in cases))


PROOF = covering(PROVEN, seen)
OTHER_SIZES = {
    *("1d-4", "1d-6", "1d-sequence-3", "1d-sequence-4", "1d-sequence-6", "2.5d-12-depth-3"),
    *("ring-4", "ring-6", "ulysses-4", "ulysses-6", "ring-4-zigzag", "ring-3-1d-sequence-2"),
}
"""Rows of one model, in a mode that has that model, on another number of ranks: `make prove` runs them."""
EACH_SIZE = {name: cases for name, cases in PROOF.items() if name not in OTHER_SIZES}
EACH_TIME = {
    *("1d-2", "1d-sequence-2", "2.5d-8-depth-2", "cuboid-1-2-2-replicated", "ring-2", "ring-3", "ring-2-zigzag"),
    *("2d-4-keep-w", "3d-2-2-2-hidden-heads", "ulysses-2", "ring-2-1d-sequence-2", "cuboid-1-2-3-hidden-batch"),
    *("1d-sequence-2-keep-w", "3d-2-2-2-sequence-batch"),
}
"""What `make test` runs of EACH_SIZE, and `make prove` all: a row of each mode, and those by which the kill matrix
(`python -m tests.support.kill_matrix`) saw a mutant die first."""
KINDS = {
    name: tensor
    for name, tensor in LAYOUTS.items()
    if name not in OTHER_SIZES | {"1d-3", "ring-3", "ulysses-3", "ring-3-zigzag", "ring-2-1d-2", "hybrid-4-1d-2"}
}
"""Of each mode and combination one number of ranks, for tables whose rows take minutes: by the kill matrix a row on
other numbers kills nothing else. The quick rows are of all sizes, and the arrays of tests/properties/layouts of two."""
STEPS = covering(LAYOUTS, seen_after_steps)
