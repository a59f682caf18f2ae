"""Origins of values: the place where a value was written, and the imports that lead from there to its key.

The evaluator records two locations: where a value was written, and where its key was assigned the value. The files in
between, which import one another, are found by reading the import statements.

    >>> from dslpar.linter.check import load_text
    >>> config = load_text("n = 4\\nbatch = dict(micro_size=n)", "cfg.py", ["train.steps=5"])
    >>> [(step.what, str(step.location)) for step in steps_of(config, "batch.micro_size", ways_of(config))]
    [('written', 'cfg.py:1:5'), ('given to micro_size by a name or an expression', 'cfg.py:2:14')]
"""

from __future__ import annotations

import ast
import os.path
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from dslpar.core.errors import COMMAND_LINE, Location
from dslpar.language.errors import ConfigError
from dslpar.language.finder import OURS, find_absolute, find_config, find_module, home_of_get_config
from dslpar.language.load import Config
from dslpar.language.source import Source, parse

_NOTHING_BETWEEN = re.compile(r"""[\]'"\s]*(?:[-+*/%|&]|//|\*\*)?[=:]\s*\(*\s*""")


class Step(NamedTuple):
    """One location on a value's way to its key, and what happens there."""

    what: str
    location: Location


Ways = Mapping[str, Sequence[Step]]
"""Path of a file -> the imports between it and the config that was loaded."""


def steps_of(config: Config, source_key: str, ways: Ways) -> list[Step]:
    """Return the steps of a written value, from where it was written to the config that was loaded."""
    value, key = config.at(source_key), config.key_at(source_key)
    if value.path == COMMAND_LINE:
        return [Step("on the command line", value)]
    steps = [Step("written", value)]
    if not _beside(config, value, key):
        imports = ways.get(value.path, ()) if key.path != value.path else ()
        # Up to the file that assigns it to the key: the remaining imports are those of the key.
        ends = next((index for index, step in enumerate(imports, 1) if step.location.path == key.path), 0)
        steps += imports[:ends]
        steps.append(Step(f"given to {source_key.rpartition('.')[2]} by a name or an expression", key))
    return [*steps, *ways.get(steps[-1].location.path, ())]


def _beside(config: Config, value: Location, key: Location) -> bool:
    """Return whether the value is written next to its key, with only an assignment or `:` between."""
    if key == value:
        return True
    if (key.path, key.end_line) != (value.path, value.line) or key.end_column > value.column:
        return False
    line = config.sources[key.path].split("\n")[key.end_line - 1]
    between = line[key.end_column - 1 : value.column - 1]
    return _NOTHING_BETWEEN.fullmatch(between) is not None


# Imports ----------------------------------------------------------------------------------------------------------


def ways_of(config: Config) -> Ways:
    """Return the shortest way from each file that the config reads."""
    ways: dict[str, list[Step]] = {config.path: []}
    queue = [config.path]
    for importer in queue:
        for target, place in _imported(config, importer):
            if target not in ways:
                ways[target] = [Step("imported", place), *ways[importer]]
                queue.append(target)
    return ways


def _imported(config: Config, importer: str) -> Iterator[tuple[str, Location]]:
    """Yield the path, as the config has it, and the location of each file that a file imports."""
    by_real_path = {os.path.realpath(path): path for path in config.sources}
    for path, place in _named(config.sources.get(importer, ""), importer):
        known = by_real_path.get(os.path.realpath(path))
        if known is not None:
            yield known, place


def _named(text: str, importer: str) -> Iterator[tuple[str, Location]]:
    if not importer.endswith(".py"):
        return
    source = Source(importer, text)
    try:
        tree = parse(source)
    except ConfigError:
        return  # the evaluator reports it
    home = home_of_get_config(tree) or OURS
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (stem := _stem(node, importer)) is not None:
            yield f"{stem}.py", source.location(node)
            yield from ((os.path.join(stem, f"{each.name}.py"), source.location(node)) for each in node.names)
        elif (name := _asked_for(node)) is not None:
            yield from ((path, source.location(node)) for path in _found(name, importer, home))


def _stem(node: ast.ImportFrom, importer: str) -> str | None:
    """Return the path, without extension, that an import of a config names; None for an import of a package."""
    if node.level:
        return find_module(node.module or "", node.level, importer)
    return find_absolute(node.module or "", importer)


def _found(name: str, importer: str, home: str) -> list[str]:
    try:
        return [find_config(name, importer, home)]
    except ConfigError:
        return []  # the evaluator reports it


def _asked_for(node: ast.AST) -> str | None:
    """Return the name in `get_config("...")`."""
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute) and len(node.args) == 1):
        return None
    function = node.func.id if isinstance(node.func, ast.Name) else node.func.attr
    name = node.args[0].value if isinstance(node.args[0], ast.Constant) else None
    return name if function == "get_config" and isinstance(name, str) else None
