"""Choose small worlds that keep a layout's axes, each with as few ranks as reveal a mistake along it.

    worlds = small_worlds(axes_of(spec, mesh), max_ranks=8)

An axis of one rank keeps one rank. Every other axis gets at least two ranks, so that a missing or repeated reduction
over the axis changes numbers. If there are enough ranks, axes have different sizes, so that confused axes lead to
different shapes. If all axes together need more than `max_ranks`, several worlds are chosen. Each pair of axes that
fits then has more than one rank in at least one of the worlds.

Axes here are independent sizes. The modes '2d', '2.5d' and '3d' have a square or cube of ranks, whose side is one axis.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import combinations, product
from typing import NamedTuple

from dslpar.core.mesh import Mesh
from dslpar.schema.parallel_forms import pipeline_of, tensor_of
from dslpar.schema.sections import ContextParallel, PipelineParallel, Spec, TensorParallel

SMALL_SIZES = (2, 3, 4)
"""Possible sizes of an axis in a small world, in order of preference."""

Sizes = Mapping[str, int]
"""Number of ranks along each independent axis, by name."""


class Axes(NamedTuple):
    """The independent axes of a layout, and how the tensor mode's ranks follow from them."""

    sizes: dict[str, int]
    """The layout's own sizes, by name: pipe, data, context, and the mode's axes.

    If data ranks hold different experts, data is divided into e (`TensorMesh.e`) and data, the ranks with equal ones.
    """
    powers: dict[str, int]
    """Exponent of an axis in the world size: 3 for a cube's side."""
    ring: str = ""
    """Name of the axis of ring attention, if any. With two ranks, both directions of a ring are the same."""
    hybrid: bool = False
    """True if neighbours on the ring's axis also exchange heads (Ulysses). Both together need at least four ranks."""

    def world(self, sizes: Sizes) -> int:
        """Return the number of ranks."""
        return math.prod(size ** self.powers[name] for name, size in sizes.items())

    @property
    def used(self) -> tuple[str, ...]:
        """Axes of more than one rank."""
        return tuple(name for name, size in self.sizes.items() if size > 1)


class SmallWorlds(NamedTuple):
    """Small worlds in which to prove a layout."""

    worlds: tuple[dict[str, int], ...]
    """The sizes of all axes in each world."""
    apart: tuple[tuple[str, str], ...]
    """Pairs of axes that are together in no world, since there are too few ranks."""
    ranks_needed: int
    """The fewest ranks for all axes together."""

    @property
    def all_together(self) -> bool:
        """True if one world has all axes."""
        return len(self.worlds) == 1


class TooFewRanksError(ValueError):
    """An axis needs more ranks than allowed; the text has the number."""


_MODE_AXES: Mapping[str, dict[str, int]] = {
    "1d": {"y": 1},
    "2d": {"q": 2},
    "2.5d": {"d": 1, "q": 2},
    "3d": {"q": 3},
    "sequence": {"d": 1},
    "cuboid": {"q": 1, "y": 1, "z": 1},
}
"""The independent axes of each mode, with their powers; a square's and a cube's side is called q."""


def axes_of(spec: Spec, mesh: Mesh) -> Axes:
    """Return the axes of a resolved layout."""
    sizes, powers = {"pipe": mesh.pipe, "data": mesh.data}, {"pipe": 1, "data": 1}
    tensor = tensor_of(spec)
    if tensor is not None and tensor.mode is not None and tensor.size > 1:
        for name, power in _MODE_AXES[tensor.mode].items():
            sizes[name], powers[name] = getattr(mesh.tensor, name), power
    if spec.parallel.context is not None and spec.parallel.context.size > 1:
        # With or without a tensor mode; without one, mesh.tensor has the mode "sequence".
        sizes["context"], powers["context"] = spec.parallel.context.size, 1
    if mesh.tensor.e > 1:
        sizes["data"], sizes["e"], powers["e"] = mesh.data // mesh.tensor.e, mesh.tensor.e, 1
    along = "context" if "context" in sizes else "d"
    cuboid = mesh.tensor
    return Axes(sizes, powers, ring=along if cuboid.ring > 1 else "", hybrid=cuboid.ring > 1 and cuboid.ulysses > 1)


def data_size(sizes: Sizes) -> int:
    """Return the number of replicas in a world of these sizes."""
    return sizes["data"] * sizes.get("e", 1)


