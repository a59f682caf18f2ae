"""Sphinx directive `public`: the reference of a module's `__all__` from docstrings.

    .. public:: dslpar.layers

autodoc's `automodule` skips names that are imported on first use, as most of dslpar's are. A name that several modules
export is described on the page of dslpar itself. Docstrings are written for editors. This module converts what is not
reStructuredText: examples below a sentence, tables, and `name: what it is`.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Any

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.ext.napoleon import Config, GoogleDocstring
from sphinx.util.docutils import SphinxDirective
from sphinx.util.nodes import nested_parse_with_titles

FIRST = "dslpar"
"""The module whose page describes names that several modules export."""


class Public(SphinxDirective):
    """`.. public:: MODULE`: all public names of a module."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Return the nodes of the names' reference."""
        name = self.arguments[0]
        text = StringList(list(reference(name)), source=name)
        node = nodes.container()
        nested_parse_with_titles(self.state, text, node)
        return node.children


def reference(name: str) -> Iterator[str]:
    """Yield reStructuredText that documents the public names of a module, classes first."""
    module = import_module(name)
    yield from (f".. py:module:: {name}", "", *converted((inspect.getdoc(module) or "").splitlines()), "")
    elsewhere = set(import_module(FIRST).__all__) if name != FIRST else set[str]()
    if shared := sorted(elsewhere & set(module.__all__)):
        yield from ("Also here: " + ", ".join(f":py:obj:`{FIRST}.{each}`" for each in shared) + ".", "")
    kinds = {each: kind_of(getattr(module, each)) for each in module.__all__ if each not in shared}
    for each in sorted(each for each, kind in kinds.items() if kind == "module"):
        yield from (f"`{each}` is :py:mod:`{getattr(module, each).__name__}`.", "")
        del kinds[each]
    for each in sorted(kinds, key=lambda each: (kinds[each] == "function", kinds[each] == "data", each.lower())):
        yield f".. auto{kinds[each]}:: {name}.{each}"
        yield from (*_OPTIONS.get(kinds[each], ()), "")


_OPTIONS = {"class": ("   :members:",), "data": ("   :no-value:",)}  # a value's repr may hold an address


def kind_of(value: object) -> str:
    """Return autodoc's name for the kind of a value."""
    if inspect.isclass(value):
        return "exception" if issubclass(value, BaseException) else "class"
    if inspect.ismodule(value):
        return "module"
    return "function" if inspect.isroutine(value) else "data"


_TABLE = re.compile(r"\|.*\|$")
_SECTION = re.compile(r"(Returns|Raises|Yields):$")
_ITEM = re.compile(r"([a-z_]\w*(?:, [a-z_]\w*)*): (?=\S)")


def converted(lines: Sequence[str]) -> Iterator[str]:
    """Yield the lines of a docstring as reStructuredText.

    >>> print("\\n".join(converted(["Does it.", "", "x: [T, H],", "    whole", "", "    run(x)"])))
    Does it.
    <BLANKLINE>
    * **x**: [T, H],
      whole
    <BLANKLINE>
    ::
    <BLANKLINE>
        run(x)
    """
    within, before = "text", ""
    for line in lines:
        if _SECTION.match(line):
            within = "section"
        elif _TABLE.match(line) or (line.startswith("    ") and not before.strip() and within in ("text", "item")):
            if within != "code":
                yield from ("", "::", "") if before.strip() else ("::", "")
            within = "code"
        elif found := _ITEM.match(line):
            if within != "item" and before.strip():
                yield ""
            within, line = "item", f"* **{found[1]}**: {line[found.end() :]}"
        elif line.strip() and not line.startswith(" "):
            if within != "text" and before.strip():
                yield ""
            within = "text"
        indent = "    " if _TABLE.match(line) else ""
        # with a deeper indent, it would become a definition of the line above
        yield f"  {line.strip()}" if within == "item" and line.startswith("    ") else indent + line
        before = line


def _convert(app: Sphinx, what: str, name: str, thing: object, options: object, lines: list[str]) -> None:
    if lines and lines[0].startswith("Alias for field number"):  # Python's docstring of a NamedTuple's field
        lines.clear()
    if what in ("attribute", "data", "property"):
        lines[:] = converted(lines)
    else:  # Only a function's sections are in Google style. For an attribute, napoleon takes "text: more" for a type.
        lines[:] = GoogleDocstring(list(converted(lines)), Config(), app, what, name, thing, options).lines()


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the directive, and the conversion of docstrings."""
    app.add_directive("public", Public)
    app.connect("autodoc-process-docstring", _convert)
    return {"parallel_read_safe": True}
