"""Conversion of the evaluator's values to the tree of `Node`s, within bounds.

Unknown values are left out of the tree. Their dotted paths are listed, so that later rules do not take them for
missing. Sets become sorted lists. Functions, iterators and an uncalled `LazyCall(X)` are not values of a config.
"""

from __future__ import annotations

from dslpar.core.errors import Location
from dslpar.language.errors import ConfigError
from dslpar.language.limits import MAX_NODES, limit_error
from dslpar.language.load_session import Session
from dslpar.language.tree import TARGET, Node, Reference
from dslpar.language.values import NO_ORIGINS, UNKNOWN, Binding, Dict, LazyTarget, List, Origin, Value, origins_of

SCALARS = (type(None), bool, int, float, str, Reference)


def export(names: dict[str, Binding], location: Location, session: Session) -> tuple[Node, frozenset[str]]:
    """Build the tree of all top-level names except modules. Returns the tree and the unknown dotted paths."""
    exporter = _Exporter(session)
    children = {}
    for name, binding in names.items():
        if binding.imported_as == "module":
            continue
        try:
            # Priced before any node is made, since a few shared lists can expand to millions of values.
            session.budget.weigh(binding.value)
            node = exporter.node(name, binding.value, binding.location, binding.name_location)
        except ConfigError as error:
            session.report(error, binding.location)
            exporter.unknown.append(name)
            continue
        if node is not None:
            children[name] = node
    return Node(children, location), frozenset(exporter.unknown)


class _Exporter:
    """Builds the nodes of one load, and collects the paths of unknown values."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.unknown: list[str] = []
        self.left = MAX_NODES

    def node(self, path: str, value: Value, location: Location, key_location: Origin = None) -> Node | None:
        """Build the node of a value; None if it is unknown, or (with a finding) not a value of a config."""
        self.left -= 1
        if self.left < 0:
            raise limit_error(
                f"more than {MAX_NODES:,} values", "share less: written out in full, the config is too big"
            )
        if isinstance(value, SCALARS):
            return Node(value, location, key_location)
        if isinstance(value, set):
            value = _sorted_list(value)
        if isinstance(value, dict):
            return self._mapping(path, value, location, key_location)
        if isinstance(value, (list, tuple)):
            return self._sequence(path, value, location, key_location)
        if value is not UNKNOWN:
            self.session.report(_not_a_value(value), location)
        self.unknown.append(path)
        return None

    def _mapping(self, path: str, value: dict[Value, Value], location: Location, key_location: Origin) -> Node:
        children: dict[Value, Node] = {}
        if getattr(value, "tainted", False):
            self.unknown.append(path)
        target, target_location = None, None
        for key, item in value.items():
            origin, key_origin = value.origins.get(key, NO_ORIGINS) if isinstance(value, Dict) else NO_ORIGINS
            if key == TARGET and isinstance(item, (Reference, str)):
                target, target_location = item if isinstance(item, Reference) else Reference(item), origin or location
                continue
            if not isinstance(key, (str, int, float, type(None))):
                message = "a key that is neither a string nor a number"
                self.session.report(ConfigError("CFG013", message, "choose a string as key"), key_origin or location)
            node = self.node(f"{path}.{key}", item, origin or location, key_origin or origin or location)
            if node is not None:
                children[key] = node
        return Node(children, location, key_location, target, target_location)

    def _sequence(self, path: str, value: Value, location: Location, key_location: Origin) -> Node | None:
        origins = origins_of(value)
        items = [self.node(f"{path}.{i}", item, origins[i] or location) for i, item in enumerate(value)]
        if None in items or getattr(value, "tainted", False):
            self.unknown.append(path)
            return None
        return Node(items if isinstance(value, list) else tuple(items), location, key_location)


def _sorted_list(value: set[Value]) -> List:
    try:
        return List(sorted(value))
    except TypeError:
        raise ConfigError("CFG013", "a set whose items have no order", "write `[...]`") from None


def _not_a_value(value: object) -> ConfigError:
    """Make the error of something that is not a value of a config."""
    if isinstance(value, LazyTarget):
        name = value.target.name.rpartition(".")[2]
        return ConfigError("CFG013", f"LazyCall({name}) is not called", f"write LazyCall({name})(...)")
    return ConfigError("CFG013", f"a {type(value).__name__} is not a value of a config", "write `list(...)` around it")