def small_worlds(axes: Axes, max_ranks: int, divide: bool = False) -> SmallWorlds:
    """Choose few worlds of at most `max_ranks` ranks that contain each pair of axes that fits.

    `divide`: the sizes of all axes but pipe and data must divide the layout's sizes. A model whose sizes cannot change
        needs this.

    Raises:
        TooFewRanksError: an axis fits into no world, even alone.
    """
    least = {name: min(_options(axes, name, divide)) if size > 1 else 1 for name, size in axes.sizes.items()}
    needed = axes.world(least)
    if needed <= max_ranks:
        return SmallWorlds((_choose(axes, axes.used, max_ranks, divide),), (), needed)
    alone = {name: least[name] ** axes.powers[name] for name in axes.used}
    if max(alone.values()) > max_ranks:
        name = max(alone, key=alone.__getitem__)
        message = f"axis {name} alone needs {alone[name]} ranks, and there are {max_ranks}; all axes need {needed}"
        raise TooFewRanksError(message)
    chosen: list[tuple[str, ...]] = []
    pairs = set(combinations(axes.used, 2))
    for count in range(len(axes.used) - 1, 0, -1):
        for names in combinations(axes.used, count):
            fits = math.prod(least[name] ** axes.powers[name] for name in names) <= max_ranks
            is_new = any(set(pair) <= set(names) for pair in pairs) or not any(set(names) <= set(c) for c in chosen)
            if fits and is_new:
                chosen.append(names)
                pairs -= {pair for pair in pairs if set(pair) <= set(names)}
    return SmallWorlds(tuple(_choose(axes, names, max_ranks, divide) for names in chosen), tuple(sorted(pairs)), needed)


def _choose(axes: Axes, names: tuple[str, ...], max_ranks: int, divide: bool) -> dict[str, int]:
    """Return sizes for these axes; other axes have one rank.

    In order of preference: a ring has a direction (three ranks or more), sizes differ, and the world is small.
    """
    options = [_options(axes, name, divide) for name in names]
    fits: list[tuple[int, ...]] = [
        sizes for sizes in product(*options) if axes.world(dict(zip(names, sizes, strict=True))) <= max_ranks
    ]
    assert fits or not names, "two ranks an axis were counted to fit"

    def order(sizes: Iterable[int]) -> tuple[bool, int, int, list[int]]:
        listed = list(sizes)
        named = dict(zip(names, listed, strict=True))
        has_no_direction = named.get(axes.ring) == 2
        return has_no_direction, len(listed) - len(set(listed)), axes.world(named), listed

    best = dict(zip(names, min(fits, key=order), strict=True)) if names else {}
    return {name: best.get(name, 1) for name in axes.sizes}


def _options(axes: Axes, name: str, divide: bool) -> list[int]:
    """Return the sizes that an axis of more than one rank may have in a small world."""
    size, must_divide = axes.sizes[name], divide and name not in ("pipe", "data", "e")
    smallest: tuple[int, ...] = SMALL_SIZES
    if axes.hybrid and name == axes.ring:
        smallest = (4, 6)  # pairs of neighbours that exchange heads, and a ring over two or three pairs
    sizes = [each for each in smallest if each <= size and not (must_divide and size % each)]
    return sizes or [size]


# ---- the sections of a small world ----


def parallel_of(spec: Spec, sizes: Sizes, counts: tuple[int, ...] | None) -> Spec:
    """Return the spec with a `parallel` section of these sizes, in dslpar's own form; `counts`: layers per stage."""
    parallel = spec.parallel
    given = pipeline_of(spec)
    pipeline = None
    if given is not None and sizes["pipe"] > 1:
        method = None if counts else given.method
        pipeline = PipelineParallel(size=sizes["pipe"], counts=counts, method=method)
    context = None
    if "context" in sizes and sizes["context"] > 1 and parallel.context is not None:
        context = _context(parallel.context, sizes["context"])
    tensor, expert = _tensor(tensor_of(spec), sizes), parallel.expert
    if expert is not None:
        ranks = (tensor.size if tensor else 1) * (context.size if context else 1)
        expert = replace(expert, size=ranks * sizes.get("e", 1))
    dist = replace(
        spec.train.dist,
        data_parallel_size=None,
        tensor_parallel_size=None,
        pipeline_parallel_size=None,
        pipeline_num_layers=None,
        custom_pipeline_stage_id=None,
    )
    return replace(
        spec,
        parallel=replace(
            parallel,
            data=replace(parallel.data, size=None),
            pipeline=pipeline,
            context=context,
            expert=expert,
            tensor=tensor,
        ),
        train=replace(spec.train, dist=dist),
    )


def _tensor(tensor: TensorParallel | None, sizes: Sizes) -> TensorParallel | None:
    if tensor is None or tensor.mode is None or tensor.size == 1:
        return None
    names = _MODE_AXES[tensor.mode]
    size = math.prod(sizes[name] ** power for name, power in names.items())
    if size == 1:
        return None
    depth = sizes["d"] if tensor.mode == "2.5d" else None
    shape = (sizes["q"], sizes["y"], sizes["z"]) if tensor.mode == "cuboid" else None
    return replace(tensor, size=size, depth=depth, shape=shape)


def _context(context: ContextParallel, size: int) -> ContextParallel:
    ulysses = context.ulysses_size
    if ulysses is not None:
        ulysses = next((each for each in (2, 1) if size % each == 0 and each <= ulysses), 1)
    return replace(context, size=size, ulysses_size=ulysses)


def names_of_axes(sizes: Sizes) -> Iterator[str]:
    """Yield 'pipe 2', 'q 2', ... for each axis of more than one rank."""
    yield from (f"{name} {size}" for name, size in sizes.items() if size > 1)
