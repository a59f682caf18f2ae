"""Picture of the mesh: one cell per rank with its number and coordinate, grouped by node, shaded by pipeline rank.

    made = draw(job.mesh, per_node=8)

On a page the reader can point at a rank, and the page's script marks the rank's group on an axis. The attribute
`data-axes` has the sizes and strides of each axis for the script, slowest first. Without the script, each cell's
tooltip names the rank's groups.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import groupby, islice
from math import ceil
from typing import NamedTuple

from dslpar.core.mesh import TENSOR_AXES, Mesh, expand
from dslpar.reporting.picture import WIDTH, Picture, bar, label, shown

AXES = ("pipe", "data", "tensor", "x", "y", "z")
MOST_RANKS = 512
"""The most ranks that are drawn. If a mesh has more, only a part of it is drawn (`drawn_ranks`)."""
_MOST_DETAILED = 128
"""The most ranks whose cells have room for coordinates."""
_MOST_NAMED = 16
"""The most ranks of a group that a tooltip names."""
_COLUMNS = 8
_PAD, _HEAD, _BETWEEN = 10, 24, 16


class _Cell(NamedTuple):
    """Sizes of a rank's cell, and of the gap between two cells, in pixels."""

    width: float
    height: float
    gap: float

    def node_size(self, ranks: int) -> tuple[float, float]:
        columns, rows = min(ranks, _COLUMNS), ceil(ranks / _COLUMNS)
        width, height = columns * (self.width + self.gap) - self.gap, rows * (self.height + self.gap) - self.gap
        return width + 2 * _PAD, height + _PAD + _HEAD


def axes_of(mesh: Mesh) -> list[str]:
    """Return the axes with groups of several ranks; x, y and z only if they differ from the tensor axis."""
    several = [axis for axis in AXES if mesh.size(axis) > 1]
    cuboid = [axis for axis in several if axis in ("x", "y", "z")]
    return [axis for axis in several if axis not in cuboid or len(cuboid) > 1]


def node_size_of(world_size: int, per_node: int | None) -> int:
    """Return the devices per node: `per_node` if known, else 8 if that divides the number of ranks, else all ranks."""
    if per_node is not None:
        return per_node
    return 8 if world_size % 8 == 0 else world_size


def axis_name(mesh: Mesh, axis: str) -> str:
    """Return the display name of one axis, or of several axes that are separated by spaces.

    All tensor axes together are "tensor", and d and q together are "x". If one of d and q has a single rank, the other
    is "x".
    """
    parts, cuboid = axis.split(), mesh.tensor
    if all(each in TENSOR_AXES for each in parts) and mesh.size(*parts) == cuboid.size:
        return "tensor"
    if set(parts) == {"d", "q"}:
        return "x"
    is_x = {"q"} if cuboid.d == 1 else {"d"} if cuboid.q == 1 else set()
    return " ".join("x" if each in is_x else each for each in parts)


def drawn_ranks(mesh: Mesh) -> tuple[Sequence[int], str]:
    """Return the ranks to draw, and a note that says which they are; the note is empty if all ranks are drawn."""
    if mesh.world_size <= MOST_RANKS:
        return range(mesh.world_size), ""
    for axes, name in ((("pipe", "tensor"), "one replica"), (("tensor",), "one tensor group")):
        if mesh.size(*axes) <= MOST_RANKS:
            peers = mesh.peers(0, *axes)
            return peers, f"{name} is drawn, {len(peers):,} of {mesh.world_size:,} ranks"
    return range(MOST_RANKS), f"the first {MOST_RANKS:,} of {mesh.world_size:,} ranks are drawn"


