"""Which rows `make test` runs: a sample of the table in which pairs of values that may matter together meet.

`MEET` names the pairs, and `MEET_EACH_TIME` those that `make test` needs. They are counted in rows of up to 4 ranks:
8 ranks take turns on two cores, so of larger rows the sample has the modes and axes that need so many, and
`make prove` the rest.

    sample = covering(small(LAYOUTS), seen_each_time)      # names; the rest runs with `make prove`

Most faults need one value, or two together (pairwise testing: Cohen et al., The AETG System, 1997). The sample is
greedy: the row with the most that is new for what it costs, the first of equals; so it is the same everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from tests.properties.invariance.layouts import Layout
from tests.support.layouts import mode_of
from tests.support.sampling import greedy_cover

Seen = tuple[tuple[str, object], ...]

Row = Any
"""A row of a table, whatever it is."""

FEW_RANKS = 4

MEET = (
    # the ways to divide a model; of ZeRO's stages only the third divides what a tensor group divides already
    *(("pipe", "data"), ("pipe", "zero"), ("data", "zero"), ("mode", "pipe"), ("mode", "ZeRO 3")),
    # what ZeRO's optimizers do themselves, and what a pipeline's engine does
    *(("precision", "zero"), ("offload", "zero"), ("recompute", "zero"), ("accumulation", "zero"), ("clip", "zero")),
    *(("precision", "pipe"), ("recompute", "pipe"), ("accumulation", "pipe"), ("clip", "pipe"), ("tied", "pipe")),
    # the sum over counted tokens
    *(("ignoring", "pipe"), ("ignoring", "data")),
)
"""The factors that act on the same thing, so that a fault may need a value of each. All others meet in `make prove`."""

MEET_EACH_TIME = (
    *(("pipe", "data"), ("pipe", "zero"), ("data", "zero")),
    *(("recompute", "pipe"), ("tied", "pipe"), ("ignoring", "pipe")),
)
"""Those of them that no other test of `make test` has: a mode meets a pipeline in properties/schedules, and what ZeRO
offloads, clips, accumulates and scales has tests of its own in distributed/engine.
"""


def factors(layout: Layout) -> dict[str, object]:
    """What may matter of a row together with something else, by name."""
    mesh = layout.job().mesh
    return {
        "pipe": mesh.pipe > 1,
        "data": mesh.data > 1,
        "mode": mode_of(mesh.tensor),
        "zero": layout.zero,
        "ZeRO 3": layout.zero == 3,
        "offload": bool(layout.offload),
        "recompute": bool(layout.recompute),
        "precision": layout.dtype,
        "tied": layout.tied,
        "ignoring": layout.ignoring,
        "accumulation": layout.accumulation > 1,
        "clip": layout.clip,
    }


def details(layout: Layout) -> dict[str, object]:
    """What should be there once, with whatever else."""
    mesh = layout.job().mesh
    found = {
        "mode": mode_of(mesh.tensor),
        "axes": (mesh.pipe > 1, mesh.data > 1, mesh.tensor.size > 1),
    }
    if layout.world > FEW_RANKS:
        return found
    return found | {
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


def seen(layout: Layout, meet: tuple[tuple[str, str], ...] = MEET) -> set[Seen]:
    """The pairs of a row of few ranks, and the details of any."""
    found = factors(layout)
    pairs = meet if layout.world <= FEW_RANKS else ()
    return {
        *(((one, found[one]), (other, found[other])) for one, other in pairs),
        *((item,) for item in details(layout).items()),
    }


def seen_each_time(layout: Layout) -> set[Seen]:
    """What `make test` needs of a row. It has families of transformers' in distributed/policies/test_families.py, and
    optimizers in distributed/engine/test_optimizers.py.
    """
    elsewhere = {(("optimizer", layout.optimizer),)} if layout.optimizer not in ("SGD", "AdamW") else set[Seen]()
    elsewhere |= {(("model", layout.model),)} if layout.model.startswith("transformers'") else set[Seen]()
    return (seen(layout, MEET_EACH_TIME) | {(("precision", layout.dtype),)}) - elsewhere


def seen_in(layouts: Iterable[Layout]) -> set[Seen]:
    """What is seen somewhere."""
    return set().union(*map(seen_each_time, layouts))


def cost(layout: Layout) -> float:
    """About how long a row takes: messages, of all ranks, for each layer and micro-batch; a start of 6 layers' time."""
    tensor = layout.job().mesh.tensor
    axes = sum(size > 1 for size in (tensor.d, tensor.q, tensor.y, tensor.z))
    messages = 0.5 + 1.5 * axes + 1.5 * (layout.zero == 3)
    slower = 2 if layout.model.startswith("transformers'") else 1
    return slower * layout.world * (6 + layout.accumulation * layout.num_layers * messages)


def covering(
    layouts: Mapping[str, Row], seen: Callable[[Row], set[Seen]] = seen, cost: Callable[[Row], float] = cost
) -> tuple[str, ...]:
    """Names of rows in which all that the table has is seen; `seen` and `cost` of rows that are no Layouts."""
    found = {name: seen(layout) for name, layout in layouts.items()}
    costs = {name: cost(layout) for name, layout in layouts.items()}
    chosen = greedy_cover(found, costs.__getitem__)
    for name in sorted(chosen, key=costs.__getitem__, reverse=True):  # what the later rows have made needless
        if found[name] <= set().union(*(found[other] for other in chosen if other != name)):
            chosen.remove(name)
    return tuple(name for name in layouts if name in chosen)
