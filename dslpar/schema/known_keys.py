"""The keys that a section accepts, each with its type, for the reader's one pass over the entries of a section.

Three kinds of sections have such keys: the section classes (`known_keys`), tables of arguments of torch's and
DeepSpeed's classes (`arguments`), and the sections of DeepSpeed's config (`dslpar.schema.deepspeed`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from dslpar.language.tree import Node
from dslpar.schema.keys import aliases_of, classes_of, shorthand_of, type_of
from dslpar.schema.types import TYPES, ValueType

if TYPE_CHECKING:
    from dslpar.language.load import Config
    from dslpar.schema.deepspeed_policy import Explanation


class Entry(NamedTuple):
    """One key of a section: its name, the node of its value, and the dotted key as the author wrote it."""

    name: str
    node: Node
    source_key: str


def entries_of(node: Node, source_key: str) -> list[Entry]:
    """List the entries of a mapping, each with its dotted key."""
    prefix = f"{source_key}." if source_key else ""
    items = node.value.items() if isinstance(node.value, dict) else ()
    return [Entry(str(name), child, f"{prefix}{name}") for name, child in items]


class KnownKeys(NamedTuple):
    """The keys that one section accepts, and the type of each."""

    names: Mapping[str, str]
    """Name or alias of a key -> its name."""
    type_of: Callable[[str], ValueType | KnownKeys | type[Any]]
    """Name of a key -> its type: of a plain value, the keys of a mapping, or a section class."""
    shorthand: str = ""
    """The key that gets a bare value in place of the section; empty if there is none."""
    code: str = ""
    """The rule that reports invalid values, if it is not the rule for the kind of mistake."""
    explain: Callable[[Config, Entry], Explanation] | None = None
    """Explains an unknown key, if it is not a key of dslpar's that is misspelt."""


@cache
def known_keys(cls: type[Any]) -> KnownKeys:
    """Return the keys of a section class."""
    of_class = {field.name: field for field in fields(cls)}

    def type_of_key(name: str) -> ValueType | type[Any]:
        classes = classes_of(of_class[name])  # several only at the top level: `dslpar.schema.class_sections` reads them
        return classes[0] if classes else type_of(of_class[name])

    return KnownKeys({name: name for name in of_class} | aliases_of(cls), type_of_key, shorthand_of(cls))


def arguments(types: Mapping[str, str]) -> KnownKeys:
    """Return the keys of a table of arguments: name -> name of a type in `TYPES` or in `deepspeed_policy.TABLES`."""

    def type_of_argument(name: str) -> ValueType | KnownKeys:
        if types[name] in TYPES:
            return TYPES[types[name]]
        from dslpar.schema.deepspeed_policy import TABLES  # most configs have no such mapping

        shorthand, below = TABLES[types[name]]
        return arguments(below)._replace(shorthand=shorthand)

    return KnownKeys({name: name for name in types}, type_of_argument)
