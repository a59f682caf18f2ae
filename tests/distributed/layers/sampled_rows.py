"""Rows of the proof that `make test` runs: a sample that covers every feature; `make prove` runs all rows.

    for layout, cases in PROOF.items(): ...       # {'1d-2': ('inward', 'outward', ...), ...}

A row is a layout and a case. The sample is greedy: each time the row with the most new features for its number of
ranks, and the first of equals. So it is the same everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping

from dslpar.core.mesh import TensorMesh
from tests.distributed.layers.cases import CASES, FAMILIES
from tests.support.layouts import CUBOIDS, LAYOUTS, kept, mode_of
from tests.support.sampling import greedy_cover

KEPT = kept(["2d-4", "3d-8", "1d-sequence-2", "cuboid-1-2-3-hidden-heads"])
LONG = ("cuboid-3-2-2-hidden-heads", "cuboid-3-2-2-batch-batch")
"""Layouts of twelve ranks with x as the longest side; (2, 3, 2) already has each residual and inner."""
SIDES = {name: tensor for name, tensor in CUBOIDS.items() if name in LONG or tensor.shape != (3, 2, 2)}
PROVEN = LAYOUTS | SIDES | {name: tensor for name, tensor in KEPT.items() if tensor not in LAYOUTS.values()}
"""All layouts of the proof."""

Sample = Mapping[str, tuple[str, ...]]
Seen = Callable[[TensorMesh, str], set[Hashable]]


def seen(tensor: TensorMesh, case: str) -> set[Hashable]:
    """Return the features of a row: each case in each mode, with each `keep`, and each way to keep the residual and the
    inner activations; and some model with each combination of these, and on each number of ranks of a mode.
    """
    mode, held = mode_of(tensor), {"residual": tensor.residual, "inner": tensor.inner}
    pairs = {(what, value, case) for what, value in ({"mode": mode, "keep": tensor.keep} | held).items()}
    return pairs | ({(mode, tensor.size), (mode, *held.values())} if FAMILIES[case] == "models" else set())


def seen_after_steps(tensor: TensorMesh, case: str) -> set[Hashable]:
    """Return the features after steps: each case, and a layer and a model in each mode. Only copies remain to be
    checked.
    """
    return {case, (mode_of(tensor), FAMILIES[case] == "models"), tensor.size}


def covering(layouts: Mapping[str, TensorMesh], seen: Seen) -> Sample:
    """Return rows that have all features of all rows: {layout: cases}."""
    found = {(name, case.__name__): seen(tensor, case.__name__) for name, tensor in layouts.items() for case in CASES}
    chosen = greedy_cover(found, lambda row: layouts[row[0]].size)
    rows = {name: tuple(case for row, case in chosen if row == name) for name in layouts}
    return {name: cases for name, cases in rows.items() if cases}


def seen_in(layouts: Mapping[str, TensorMesh], sample: Sample, seen: Seen) -> set[Hashable]:
    """Return the features of a sample's rows."""
    return set().union(*(seen(layouts[name], case) for name, cases in sample.items() for case in cases))


PROOF = covering(PROVEN, seen)
OTHER_SIZES = {
    *("1d-4", "1d-6", "1d-sequence-3", "1d-sequence-4", "1d-sequence-6", "2.5d-12-depth-3"),
    *("ring-4", "ring-6", "ulysses-4", "ulysses-6", "ring-4-zigzag", "ring-3-1d-sequence-2"),
}
"""Rows of a model in a mode that already has that model, on another number of ranks: `make prove` runs them."""
EACH_SIZE = {name: cases for name, cases in PROOF.items() if name not in OTHER_SIZES}
EACH_TIME = {
    *("1d-2", "1d-sequence-2", "2.5d-8-depth-2", "cuboid-1-2-2-replicated", "ring-2", "ring-3", "ring-2-zigzag"),
    *("2d-4-keep-w", "3d-2-2-2-hidden-heads", "ulysses-2", "ring-2-1d-sequence-2", "cuboid-1-2-3-hidden-batch"),
    *("1d-sequence-2-keep-w", "3d-2-2-2-sequence-batch"),
}
"""The part of EACH_SIZE that `make test` runs: a row per mode, and the rows that killed a mutant first in the kill
matrix (`python -m tests.support.kill_matrix`). `make prove` runs all.
"""
KINDS = {
    name: tensor
    for name, tensor in LAYOUTS.items()
    if name not in OTHER_SIZES | {"1d-3", "ring-3", "ulysses-3", "ring-3-zigzag", "ring-2-1d-2", "hybrid-4-1d-2"}
}
"""One number of ranks per mode and combination, for tables whose rows take minutes: in the kill matrix, other numbers
kill nothing more. The quick rows have all sizes, and the arrays of tests/properties/layouts have two.
"""
STEPS = covering(LAYOUTS, seen_after_steps)
