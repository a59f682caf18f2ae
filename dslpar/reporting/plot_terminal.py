"""Plot curves on a terminal: one panel per metric, in Braille dots or in letters.

    sys.stdout.write(draw(panels, "step", Terminal(width=100, unicode=True, colors=True)))

A Braille character has 2 by 4 dots, so 80 columns are 160 points (drawille's idea). Dots are used for a single run, and
for several runs in colour. Otherwise dots of different runs would look alike, so each run has its own letter: a, b, c.
Letters are also used if the terminal's encoding has no Braille characters.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple, TextIO

from dslpar.core.visible import visible
from dslpar.reporting.curves import Curve, Panel, segments
from dslpar.reporting.plot_svg import X_TITLES
from dslpar.reporting.scale import Scale, label, make_scale

_ROWS = 10
_LABEL = 9
"""Columns for the labels to the left of a panel."""
_COLORS = (34, 31, 32, 35, 33, 36)
"""SGR codes: blue, red, green, magenta, yellow, cyan."""
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""Braille's bits by row and column."""
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


class Terminal(NamedTuple):
    """Capabilities of a terminal."""

    width: int = 80
    """Columns."""
    unicode: bool = True
    """True if the terminal's encoding has Braille and line-drawing characters."""
    colors: bool = False
    """True if the terminal shows colours."""


def terminal_of(file: TextIO, environ: Mapping[str, str]) -> Terminal:
    """Return the capabilities of the terminal that `file` writes to; NO_COLOR and TERM=dumb turn colours off."""
    try:
        "\u28ff\u2502".encode(file.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        has_unicode = False
    else:
        has_unicode = True
    colors = file.isatty() and not environ.get("NO_COLOR") and environ.get("TERM") != "dumb"
    return Terminal(max(shutil.get_terminal_size().columns, 40), has_unicode, colors)


def draw(panels: Sequence[Panel], x: str, terminal: Terminal, log: Collection[str] = ()) -> str:
    """Draw panels in lines of at most the terminal's width; `log` names the metrics with a logarithmic scale."""
    x_scale = make_scale(at for panel in panels for curve in panel.curves for at in curve.xs)
    lines: list[str] = []
    for panel in panels:
        lines += [*_panel(panel, x_scale, terminal, panel.metric in log), ""]
    if lines:
        lines[-1:] = [*_x_axis(x_scale, x, terminal), *_legend(panels[0].curves, terminal)]
    return "".join(line.rstrip() + "\n" for line in lines)


def _panel(panel: Panel, x_scale: Scale, terminal: Terminal, log: bool) -> Iterator[str]:
    scale, width = make_scale(panel.finite(), log), terminal.width - _LABEL - 2
    yield visible(panel.metric + (" (log)" if log else "") + ("" if panel.finite() else ": no values"))
    dotted = terminal.unicode and (terminal.colors or len(panel.curves) == 1)
    cells = _braille(panel.curves, x_scale, scale, width) if dotted else _letters(panel.curves, x_scale, scale, width)
    labels = {round((1 - scale.at(tick)) * (_ROWS - 1)): label(tick) for tick in scale.ticks(4)}
    for row in range(_ROWS):
        shown = "".join(_cell(cells.get((row, column)), terminal) for column in range(width))
        yield f"{labels.get(row, ''):>{_LABEL}} {'│' if terminal.unicode else '|'}{shown}"


Cells = dict[tuple[int, int], tuple[str, int]]
"""Plot cells: (row, column) -> (character, number of the run)."""


def _braille(curves: Sequence[Curve], x_scale: Scale, scale: Scale, width: int) -> Cells:
    dots: dict[tuple[int, int], tuple[int, int]] = {}
    for number, curve in enumerate(curves):
        for row, column in _points(curve, x_scale, scale, 2 * width, 4 * _ROWS):
            at = row // 4, column // 2
            bits, owner = dots.get(at, (0, number))
            own = bits if owner == number else 0  # the later run is on top
            dots[at] = own | _DOTS[row % 4][column % 2], number
    return {at: (chr(0x2800 + bits), number) for at, (bits, number) in dots.items()}


def _letters(curves: Sequence[Curve], x_scale: Scale, scale: Scale, width: int) -> Cells:
    cells: Cells = {}
    for number, curve in enumerate(curves):
        for at in _points(curve, x_scale, scale, width, _ROWS):
            cells[at] = (_LETTERS[number % len(_LETTERS)], number)
    return cells


def _points(curve: Curve, x_scale: Scale, scale: Scale, columns: int, rows: int) -> Iterator[tuple[int, int]]:
    """Yield (row, column) of a curve's points and of the lines between them; row 0 is the top."""
    for points in segments(curve, scale.log):
        drawn = [(round((1 - scale.at(y)) * (rows - 1)), round(x_scale.at(x) * (columns - 1))) for x, y in points]
        yield drawn[0]
        for (row, column), (next_row, next_column) in itertools.pairwise(drawn):
            steps = max(abs(next_row - row), abs(next_column - column))
            for step in range(1, steps + 1):
                share = step / steps
                yield round(row + (next_row - row) * share), round(column + (next_column - column) * share)


def _cell(cell: tuple[str, int] | None, terminal: Terminal) -> str:
    if cell is None:
        return " "
    text, number = cell
    return f"\x1b[{_COLORS[number % len(_COLORS)]}m{text}\x1b[0m" if terminal.colors else text


def _x_axis(x_scale: Scale, x: str, terminal: Terminal) -> Iterator[str]:
    width = terminal.width - _LABEL - 2
    yield " " * (_LABEL + 1) + ("└" + "─" * width if terminal.unicode else "+" + "-" * width)
    line = [" "] * width
    for tick in x_scale.ticks(6):
        text = label(tick)
        start = min(max(round(x_scale.at(tick) * (width - 1)) - len(text) // 2, 0), width - len(text))
        if all(char == " " for char in line[max(start - 1, 0) : start + len(text) + 1]):
            line[start : start + len(text)] = text
    yield " " * (_LABEL + 2) + "".join(line)
    yield " " * (_LABEL + 2) + X_TITLES[x].center(width)


def _legend(curves: Sequence[Curve], terminal: Terminal) -> Iterator[str]:
    dotted = terminal.unicode and (terminal.colors or len(curves) == 1)
    for number, curve in enumerate(curves):
        mark = _cell(("⠤⠤" if dotted else _LETTERS[number % len(_LETTERS)], number), terminal)
        yield f"{' ' * (_LABEL + 2)}{mark} {visible(curve.run)}"
