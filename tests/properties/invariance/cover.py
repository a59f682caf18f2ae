"""Which rows `make test` runs: a sample of the table in which every pair of values that may matter together meets.

Pairs are those of rows of up to 4 ranks: 8 ranks take turns on two cores, so of larger rows the sample has each mode
and
the three axes together, and `make prove` the rest.

    sample = covering(small(LAYOUTS))      # names; the rest runs with `make prove`

Most faults need one value, or two together (pairwise testing: Cohen et al., The AETG System, 1997). The sample is
greedy: the row with the most that is new for its number of ranks, the first of equals; so it is the same everywhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import combinations

from tests.properties.invariance.layouts import Layout
from tests.support.layouts import mode_of

Seen = tuple[tuple[str, object], ...]


def factors(layout: Layout) -> dict[str, object]:
    """What may matter of a row together with something else, by name."""
    mesh = layout.job().mesh
    return {
        "pipe": mesh.pipe > 1,
        "data": mesh.data > 1,
        "mode": mode_of(mesh.tensor),
        "zero": layout.zero,
        "offload": bool(layout.offload),
        "recompute": bool(layout.recompute),
        "precision": layout.dtype,
        "tied": layout.tied,
        "ignoring": layout.ignoring,
        "accumulation": layout.accumulation > 1,
        "clip": layout.clip,
    }


_OF_ONE_RANK = {"recompute", "ignoring", "clip", "tied", "accumulation"}


def details(layout: Layout) -> dict[str, object]:
    """What should be there once, with whatever else."""
    mesh = layout.job().mesh
    return {
        "mode": mode_of(mesh.tensor),
        "axes": (mesh.pipe > 1, mesh.data > 1, mesh.tensor.size > 1),
        "order": mesh.order,
        "keep": mesh.tensor.keep,
        "micro-batches": layout.accumulation,
        "stages": mesh.pipe,
        "residual": (mesh.tensor.mode, mesh.tensor.residual, mesh.tensor.impl),
        "offload": layout.offload,
        "interval": layout.recompute,
        "scale": str(layout.scale),
        "optimizer": layout.optimizer,
        "model": layout.model,
    }


def small(layouts: Mapping[str, Layout]) -> dict[str, Layout]:
    """The rows of up to 8 ranks: more take a minute on two cores."""
    return {name: layout for name, layout in layouts.items() if layout.world <= 8}


def seen(layout: Layout) -> set[Seen]:
    """The pairs of factors of a row of few ranks, and all details of any."""
    meeting = combinations(factors(layout).items(), 2) if layout.world <= 4 else ()
    pairs = (pair for pair in meeting if not _apart(pair[0][0], pair[1][0]))
    return {*pairs, *((item,) for item in details(layout).items())}


def _apart(one: str, other: str) -> bool:
    """Whether two factors touch nothing in common: what takes turns within one rank meets every mode in `make prove`
    alone.
    """
    return {one, other} & _OF_ONE_RANK != set() and "mode" in (one, other)


def seen_in(layouts: Iterable[Layout]) -> set[Seen]:
    """What is seen somewhere."""
    return set().union(*map(seen, layouts))


def cost(layout: Layout) -> float:
    """About how long a row takes: ranks share the cores, and ZeRO 3 sends the most messages."""
    return layout.world * (2 if layout.zero == 3 else 1)


def covering(layouts: Mapping[str, Layout]) -> tuple[str, ...]:
    """Names of rows in which all that the table has is seen."""
    found = {name: seen(layout) for name, layout in layouts.items()}
    left, chosen = set().union(*found.values()), []
    while left:
        best = max(found, key=lambda name: len(found[name] & left) / cost(layouts[name]))
        left -= found.pop(best)
        chosen.append(best)
    for name in tuple(chosen):  # what the later rows have made needless
        others = [other for other in chosen if other != name]
        if seen_in(map(layouts.__getitem__, others)) == seen_in(layouts.values()):
            chosen = others
    return tuple(name for name in layouts if name in chosen)
