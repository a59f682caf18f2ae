"""Which stages, and which ranks, must do the same: one of each class stands for all.

Two layers are alike where one function builds them, so that whatever their number and name they do the same. Stages are
alike where their layers are, in order, and where they stand: at the model's beginning, at its end, or between. Runs of
equal layers are shortened to one, or to the group that activation checkpointing recomputes together.

Of ranks, those that differ in their data coordinate alone are alike, since nothing cuts over data; those that differ in
tensor coordinates have other pieces of equal shapes. The first and the last of a tensor group stand for it.
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
    """Stages that do the same."""

    stages: tuple[int, ...]
    part: Part
    """The layers of the first of them, shortened."""
    whole: Part
    """All layers of the first of them."""


def stage_classes(specs: Sequence[LayerSpec], parts: Sequence[int], interval: int) -> list[StageClass]:
    """Return the classes of stages, in the order of their first ones; `parts` say where each stage begins."""
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
    """Return of each layer the position of the first that is like it; a tied layer is like none, but for its like."""
    first: dict[tuple[int, int, bool, str | None], int] = {}
    return [
        first.setdefault((id(spec.build), id(spec.forward), spec.recomputable, spec.tied), position)
        for position, spec in enumerate(specs)
    ]


def _shortened(positions: Sequence[int], kinds: Sequence[int], most: int) -> tuple[int, ...]:
    runs = groupby(positions, key=lambda position: kinds[position])
    return tuple(position for _, run in runs for position in list(run)[:most])


def representatives(mesh: Mesh) -> list[Coord]:
    """Return the tensor coordinates of the first and the last rank of a tensor group."""
    first = dict.fromkeys(TENSOR_AXES, 0)
    last = {axis: mesh.sizes[axis] - 1 for axis in TENSOR_AXES}
    return [first] if first == last else [first, last]
