"""Picture: an SVG, standalone or inline in a page, for light and dark colour schemes, without scripts or fonts.

    made = Picture("memory", "Memory by stage", "Bars of 4 ranks", 1180, 240, ('<rect class="cell" .../>',))
    made.standalone()      # an SVG file with its own style
    made.inline()          # an element of a page whose style includes `style()`

Colours are CSS variables, so that a page can switch between light and dark. A standalone file follows the viewer's
setting. Fills with a meaning are Okabe and Ito's colours, which colour-blind readers can tell apart too. They are the
same in light and dark. Colour alone never carries information.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from importlib import resources
from typing import NamedTuple

from dslpar.core.visible import visible

WIDTH = 1180
"""Width in pixels of a picture that fills a page."""
CHAR = 6.6
"""Approximate width in pixels of a character in the font size of 12 pixels."""
_MARGIN = 16
"""Margin of a standalone picture."""

_LIGHT = {
    "paper": "#ffffff",
    "panel": "#f6f8fa",
    "ink": "#1f2328",
    "soft": "#59636e",
    "line": "#d1d9e0",
    "stage": "#0072b2",
    "mark": "#d55e00",
    "bad": "#b3261e",
}
_DARK = {
    "paper": "#0f1419",
    "panel": "#171d24",
    "ink": "#e6edf3",
    "soft": "#9aa5b1",
    "line": "#343d47",
    "stage": "#4aa3df",
    "mark": "#f08a3c",
    "bad": "#ff8f85",
}


class Picture(NamedTuple):
    """An SVG in parts."""

    name: str
    """Name of its file, and prefix of its elements' ids."""
    title: str
    description: str
    """Text for readers who do not see the picture."""
    width: float
    height: float
    elements: Sequence[str]
    is_interactive: bool = False
    """True if elements can be focused. Otherwise screen readers treat the picture as one image."""

    def standalone(self) -> str:
        """Return the picture as a file."""
        width, height = self.width + 2 * _MARGIN, self.height + 2 * _MARGIN
        place = f'x="-{_MARGIN}" y="-{_MARGIN}" width="{width:g}" height="{height:g}"'
        paper = f'<rect {place} fill="var(--paper)"/>'
        return "\n".join([self._head(_MARGIN), f"<style>{style()}</style>", paper, *self.elements, "</svg>"]) + "\n"

    def inline(self) -> str:
        """Return the picture as an element of a page."""
        return "\n".join([self._head(0), *self.elements, "</svg>"])

    def _head(self, margin: int) -> str:
        title, description = f"{self.name}-title", f"{self.name}-description"
        width, height = self.width + 2 * margin, self.height + 2 * margin
        role = "group" if self.is_interactive else "img"
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" id="{self.name}-picture" class="picture" role="{role}"'
            f' aria-labelledby="{title} {description}" width="{width:g}" height="{height:g}"'
            f' viewBox="{-margin} {-margin} {width:g} {height:g}">\n'
            f'<title id="{title}">{shown(self.title)}</title>\n'
            f'<desc id="{description}">{shown(self.description)}</desc>'
        )


def style() -> str:
    """Return the CSS of all pictures; its colours follow the viewer's setting, light or dark."""
    rules = resources.files("dslpar.reporting").joinpath("picture.css").read_text(encoding="utf-8")
    return f"{scheme(':root', 'light')}@media(prefers-color-scheme:dark){{{scheme(':root', 'dark')}}}\n{rules}"


def scheme(selector: str, name: str) -> str:
    """Return the rule that gives elements the colours of a scheme, "light" or "dark"."""
    colors = _LIGHT if name == "light" else _DARK
    return f"{selector}{{color-scheme:{name};{';'.join(f'--{key}:{value}' for key, value in colors.items())}}}"


def shown(text: object) -> str:
    """Return untrusted text escaped for HTML and XML."""
    return escape(visible(text))


def label(x: float, y: float, text: object, css: str = "", anchor: str = "start") -> str:
    """Return an SVG text element."""
    css = f' class="{css}"' if css else ""
    anchor = f' text-anchor="{anchor}"' if anchor != "start" else ""
    return f'<text x="{x:.1f}" y="{y:.1f}"{anchor}{css}>{shown(text)}</text>'


def bar(x: float, y: float, width: float, height: float, css: str, tip: str = "", more: str = "") -> str:
    """Return an SVG rectangle; `tip` is its tooltip, and `more` has further attributes."""
    inside = f"><title>{shown(tip)}</title></rect>" if tip else "/>"
    return f'<rect class="{css}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"{more}{inside}'


def upright(x: float, top: float, bottom: float, css: str) -> str:
    """Return a vertical SVG line."""
    return f'<line class="{css}" x1="{x:.1f}" x2="{x:.1f}" y1="{top:.1f}" y2="{bottom:.1f}"/>'
