"""Picture of a terminal's screen: text in SVG, in the colours of the reader's scheme, light or dark.

    svg(terminal.screen, title, description)

Runs of cells with one style are one element, so a screen takes some kilobytes. Colours are those of the sixteen of a
terminal, as CSS variables; the program's own choice among them is kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from itertools import groupby
from typing import NamedTuple

import pyte

WIDTH, HEIGHT = 7.8, 17
"""Pixels of a cell. WIDTH is an advance that common monospaced fonts have at 13 pixels; `textLength` makes it exact."""
_MARGIN = 12
_COLOURS = {
    "black": ("#f6f8fa", "#171d24"),
    "red": ("#b3261e", "#ff8f85"),
    "green": ("#1a7f37", "#7ee787"),
    "brown": ("#9a6700", "#e3b341"),
    "blue": ("#0072b2", "#4aa3df"),
    "magenta": ("#8250df", "#d2a8ff"),
    "cyan": ("#0b7285", "#76e3ea"),
    "white": ("#59636e", "#9aa5b1"),
    "brightblack": ("#d8dee4", "#2b3440"),
    "brightred": ("#b3261e", "#ff8f85"),
    "brightgreen": ("#1a7f37", "#7ee787"),
    "brightbrown": ("#9a6700", "#e3b341"),
    "brightblue": ("#0072b2", "#4aa3df"),
    "brightmagenta": ("#0072b2", "#4aa3df"),
    "brightcyan": ("#59636e", "#9aa5b1"),
    "brightwhite": ("#1f2328", "#e6edf3"),
}
"""A terminal's palette on light and on dark paper, by the names that pyte gives: yellow is brown there."""


class _Style(NamedTuple):
    front: str
    back: str
    is_bold: bool
    is_underlined: bool


def svg(screen: pyte.Screen, title: str, description: str) -> str:
    """Return a picture of a screen, without empty rows at its end."""
    rows = [[*_runs(screen, row)] for row in range(screen.lines)]
    while rows and not rows[-1]:
        rows.pop()
    width, height = screen.columns * WIDTH + 2 * _MARGIN, len(rows) * HEIGHT + 2 * _MARGIN
    parts = [part for row, runs in enumerate(rows) for run in runs for part in _drawn(row, *run)]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" class="screen" role="img" aria-labelledby="title description" '
            f'width="{width:g}" height="{height:g}" viewBox="0 0 {width:g} {height:g}">',
            f'<title id="title">{escape(title)}</title>',
            f'<desc id="description">{escape(description)}</desc>',
            _style(parts),
            '<rect class="paper" width="100%" height="100%" rx="6"/>',
            *parts,
            "</svg>",
            "",
        ]
    )


def _runs(screen: pyte.Screen, row: int) -> Iterator[tuple[int, str, _Style]]:
    """Yield the first column, the text and the style of each run of a row that shows something."""
    cells = [screen.buffer[row][column] for column in range(screen.columns)]
    at_cursor = screen.cursor.x if row == screen.cursor.y and not screen.cursor.hidden else None
    styled = [(column, cell.data, _style_of(cell, column == at_cursor)) for column, cell in enumerate(cells)]
    for style, group in groupby(styled, key=lambda cell: cell[2]):
        run = [*group]
        text = "".join(data for _, data, _ in run)
        if text.strip() or style.back != "default":
            yield run[0][0], text, style


def _style_of(cell: pyte.screens.Char, is_cursor: bool) -> _Style:
    front, back = cell.fg, cell.bg
    if cell.reverse != is_cursor:
        front = back if back != "default" else "paper"
        back = cell.fg if cell.fg != "default" else "ink"
    return _Style(front, back, cell.bold, cell.underscore)


def _drawn(row: int, column: int, text: str, style: _Style) -> Iterator[str]:
    x, y = _MARGIN + column * WIDTH, _MARGIN + row * HEIGHT
    if style.back != "default":
        width = len(text) * WIDTH
        yield f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{HEIGHT}" fill="{_colour(style.back)}"/>'
    shown = text.strip()
    if not shown:
        return
    x += (len(text) - len(text.lstrip())) * WIDTH
    fill = f' fill="{_colour(style.front)}"' if style.front != "default" else ""
    bold = ' class="bold"' if style.is_bold else ""
    line = ' text-decoration="underline"' if style.is_underlined else ""
    length = len(shown) * WIDTH
    yield f'<text x="{x:g}" y="{y + 13}" textLength="{length:g}"{fill}{bold}{line}>{escape(shown)}</text>'


def _colour(name: str) -> str:
    if name in _COLOURS or name in ("paper", "ink"):
        return f"var(--{name})"
    return f"#{name}"  # one of the other 240


def _style(parts: list[str]) -> str:
    used = {name: pair for name, pair in _COLOURS.items() if any(f"var(--{name})" in part for part in parts)}
    used |= {"paper": ("#ffffff", "#0f1419"), "ink": ("#1f2328", "#e6edf3")}
    light, dark = (";".join(f"--{name}:{pair[at]}" for name, pair in used.items()) for at in (0, 1))
    return (
        f"<style>.screen{{color-scheme:light;{light}}}"
        f"@media(prefers-color-scheme:dark){{.screen{{color-scheme:dark;{dark}}}}}\n"
        ".screen{fill:var(--ink)}\n"  # inherited: a rule for `text` would come before the attributes
        ".screen text{font:13px ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace;"
        "white-space:pre}\n"
        ".screen .bold{font-weight:600}\n"
        ".screen .paper{fill:var(--paper);stroke:var(--ink);stroke-opacity:.2}</style>"
    )
