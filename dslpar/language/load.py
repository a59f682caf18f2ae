"""Load a config file and overrides into a tree with origins and all findings. Nothing in the file is executed.

>>> config = load_text("n = 4\\nmodel = dict(num_layers=2 * n)", "cfg.py", ["model.depth=1"])
>>> config.root.plain()
{'n': 4, 'model': {'num_layers': 8, 'depth': 1}}
>>> str(config.at("model.num_layers"))
'cfg.py:2:25'
"""

from __future__ import annotations

import os.path
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from dslpar.core.errors import COMMAND_LINE, WORLD, Finding, Location
from dslpar.language.errors import BudgetError, ConfigError, finding
from dslpar.language.export import export
from dslpar.language.load_session import Session
from dslpar.language.overrides import apply_overrides
from dslpar.language.source import Source, read_source
from dslpar.language.statements import evaluate
from dslpar.language.tree import Node
from dslpar.language.values import Binding

NO_SHORTHANDS: Mapping[str, str] = {}
NO_TEXTS: Mapping[str, str] = {}
YAML_ENDINGS = (".yaml", ".yml", ".json")


class Config(NamedTuple):
    """Contents of a config file, after imports and overrides."""

    path: str
    root: Node
    """Mapping of all top-level names except modules and names imported from them."""
    findings: tuple[Finding, ...]
    """Violations of the language, ordered by file as read, then by line; those of the command line are last."""
    sources: dict[str, str]
    """The text of each file read, and of the command line."""
    names_read: frozenset[str] = frozenset()
    """Top-level names that some expression of the file reads."""
    imported: frozenset[str] = frozenset()
    """Top-level names whose value came from another config."""
    modules: Mapping[str, Binding] = MappingProxyType({})
    """Top-level names that an import bound to a module or reference, with their locations; they are not in `root`."""
    unknown: frozenset[str] = frozenset()
    """Dotted paths that could not be evaluated (a finding explains why). They are unknown, not missing."""
    complete: bool = True
    """False if evaluation ended early (syntax error, no file, out of steps): a missing name means nothing then."""
    trusted: tuple[str, ...] = ()
    """Packages that the user trusts, besides those of the working folder's pyproject.toml (core.trust)."""

    def has(self, name: str) -> bool:
        """Return whether a top-level name has a value; None counts as absent."""
        node = self.root.child(name)
        return node is not None and node.value is not None

    def at(self, path: str) -> Location:
        """Return the location of the value at a dotted path, or else of its nearest ancestor."""
        return self._nearest(path).location

    def key_at(self, path: str) -> Location:
        """Return the location of the key at a dotted path, or else of its nearest ancestor's key."""
        node = self._nearest(path)
        return node.key_location or node.location

    def at_keys(self, findings: Sequence[Finding]) -> list[Finding]:
        """Return the findings at the locations of their keys' values; the code that made them knew at most the file."""
        nowhere = (Location(self.path), Location(WORLD))
        return [
            finding._replace(location=self.at(finding.key)) if finding.key and finding.location in nowhere else finding
            for finding in findings
        ]

    def _nearest(self, path: str) -> Node:
        node = self.root
        for part in path.split(".") if path else ():
            child = node.child(part)
            if child is None:
                break
            node = child
        return node


def load(
    path: str,
    overrides: Sequence[str] = (),
    shorthands: Mapping[str, str] = NO_SHORTHANDS,
    texts: Mapping[str, str] = NO_TEXTS,
) -> Config:
    """Evaluate a config file. A user's mistake, such as a missing file, becomes a finding, never an exception.

    `shorthands` maps a key that may be a scalar to the sub-key that the scalar sets. With
    `{"parallel.tensor": "size"}`, the override `parallel.tensor.mode=1d` extends `tensor=4`. `texts` has texts by real
    path that replace the files there, such as texts that an editor has not saved yet.
    """
    try:
        # An unreadable file is a finding like any other, so that linting many files continues with the next.
        source = read_source(path, texts)
    except ConfigError as error:
        start = Location(path)
        failure = finding(error.code, error.location or start, error.message, error.hint)
        return Config(path, Node({}, start), (failure,), {}, complete=False)
    return _load(source, overrides, shorthands, texts)


def load_text(
    text: str,
    path: str,
    overrides: Sequence[str] = (),
    shorthands: Mapping[str, str] = NO_SHORTHANDS,
    is_pyyaml: bool = False,
) -> Config:
    """Evaluate a config's text. Relative imports start at `path`, and findings show it.

    `is_pyyaml`: whether YAML is read as PyYAML reads it, since its author's program does.
    """
    return _load(Source(path, text), overrides, shorthands, is_pyyaml=is_pyyaml)


def _load(
    source: Source,
    overrides: Sequence[str],
    shorthands: Mapping[str, str],
    texts: Mapping[str, str] = NO_TEXTS,
    is_pyyaml: bool = False,
) -> Config:
    start, key = Location(source.path), os.path.realpath(source.path)
    session, root, unknown = Session(texts, evaluate), Node({}, start), frozenset[str]()
    session.is_pyyaml = is_pyyaml
    names: dict[str, Binding] | None = None
    try:
        names = _names(source, key, session)
        complete = names is not None
        if names is not None:
            if overrides:
                apply_overrides(overrides, shorthands, names, session)
            root, unknown = export(names, start, session)
    except BudgetError as error:
        complete = False
        session.findings.append(_budget_finding(session, start, error))
    parsed, bindings = session.parsed.get(key), (names or {}).items()
    return Config(
        source.path,
        root,
        _in_order(session),
        session.sources,
        frozenset(parsed.names_read) if parsed else frozenset(),
        frozenset(name for name, binding in bindings if binding.imported_as == "config"),
        {name: binding for name, binding in bindings if binding.imported_as == "module"},
        unknown,
        complete,
    )


def _names(source: Source, key: str, session: Session) -> dict[str, Binding] | None:
    if source.path.endswith(YAML_ENDINGS):
        from dslpar.language.yaml_io import read_names  # needs PyYAML

        return read_names(source, session)
    parsed = session.parse_text(source, key)
    return None if parsed is None else session.run(parsed, key)


def _budget_finding(session: Session, start: Location, error: BudgetError) -> Finding:
    """Make the finding of an exceeded budget, at the statement where evaluation stopped."""
    location = start
    if session.statement is not None:
        source, node = session.statement
        location = source.location(node)
    return finding("CFG005", location, str(error), "write the value itself that the loops make")


def _in_order(session: Session) -> tuple[Finding, ...]:
    """Sort the findings by file in the order read, the command line last, and by position within a file."""
    order = {path: index for index, path in enumerate(session.sources)}
    last = len(order) + 1

    def key(item: Finding) -> tuple[object, ...]:
        path = item.location.path
        return (last if path == COMMAND_LINE else order.get(path, last - 1), item.sort_key())

    return tuple(sorted(session.findings, key=key))
