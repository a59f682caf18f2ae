"""Picture of the traffic: bytes that a rank sends in a step along each axis, within its node and between nodes.

made = draw(forecast.time.sent, job.mesh)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dslpar.core.mesh import Mesh
from dslpar.forecast.part_terms import Sent
from dslpar.planner.pictures.mesh import axis_name
from dslpar.reporting.picture import CHAR, WIDTH, Picture, bar, label

LINKS = {False: "within a node", True: "between nodes"}
_LEFT, _RIGHT, _TOP, _ROW, _BAR = 80, 190, 28, 28, 20
_INNER = WIDTH - _LEFT - _RIGHT
_HATCH = (
    '<defs><pattern id="traffic-hatch" width="7" height="7" patternUnits="userSpaceOnUse"'
    ' patternTransform="rotate(45)"><line class="hatch" x1="0" x2="0" y1="0" y2="7"/></pattern></defs>'
)


def size(num_bytes: float) -> str:
    """Return a number of bytes as text, in the largest unit that gives a number of at least 1.

    >>> size(3 * 2**30), size(1536), size(12)
    ('3.00 GiB', '1.50 KiB', '12 B')
    """
    for unit, factor in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.2f} {unit}"
    return f"{num_bytes:.0f} B"


def draw(sent: Sequence[Sent], mesh: Mesh) -> Picture:
    """Draw one bar per axis and link; `sent` is not empty."""
    most = max(each.num_bytes for each in sent) or 1.0
    elements = [_HATCH, *_legend()]
    for row, each in enumerate(sent):
        y, width = _TOP + _ROW * row, _INNER * each.num_bytes / most
        told = f"{size(each.num_bytes)} {LINKS[each.across]}"
        elements.append(label(_LEFT - 8, y + 14, axis_name(mesh, each.axis), anchor="end"))
        elements.append(bar(_LEFT, y, width, _BAR, _css(each.across), f"axis {axis_name(mesh, each.axis)}: {told}"))
        if each.across:
            elements.append(
                bar(_LEFT, y, width, _BAR, "hatched", more=' fill="url(#traffic-hatch)" pointer-events="none"')
            )
        elements.append(label(_LEFT + width + 8, y + 14, told))
    bottom = _TOP + _ROW * len(sent)
    names = {part for each in sent for part in axis_name(mesh, each.axis).split()}
    parts = "; x is d and q" if names & {"d", "q"} else ""
    elements.append(label(_LEFT, bottom + 14, f"bytes that a rank sends in a step, by axis{parts}", "soft"))
    total = sum(each.num_bytes for each in sent)
    return Picture(
        "traffic", "Traffic", f"A rank sends {size(total)} in a step, by axis and link", WIDTH, bottom + 24, elements
    )


def _css(across: bool) -> str:
    return "between" if across else "within"


def _legend() -> Iterator[str]:
    x = float(_LEFT)
    for across, name in LINKS.items():
        yield bar(x, 2, 12, 12, _css(across))
        if across:
            yield bar(x, 2, 12, 12, "hatched", more=' fill="url(#traffic-hatch)"')
        yield label(x + 17, 12, name)
        x += 38 + CHAR * len(name)


def rows(sent: Sequence[Sent], mesh: Mesh) -> Iterator[tuple[str, str, str]]:
    """Yield the table's rows: axis, link, bytes."""
    for each in sent:
        yield axis_name(mesh, each.axis), LINKS[each.across], size(each.num_bytes)
