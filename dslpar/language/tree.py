"""Config tree: values with the locations where they were written.

All code after the evaluator reads `Node`s, which are immutable and independent of the language. Each value keeps its
origin through imports, names and overrides, like the stack traces of Nix and Jsonnet. Here the origin is data, since
a linter needs the location of a *value*, not of a call.

A mapping made by `LazyCall` has its `target` set, and has no `_target_` among its children. Its `plain()` is a dict
whose first key is `_target_`, with the `Reference` as value, as `instantiate` takes it.

    >>> from dslpar.language.load import load
    >>> config = load("configs/gpt_3d.py")                          # doctest: +SKIP
    >>> config.root.get("parallel.tensor.size").location            # doctest: +SKIP
    Location(path='configs/gpt_3d.py', line=3, column=46, end_line=3, end_column=47)
"""

from __future__ import annotations

from typing import Any, NamedTuple

from dslpar.core.errors import Location

TARGET = "_target_"


class Reference:
    """Dotted name of a class, function or module, which is imported only at `build`."""

    __slots__ = ("name",)
    name: str

    def __init__(self, name: str) -> None:
        object.__setattr__(self, "name", name)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError("a Reference is immutable")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Reference) and other.name == self.name

    def __hash__(self) -> int:
        return hash((Reference, self.name))

    def __repr__(self) -> str:
        return f"Reference({self.name!r})"

    def __str__(self) -> str:
        return self.name


class Node(NamedTuple):
    """Value of the tree, with its origin."""

    value: Any
    """None, bool, int, float, str or Reference; dict[key, Node]; list[Node]; tuple[Node, ...]."""
    location: Location
    """Origin of the value: for a name, where the name's value was written; for a computed value, the expression."""
    key_location: Location | None = None
    """Location of the key, attribute or name; None for items of lists and tuples."""
    target: Reference | None = None
    """The class or function that a mapping made by LazyCall (or with a `_target_`) calls."""
    target_location: Location | None = None

    @property
    def is_mapping(self) -> bool:
        return isinstance(self.value, dict)

    def get(self, path: str) -> Node | None:
        """Return the node at a dotted path such as `a.b.0`, or None."""
        node: Node | None = self
        for part in path.split(".") if path else ():
            node = node.child(part) if node is not None else None
        return node

    def child(self, part: str) -> Node | None:
        """Return the direct child at a key, or at an index of a list or tuple; None if there is none."""
        if isinstance(self.value, dict):
            found = self.value.get(part)
            return found if found is not None or not _is_index(part) else self.value.get(int(part))
        if isinstance(self.value, (list, tuple)) and _is_index(part) and int(part) < len(self.value):
            item: Node = self.value[int(part)]
            return item
        return None

    def plain(self) -> Any:
        """Return the value as plain Python. A mapping with a target becomes a dict with `_target_` first."""
        if isinstance(self.value, dict):
            first = {} if self.target is None else {TARGET: self.target}
            return first | {key: node.plain() for key, node in self.value.items()}
        if isinstance(self.value, (list, tuple)):
            return type(self.value)(node.plain() for node in self.value)
        return self.value


def _is_index(part: str) -> bool:
    return part.isascii() and part.isdigit() and len(part) < 9
