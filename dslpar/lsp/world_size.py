"""Write the number of ranks into a config: `# dslpar: world-size=64`, by a command or an action of the editor.

    with_world_size("cfg.py", text, "8,64")      # the edit
    for size in offered(analysis): ...           # numbers of ranks for which the config may be meant

The comment is where the server, and whoever opens the file next, reads the number from (`dslpar.lsp.settings`). An edit
keeps the comment's other settings.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from dslpar.core.errors import Fix, Location
from dslpar.linter import check
from dslpar.lsp.analysis import Analysis
from dslpar.lsp.lines import lines_of
from dslpar.lsp.settings import words_of

MOST = 4
"""The most sizes that are offered: a menu is short."""
_NODE = 8
"""GPUs of a usual node."""
_SIZES = tuple(_NODE << power for power in range(8))
_NAME = "world-size"
_CODING = re.compile(r"[ \t\f]*#.*?coding[:=][ \t]*[-\w.]")
"""Encoding of a file, which Python reads on its first two lines alone (PEP 263)."""


def with_world_size(path: str, text: str, sizes: str) -> Fix:
    """Return the edit that makes the comment of settings say `world-size=sizes`; it adds the comment if there is none.

    sizes: as in the comment, such as "64" or "8,64", and valid (`dslpar.lsp.settings.worlds_of`).
    """
    written = f"{_NAME}={sizes}"
    words = [(word.partition("="), at) for word, at in words_of(path, text)]
    # The last one counts.
    for (name, equals, _), at in reversed(words):
        if equals and name == _NAME:
            return Fix(at, written)
    for (_, equals, _), at in words:
        if equals:
            return Fix(at._replace(end_line=at.line, end_column=at.column), f"{written} ")
    lines = lines_of(text)
    end = "\r\n" if "\r\n" in text else "\n"
    head = _head(lines)
    if head == len(lines):
        column = len(lines[-1]) + 1
        return Fix(Location(path, head, column, head, column), f"{end}# dslpar: {written}{end}")
    # A byte order mark stays the first character.
    column = 2 if not head and lines[0].startswith("\ufeff") else 1
    return Fix(Location(path, head + 1, column, head + 1, column), f"# dslpar: {written}{end}")


def _head(lines: Sequence[str]) -> int:
    """Return how many lines stay above the comment: those that Python or a shell reads as the first ones."""
    if any(map(_CODING.match, lines[1:2])):
        return 2
    return int(lines[0].startswith("#!") or _CODING.match(lines[0]) is not None)


def place_of(path: str, text: str) -> Location:
    """Return the lines on which an editor offers sizes: those of the comments of settings, else the first one."""
    places = [at for _, at in words_of(path, text)] or [Location(path, 1, 1, 1, 1)]
    return Location(path, places[0].line, 1, places[-1].line, max(at.end_column for at in places))


def offered(analysis: Analysis) -> list[str]:
    """Return numbers of ranks for the comment: the project's, and whole nodes on which the config has no errors.

    These are the ones nearest to the current number. If the config has errors on all of them, they are offered anyway.
    """
    current = analysis.settings.worlds
    sizes = sorted(_SIZES, key=lambda size: (abs(size.bit_length() - (current[0] or _NODE).bit_length()), size))
    nodes = [size for size in sizes if (size,) != current]
    legal = list(_legal(nodes, analysis)) or nodes[:MOST]
    project = analysis.settings.project
    of_project = project.world_size_of(analysis.path) if project is not None else None
    every = [of_project] if of_project is not None and (of_project,) != current else []
    return [str(size) for size in dict.fromkeys([*every, *sorted(legal)])][:MOST]


def _legal(sizes: list[int], analysis: Analysis) -> Iterator[int]:
    """Yield the first of the sizes on which the config has no errors, at most as many as are offered."""
    left = MOST
    for size in sizes:
        if left and not check.check(analysis.config, size, errors_only=True, forecasts=False).has_errors:
            left -= 1
            yield size
