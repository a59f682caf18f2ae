"""From the evaluator's values to the tree of `Node`s, within bounds.

What could not be evaluated is left out of the tree; its dotted path is listed, so that later rules do not take it for
missing. Sets become sorted lists; functions, iterators and a `LazyCall(X)` never called are no values of a config.
"""

from __future__ import annotations

from typing import Any

from dslpar.core.errors import Location
from dslpar.language.codes import MistakeError
from dslpar.language.limits import MAX_NODES, too_much
from dslpar.language.session import Session
from dslpar.language.tree import TARGET, Node, Reference
from dslpar.language.values import NO_PLACES, UNKNOWN, Dict, LazyTarget, List, Place, Slot, origins_of

SCALARS = (type(None), bool, int, float, str, Reference)


class Exporter:
    """Builds the tree of one load; collects the paths of what is unknown."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.unknown: list[str] = []
        self.left = MAX_NODES

    def root(self, names: dict[str, Slot], location: Location) -> Node:
        """All top-level names, those of imported modules left out."""
        children = {}
        for name, slot in names.items():
            if slot.bound_by == "module":
                continue
            node = self.top(name, slot)
            if node is not None:
                children[name] = node
        return Node(children, location)

    def top(self, name: str, slot: Slot) -> Node | None:
        try:
            self.session.budget.weigh(slot.value)
            return self.node(name, slot.value, slot.place, slot.key_place)
        except MistakeError as failed:
            self.session.report(failed, slot.place)
            self.unknown.append(name)
            return None

    def node(self, path: str, value: Any, place: Location, key_place: Place = None) -> Node | None:
        """The node of a value; None if it is unknown or no value of a config, with a finding."""
        self.left -= 1
        if self.left < 0:
            raise too_much(f"more than {MAX_NODES:,} values", "share less: written out in full, the config is too big")
        if isinstance(value, SCALARS):
            return Node(value, place, key_place)
        if isinstance(value, set):
            value, key_place = sorted_list(value), key_place
        if isinstance(value, dict):
            return self.mapping(path, value, place, key_place)
        if isinstance(value, (list, tuple)):
            return self.sequence(path, value, place, key_place)
        if value is not UNKNOWN:
            self.session.report(not_a_value(value), place)
        self.unknown.append(path)
        return None

    def mapping(self, path: str, value: dict[Any, Any], place: Location, key_place: Place) -> Node:
        children: dict[Any, Node] = {}
        if getattr(value, "spoiled", False):
            self.unknown.append(path)
        target, target_place = None, None
        for key, item in value.items():
            item_place, item_key = value.origins.get(key, NO_PLACES) if isinstance(value, Dict) else NO_PLACES
            if key == TARGET and isinstance(item, (Reference, str)):
                target, target_place = item if isinstance(item, Reference) else Reference(item), item_place or place
                continue
            self.check_key(key, item_key or place)
            node = self.node(f"{path}.{key}", item, item_place or place, item_key or item_place or place)
            if node is not None:
                children[key] = node
        return Node(children, place, key_place, target, target_place)

    def check_key(self, key: Any, place: Location) -> None:
        if not isinstance(key, (str, int, float, type(None))):
            message = "a key that is neither a string nor a number"
            self.session.report(MistakeError("CFG013", message, "write a string as key"), place)

    def sequence(self, path: str, value: Any, place: Location, key_place: Place) -> Node | None:
        origins = origins_of(value)
        items = [self.node(f"{path}.{i}", item, origins[i] or place) for i, item in enumerate(value)]
        if None in items or getattr(value, "spoiled", False):
            self.unknown.append(path)
            return None
        return Node(items if isinstance(value, list) else tuple(items), place, key_place)


def sorted_list(value: set[Any]) -> List:
    try:
        return List(sorted(value))
    except TypeError:
        raise MistakeError("CFG013", "a set whose items have no order", "write a list") from None


def not_a_value(value: Any) -> MistakeError:
    """Why something cannot stand in a config."""
    if isinstance(value, LazyTarget):
        name = value.target.name.rpartition(".")[2]
        return MistakeError("CFG013", f"LazyCall({name}) is not called", f"write LazyCall({name})(...)")
    return MistakeError("CFG013", f"a {type(value).__name__} is not a value of a config", "write list(...) around it")