def draw(mesh: Mesh, per_node: int) -> Picture:
    """Draw the mesh: all ranks, or the part that `drawn_ranks` selects."""
    ranks, note = drawn_ranks(mesh)
    axes = axes_of(mesh)
    cuboid = [axis for axis in axes if axis in ("x", "y", "z")]
    detailed = len(ranks) <= _MOST_DETAILED
    cell = _Cell(66, 48 if cuboid else 36, 4) if detailed else _Cell(30, 24, 3)
    nodes = [(node, list(each)) for node, each in groupby(ranks, key=lambda rank: rank // per_node)]
    width, height = cell.node_size(max(len(each) for _, each in nodes))
    across = max(1, int((WIDTH + _BETWEEN) // (width + _BETWEEN)))
    elements = []
    for index, (node, held) in enumerate(nodes):
        x, y = index % across * (width + _BETWEEN) + 1, index // across * (height + _BETWEEN) + 1
        elements.append(bar(x, y, width - 2, height, "node", more=' rx="8"'))
        elements.append(label(x + _PAD, y + 16, f"node {node}", "soft"))
        for place, rank in enumerate(held):
            left = x + _PAD - 1 + place % _COLUMNS * (cell.width + cell.gap)
            top = y + _HEAD + place // _COLUMNS * (cell.height + cell.gap)
            elements += _rank(mesh, rank, left, top, cell, detailed, cuboid, is_first=rank == ranks[0])
    bottom = ceil(len(nodes) / across) * (height + _BETWEEN) + 2
    legend = _legend(mesh, axes, note, detailed)
    if legend:
        elements.append(label(1, bottom + 10, legend, "soft"))
    groups = {axis: [[mesh.sizes[each], mesh.strides[each]] for each in _in_order(mesh, axis)] for axis in axes}
    elements.append(f'<metadata id="mesh-axes" data-axes="{shown(json.dumps(groups))}"/>')
    several = f"{mesh.world_size:,} ranks in nodes of {per_node}" + (f"; {note}" if note else "")
    order = f"order {', '.join(mesh.order)}, slow to fast"
    return Picture(
        "mesh", "Mesh", f"{several}; {order}", WIDTH, bottom + (18 if legend else -12), elements, is_interactive=True
    )


def coordinate(mesh: Mesh, rank: int) -> str:
    """Return a rank's coordinate on the axes with several ranks: "pipe 1, data 0, tensor 1"."""
    named = [f"{axis} {mesh.index(rank, axis)}" for axis in axes_of(mesh)]
    return ", ".join(named) or "alone"


def group_rows(mesh: Mesh, most: int = 6) -> Iterator[tuple[str, str, str, str]]:
    """Yield the table's rows: axis, ranks per group, number of groups, and the first groups."""
    for axis in axes_of(mesh):
        size, count = mesh.size(axis), mesh.world_size // mesh.size(axis)
        listed = "  ".join(_listed(ranks) for ranks in islice(mesh.groups(axis), most))
        yield axis, f"{size:,}", f"{count:,}", listed + (" ..." if count > most else "")


def _listed(ranks: Sequence[int]) -> str:
    named = ", ".join(str(rank) for rank in ranks[:_MOST_NAMED])
    return f"[{named}{', ...' if len(ranks) > _MOST_NAMED else ''}]"


def _group(mesh: Mesh, rank: int, axis: str) -> str:
    size = mesh.size(axis)
    return _listed(mesh.peers(rank, axis)) if size <= MOST_RANKS else f"{size:,} ranks"


def _in_order(mesh: Mesh, axis: str) -> list[str]:
    wanted = expand((axis,))
    return [each for each in mesh.sizes if each in wanted and mesh.sizes[each] > 1]


def _rank(
    mesh: Mesh, rank: int, x: float, y: float, cell: _Cell, detailed: bool, cuboid: list[str], *, is_first: bool
) -> Iterator[str]:
    name = f"rank {rank}: {coordinate(mesh, rank)}"
    groups = "".join(f"&#10;{axis}: {_group(mesh, rank, axis)}" for axis in axes_of(mesh))
    # Tab reaches only the first rank, and the arrow keys reach the others. Hundreds of tab stops would be in the way.
    yield f'<g class="rank" role="img" tabindex="{0 if is_first else -1}" data-rank="{rank}" aria-label="{name}">'
    yield f"<title>{name}{groups}</title>"
    yield bar(x, y, cell.width, cell.height, "cell", more=f' rx="4" fill-opacity="{_opacity(mesh, rank):.2f}"')
    middle = x + cell.width / 2
    if not detailed:
        yield label(middle, y + 16, rank, "small", "middle")
    else:
        yield label(middle, y + 16, rank, "number", "middle")
        outer = " ".join(f"{axis[0]}{mesh.index(rank, axis)}" for axis in axes_of(mesh) if axis in ("pipe", "data"))
        inner = " ".join(f"{axis}{mesh.index(rank, axis)}" for axis in cuboid)
        if not cuboid and mesh.tensor.size > 1:
            outer += f" t{mesh.index(rank, 'tensor')}"
        yield label(middle, y + 29, outer.strip(), "small", "middle")
        if cuboid:
            yield label(middle, y + 41, inner, "small", "middle")
    yield "</g>"


def _opacity(mesh: Mesh, rank: int) -> float:
    """Return the opacity of a cell, from the lightest for the first stage to the strongest for the last."""
    return 0.08 + 0.34 * mesh.index(rank, "pipe") / max(1, mesh.pipe - 1)


def _legend(mesh: Mesh, axes: Sequence[str], note: str, detailed: bool) -> str:
    parts = [f"{note[0].upper()}{note[1:]}."] if note else []
    letters = [f"{axis[0]} {axis}" for axis in axes if axis in ("pipe", "data")]
    letters += ["t tensor"] if mesh.tensor.size > 1 and not {"x", "y", "z"} & set(axes) else []
    if detailed and letters:
        parts.append(f"In each cell: the rank, and its coordinate ({', '.join(letters)}).")
    if mesh.pipe > 1:
        parts.append("The stronger a shade, the later in the pipeline.")
    return " ".join(parts)
