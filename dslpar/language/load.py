"""`load`: a config file and overrides in, a tree with origins and all findings out. Nothing of the file is executed.

>>> config = load_text("n = 4\\nmodel = dict(num_layers=2 * n)", "cfg.py", ["model.depth=1"])
>>> config.root.plain()
{'n': 4, 'model': {'num_layers': 8, 'depth': 1}}
>>> str(config.at("model.num_layers"))
'cfg.py:2:25'
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from dslpar.core.errors import COMMAND_LINE, Finding, Location
from dslpar.core.named_tuple import NamedTuple
from dslpar.language.codes import BudgetError, MistakeError, finding
from dslpar.language.export import Exporter
from dslpar.language.session import Session
from dslpar.language.source import Source, read_source
from dslpar.language.tree import Node
from dslpar.language.values import Slot

NO_SHORTHANDS: Mapping[str, str] = {}
NO_TEXTS: Mapping[str, str] = {}
YAML_ENDINGS = (".yaml", ".yml", ".json")


class Config(NamedTuple):
    """What a config file says, after imports and overrides."""

    path: str
    root: Node
    """A mapping of all top-level names; modules, and what was imported from them, left out."""
    findings: tuple[Finding, ...]
    """Problems of the language, in the order of the files read, then of their lines."""
    sources: dict[str, str]
    """The text of each file read, and of the command line."""
    used: frozenset[str] = frozenset()
    """Top-level names that some expression of the file reads."""
    imported: frozenset[str] = frozenset()
    """Top-level names whose value came from another config."""
    modules: Mapping[str, Location] = MappingProxyType({})
    """Top-level names bound by an absolute import, and where: references, not in `root`."""
    unknown: frozenset[str] = frozenset()
    """Dotted paths that could not be evaluated (a finding says why): not missing, only not known."""
    complete: bool = True
    """False if evaluation ended early (no syntax, no file, out of steps): what is missing means nothing then."""

    def at(self, path: str) -> Location:
        """Where the value at a dotted path was written, or the nearest ancestor's that was."""
        return self._nearest(path).location

    def key_at(self, path: str) -> Location:
        """Where the key at a dotted path was written, or the nearest ancestor's that was."""
        node = self._nearest(path)
        return node.key_location or node.location

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
    """Evaluate a config file. A user's mistake, a missing file among them, is a finding, never an exception.

    `shorthands` names, for a key that may be a scalar, the sub-key that the scalar stands for:
    `{"parallel.tensor": "size"}` lets `parallel.tensor.mode=1d` extend `tensor=4`. `texts` stand for the files at
    their real paths: what an editor has not saved yet.
    """
    try:
        source = read_source(path, texts)
    except MistakeError as failed:
        place = failed.place or Location(path)
        return Config(
            path,
            Node({}, Location(path)),
            (finding(failed.code, place, failed.message, failed.help),),
            {},
            complete=False,
        )
    return _load(source, overrides, shorthands, texts)


def load_text(
    text: str, path: str, overrides: Sequence[str] = (), shorthands: Mapping[str, str] = NO_SHORTHANDS
) -> Config:
    """Evaluate a config's text; `path` is where relative imports start, and what findings show."""
    return _load(Source(path, text), overrides, shorthands)


def _load(
    source: Source, overrides: Sequence[str], shorthands: Mapping[str, str], texts: Mapping[str, str] = NO_TEXTS
) -> Config:
    session, exporter, names, root = Session(texts), None, None, Node({}, Location(source.path))
    try:
        names = _names(source, session)
        complete = names is not None
        if names is not None:
            if overrides:
                from dslpar.language.overrides import apply_overrides

                apply_overrides(overrides, shorthands, names, session)
            exporter = Exporter(session)
            root = exporter.root(names, Location(source.path))
    except BudgetError as error:
        complete = False
        _add_last(session, source, error)
    parsed = session.parsed.get(session.main)
    return Config(
        source.path,
        root,
        _in_order(session),
        session.sources,
        frozenset(parsed.checked.used) if parsed else frozenset(),
        frozenset(name for name, slot in (names or {}).items() if slot.bound_by == "config"),
        {name: slot.place for name, slot in (names or {}).items() if slot.bound_by == "module"},
        frozenset(exporter.unknown if exporter else ()),
        complete,
    )


def _names(source: Source, session: Session) -> dict[str, Slot] | None:
    if source.path.endswith(YAML_ENDINGS):
        from dslpar.language.yaml_io import read_names

        return read_names(source, session)
    parsed = session.parse_text(source, session.enter(source.path))
    return None if parsed is None else session.run(parsed, session.main)


def _add_last(session: Session, source: Source, error: BudgetError) -> None:
    """The finding that says why evaluation ended, at the statement where it did."""
    place = Location(source.path)
    if session.now is not None:
        place = session.now[0].place(session.now[1])
    help = "shorten the loops, or write the result itself"
    session.findings.append(finding("CFG005", place, str(error), help))


def _in_order(session: Session) -> tuple[Finding, ...]:
    """File by file as they were read, the command line last, each from top to bottom."""
    order = {path: index for index, path in enumerate(session.sources)}
    last = len(order) + 1

    def key(item: Finding) -> tuple[object, ...]:
        path = item.location.path
        return (last if path == COMMAND_LINE else order.get(path, last - 1), item.sort_key())

    return tuple(sorted(session.findings, key=key))
