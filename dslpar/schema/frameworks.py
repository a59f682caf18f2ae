"""Frameworks whose configs `dslpar import` converts, and the facts by which their configs are recognised.

Each framework has a table in dslpar/migrate/data. The facts are its first lines, up to the first empty line. So a new
framework needs one new file. Lint reads the tables only for a config with mistakes.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from importlib import resources
from types import MappingProxyType
from typing import NamedTuple

from dslpar.language.errors import ConfigError
from dslpar.language.load_session import parsed
from dslpar.language.tree import TARGET, Node

TOML = ".toml"


class Framework(NamedTuple):
    """Features by which a framework's configs are recognised."""

    name: str
    """Name of the framework's table, and value of `dslpar import --from`."""
    title: str
    """The framework's name in messages."""
    endings: tuple[str, ...]
    """Endings of the framework's config files."""
    packages: Collection[str]
    """Packages whose import identifies the framework."""
    names: Collection[str]
    """Keys that identify the framework; one key is enough."""
    dashes: bool
    """Whether keys may be written with dashes: `num-layers`, `--num-layers`."""
    detected_first: bool
    """Whether this framework has priority if a config has keys of several frameworks."""
    also: Collection[str] = ()
    """Keys of which one must be set, too, if a file is recognised by its keys; none if empty."""
    unless: Collection[str] = ()
    """Keys of another framework, which shares the names above: a file that sets one of them is that framework's."""
    commands: Collection[str] = ()
    """Commands of the framework, such as `megatron sft`: a script that starts one is the framework's."""
    arguments: Collection[str] = ()
    """Arguments by which a script is recognised, written as the program takes them: all of them are needed."""
    arguments_also: Collection[str] = ()
    """Arguments of which a script must have one, too: programs of other kinds share those above."""
    sections: Collection[str] = ()
    """Sections whose names the table leaves out: `model.num_layers` is its num_layers."""
    aliases: Mapping[str, str] = MappingProxyType({})
    """Names of the table, by the framework's own names for the same."""

    def written(self, key: str) -> str:
        """Return a key as the framework's own code names it."""
        return key.lstrip("-").replace("-", "_") if self.dashes else key

    def name_of(self, key: str) -> str:
        """Return a key as written in the table."""
        written = self.written(key)
        section, _, rest = written.partition(".")
        inside = rest and section in self.sections and rest != TARGET
        name = rest.lstrip("_") if inside else written
        return self.aliases.get(name, name)


def read_head(text: str) -> dict[str, str]:
    """Read the facts of a table: `key: value` lines; a key may have several lines."""
    facts: dict[str, str] = {}
    for line in text.partition("\n\n")[0].splitlines():
        if not line.startswith("#"):
            key, _, value = line.partition(": ")
            facts[key] = f"{facts[key]} {value}" if key in facts else value
    return facts


def framework_of(name: str, facts: Mapping[str, str]) -> Framework:
    """Make a Framework from the facts of its table."""
    return Framework(
        name,
        facts["title"],
        tuple(facts.get("endings", ".py .yaml .yml").split()),
        facts.get("packages", "").split(),
        facts.get("names", "").split(),
        facts.get("dashes") == "yes",
        facts.get("detected_first") == "yes",
        facts.get("also", "").split(),
        facts.get("unless", "").split(),
        tuple(filter(None, map(str.strip, facts.get("commands", "").split("|")))),
        facts.get("arguments", "").split(),
        facts.get("arguments_also", "").split(),
        facts.get("sections", "").split(),
        MappingProxyType(dict(item.split("=") for item in facts.get("aliases", "").split())),
    )


@cache
def frameworks() -> tuple[Framework, ...]:
    """Return all frameworks."""
    files = sorted(resources.files("dslpar").joinpath("migrate/data").iterdir(), key=lambda file: file.name)
    tables = (file for file in files if file.name.endswith(".txt"))
    return tuple(
        framework_of(file.name.removesuffix(".txt"), read_head(file.read_text(encoding="utf-8"))) for file in tables
    )


def recognise(root: Node, path: str, imported: Collection[str], text: str = "") -> Framework | None:
    """Return the framework of a config, by the packages that it imports, else by the names that it sets.

    `text`: the text of a script, which is not evaluated but searched for commands and command-line arguments.
    """
    if path.endswith(TOML):
        root, text = _root_of_toml(text, path) if text else root, ""
    known = [framework for framework in frameworks() if path.endswith(framework.endings)]
    # Frameworks without Python configs come first: GPT-NeoX's YAML and ColossalAI's Python both have fp16.
    # Frameworks that are recognised by two kinds of keys are the most certain.
    known.sort(key=lambda item: (not item.also, ".py" in item.endings, not item.detected_first))
    for framework in known:
        if any(starts(command, text) for command in framework.commands):
            return framework
    # Imports are more certain than names, some of which several frameworks share.
    for framework in known:
        if not set(imported).isdisjoint(framework.packages):
            return framework
    # In a script, some frameworks share the names of their arguments with programs that have their own parsers.
    by_name = (
        framework
        for framework in known
        if (not (text and framework.arguments) and _is_named(root, framework)) or any(_arguments(text, framework))
    )
    return next(by_name, None)


def starts(command: str, text: str) -> bool:
    """Return whether a script starts a command, by its text."""
    words = r"\s+".join(map(re.escape, command.split()))
    return bool(text) and re.search(rf"^[^#\n]*?(?<![\w./-])(?:\S*/)?{words}(?![\w-])", text, re.MULTILINE) is not None


def _root_of_toml(text: str, path: str) -> Node:
    from dslpar.language.toml_io import load_toml  # few configs are TOML

    return load_toml(text, path).root


def _is_named(root: Node, framework: Framework) -> bool:
    """Return whether a config sets keys by which a framework is recognised."""
    if not any(names_in(root, framework)) or any(names_in(root, framework._replace(names=framework.unless))):
        return False
    return not framework.also or any(names_in(root, framework._replace(names=framework.also)))


def _arguments(text: str, framework: Framework) -> Iterator[bool]:
    if framework.arguments:
        given = {name: f"--{name}" in text for name in (*framework.arguments, *framework.arguments_also)}
        yield all(given[name] for name in framework.arguments) and any(given[name] for name in framework.arguments_also)
        return
    is_by_name = text and framework.dashes and not framework.also
    yield from (f"--{name.replace('_', '-')} " in text for name in framework.names if is_by_name)


_WITH_STATEMENTS = (ast.stmt, ast.excepthandler, ast.match_case)
"""Nodes in which a statement may stand: no import is within an expression."""


def imported_packages(text: str, path: str) -> Iterator[str]:
    """Yield the top-level packages that a Python file imports."""
    try:
        pending: list[ast.AST] = [parsed(path, text).tree]
    except ConfigError:  # the evaluator reports it
        return
    while pending:
        node = pending.pop()
        pending += (each for each in ast.iter_child_nodes(node) if isinstance(each, _WITH_STATEMENTS))
        if isinstance(node, ast.ImportFrom) and not node.level and node.module:
            yield node.module.partition(".")[0]
        elif isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)


def names_in(root: Node, framework: Framework) -> Iterator[str]:
    """Yield the framework's names that a config sets."""
    top = {framework.written(str(key)) for key in root.value}
    return (name for name in framework.names if name in top or root.get(name) is not None)
