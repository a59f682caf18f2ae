"""Classes of pipeline stages and of ranks that do the same, so that a dry run needs only one of each class.

- Layers are alike if the same functions build and apply them, whatever their number and name.
- Stages are alike if they have the same layers in the same order, and the same place: first, last, or between.
- Ranks that differ only in their data coordinate are alike, since nothing but experts is sharded over data.
- Ranks that differ in tensor coordinates have different shards of the same shapes, and so have the ranks of different
  experts. A dry run compares the first and the last rank of a tensor group, or of a group that holds all experts.

In the dry run of a class, consecutive layers that are alike are shortened to one layer, or to the group of layers that
activation checkpointing recomputes together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from dslpar.core.mesh import TENSOR_AXES, Mesh
from dslpar.dry_run.stage import Part
from dslpar.models.layered import LayerSpec

Coord = dict[str, int]


@dataclass(frozen=True)
class StageClass:
    """Stages that are alike."""

    stages: tuple[int, ...]
    part: Part
    """Layers of the first of these stages, without repetitions of layers that are alike."""
    whole: Part
    """All layers of the first of these stages."""


def stage_classes(specs: Sequence[LayerSpec], parts: Sequence[int], interval: int) -> list[StageClass]:
    """Return the classes of stages, ordered by their first stage.

    `parts` has the position of each stage's first layer, and at the end the number of layers. `interval` is the number
    of layers that are recomputed together, 0 without recomputation.
    """
    kinds = _kinds(specs)
    found: dict[tuple[object, ...], list[int]] = {}
    part_of: dict[int, tuple[Part, Part]] = {}
    num = len(parts) - 1
    for stage in range(num):
        positions = range(parts[stage], parts[stage + 1])
        short = _shortened(positions, kinds, max(interval, 1))
        ends = stage == 0, stage == num - 1
        part_of[stage] = Part(short, *ends), Part(positions, *ends)
        found.setdefault((*ends, *(kinds[position] for position in short)), []).append(stage)
    return [StageClass(tuple(stages), *part_of[stages[0]]) for stages in found.values()]


def _kinds(specs: Sequence[LayerSpec]) -> list[int]:
    """Return, for each layer, the position of the first layer like it.

    A layer with tied weights is like a layer with the same tied weights, and like no other.
    """
    first: dict[tuple[int, int, bool, str | None], int] = {}
    return [
        first.setdefault((id(spec.build), id(spec.forward), spec.recomputable, spec.tied), position)
        for position, spec in enumerate(specs)
    ]


def _shortened(positions: Sequence[int], kinds: Sequence[int], most: int) -> tuple[int, ...]:
    runs = groupby(positions, key=lambda position: kinds[position])
    return tuple(position for _, run in runs for position in list(run)[:most])


def representatives(mesh: Mesh) -> list[Coord]:
    """Return the coordinates of the first and the last rank of a tensor group, or of a group that holds all experts."""
    first = dict.fromkeys(TENSOR_AXES, 0)
    last = {axis: mesh.sizes[axis] - 1 for axis in TENSOR_AXES}
    if mesh.size("e") > 1:
        first, last = {"data": 0, **first}, {"data": mesh.size("e") - 1, **last}
    return [first] if first == last else [first, last]
