"""Plot curves as an SVG: one panel per metric over a shared x axis.

    Path("curves.svg").write_text(draw(panels, "tokens", log=("loss",)))

Colours are Okabe and Ito's, which colour-blind readers can tell apart too. After eight curves the colours repeat with
other dashes. The SVG needs no library, scripts or fonts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from html import escape

from dslpar.core.visible import visible
from dslpar.reporting.curves import Curve, Panel, segments, thinned
from dslpar.reporting.picture import Picture
from dslpar.reporting.scale import Scale, label, make_scale

COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#999999")
DASHES = ("", "6 3", "2 3", "8 3 2 3")
X_TITLES = {"step": "step", "tokens": "tokens", "time": "seconds in steps"}

_WIDTH, _LEFT, _RIGHT = 860, 74, 18
_PANEL, _ABOVE, _BELOW = 220, 26, 24
_INNER = _WIDTH - _LEFT - _RIGHT
_CHAR = 7
"""Approximate width in pixels of a character of the legend."""
_LINE = 18
_STYLE = (
    "text{font:12px sans-serif;fill:#333}.title{font-weight:bold}.grid{stroke:#e2e2e2}.frame{stroke:#999;fill:none}"
    ".curve{fill:none;stroke-width:1.5;stroke-linejoin:round}"
)


def draw(panels: Sequence[Panel], x: str = "step", log: Collection[str] = ()) -> str:
    """Draw panels as the text of an SVG file; `log` names the metrics with a logarithmic scale."""
    height = _height(panels)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" viewBox="0 0 {_WIDTH} {height}">',
        f"<style>{_STYLE}</style>",
        f'<rect width="{_WIDTH}" height="{height}" fill="#fff"/>',
        *_elements(panels, x, log),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def picture(panels: Sequence[Panel], name: str, title: str, description: str) -> Picture:
    """Draw panels over steps as a picture for a page; every curve after the first is dashed."""
    elements = list(_elements(panels, "step", (), dashed=True))
    return Picture(name, title, description, _WIDTH, _height(panels), elements)


def _height(panels: Sequence[Panel]) -> int:
    return _top(panels) + len(panels) * (_PANEL + _ABOVE + _BELOW) + _LINE


def _top(panels: Sequence[Panel]) -> int:
    return 12 + _LINE * len(_legend_rows(_runs(panels)))


def _runs(panels: Sequence[Panel]) -> list[str]:
    return [curve.run for curve in panels[0].curves] if panels else []


def _elements(panels: Sequence[Panel], x: str, log: Collection[str], dashed: bool = False) -> Iterator[str]:
    x_scale = make_scale(at for panel in panels for curve in panel.curves for at in curve.xs)
    yield from _legend(_legend_rows(_runs(panels)), dashed)
    for index, panel in enumerate(panels):
        top = _top(panels) + index * (_PANEL + _ABOVE + _BELOW) + _ABOVE
        yield from _panel(panel, top, x_scale, panel.metric in log, dashed)
    yield _text(_LEFT + _INNER / 2, _height(panels) - 8, X_TITLES[x], "middle")


def _panel(panel: Panel, top: float, x_scale: Scale, log: bool, dashed: bool) -> Iterator[str]:
    scale = make_scale(panel.finite(), log)
    title = panel.metric + (" (log)" if log else "") + ("" if panel.finite() else ": no values")
    yield _text(_LEFT, top - 8, title, css="title")
    for tick in scale.ticks(5):
        y = top + _PANEL * (1 - scale.at(tick))
        yield f'<line class="grid" x1="{_LEFT}" x2="{_LEFT + _INNER}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield _text(_LEFT - 6, y + 4, label(tick), "end")
    for tick in x_scale.ticks(8):
        x = _LEFT + _INNER * x_scale.at(tick)
        yield f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{top + _PANEL}"/>'
        yield _text(x, top + _PANEL + 16, label(tick), "middle")
    for number, curve in enumerate(panel.curves):
        yield from _curve(curve, number, top, x_scale, scale, dashed)
    yield f'<rect class="frame" x="{_LEFT}" y="{top}" width="{_INNER}" height="{_PANEL}"/>'


def _curve(curve: Curve, number: int, top: float, x_scale: Scale, scale: Scale, dashed: bool) -> Iterator[str]:
    for points in segments(curve, scale.log):
        drawn = [(_LEFT + _INNER * x_scale.at(x), top + _PANEL * (1 - scale.at(y))) for x, y in thinned(points, _INNER)]
        if len(drawn) == 1:  # a line of one point is invisible
            yield f'<circle cx="{drawn[0][0]:.1f}" cy="{drawn[0][1]:.1f}" r="2" fill="{COLORS[number % len(COLORS)]}"/>'
        else:
            listed = " ".join(f"{x:.1f},{y:.1f}" for x, y in drawn)
            yield f'<polyline class="curve" {_stroke(number, dashed)} points="{listed}"/>'


def _stroke(number: int, dashed: bool) -> str:
    dash = DASHES[(number if dashed else number // len(COLORS)) % len(DASHES)]
    return f'stroke="{COLORS[number % len(COLORS)]}"' + (f' stroke-dasharray="{dash}"' if dash else "")


def _legend_rows(runs: Sequence[str]) -> list[list[tuple[int, float, str]]]:
    """Return the legend's rows of entries (number of the run, x position, name)."""
    rows: list[list[tuple[int, float, str]]] = [[]]
    x: float = _LEFT
    for number, run in enumerate(runs):
        width = 34 + _CHAR * len(visible(run))
        if rows[-1] and x + width > _WIDTH - _RIGHT:
            rows.append([])
            x = _LEFT
        rows[-1].append((number, x, run))
        x += width
    return rows


def _legend(rows: Sequence[Sequence[tuple[int, float, str]]], dashed: bool) -> Iterator[str]:
    for row, entries in enumerate(rows):
        y = 20 + _LINE * row
        for number, x, run in entries:
            yield f'<line class="curve" {_stroke(number, dashed)} x1="{x}" x2="{x + 20}" y1="{y - 4}" y2="{y - 4}"/>'
            yield _text(x + 24, y, run)


def _text(x: float, y: float, text: str, anchor: str = "start", css: str = "") -> str:
    css = f' class="{css}"' if css else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{css}>{escape(visible(text))}</text>'
