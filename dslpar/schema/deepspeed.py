"""Read the section `deepspeed`, whose keys have DeepSpeed's own names. Only known keys are accepted, at every depth.

DeepSpeed itself checks some keys when it starts, and silently accepts all others. This module is imported only
if a config has the section.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dslpar.core.suggest import nearest
from dslpar.language.tree import Node
from dslpar.schema import deepspeed_policy, spelling
from dslpar.schema.deepspeed_policy import Explanation
from dslpar.schema.known_keys import Entry, KnownKeys, entries_of
from dslpar.schema.reader import Reader
from dslpar.schema.types import TYPES, ValueType

if TYPE_CHECKING:
    from dslpar.language.load import Config

SECTION = "deepspeed"
_ELSEWHERE = {*deepspeed_policy.OURS, *deepspeed_policy.REMOVED, *deepspeed_policy.UNSUPPORTED}
"""Top-level keys that are not accepted; the rules DSC102, DSC103 and DSC104 report them."""


def raw(reader: Reader, node: Node) -> dict[str, object]:
    """Return the section's valid values by key. A key with the value None counts as absent."""
    entries = entries_of(node, SECTION)
    values = {entry.name: entry.node.plain() for entry in entries if entry.name in _ELSEWHERE}
    return values | reader.values(_known(""), [entry for entry in entries if entry.name not in _ELSEWHERE], SECTION)


def _known(path: str) -> KnownKeys:
    """Return the keys of a DeepSpeed section, by its dotted path; "" for the top level."""
    names = deepspeed_policy.KEYS[path] if path else deepspeed_policy.TOP

    def type_of(name: str) -> ValueType | KnownKeys:
        key = f"{path}.{name}" if path else name
        type_name = deepspeed_policy.type_of(key)
        return _known(key) if type_name == "Section" else TYPES[type_name]

    def explain(config: Config, entry: Entry) -> Explanation:
        return _explain(config, entry, path, list(names))

    return KnownKeys({name: name for name in names}, type_of, code="DSC105", explain=explain)


def _explain(config: Config, entry: Entry, path: str, names: list[str]) -> Explanation:
    """Explain a key that DeepSpeed does not have and would silently ignore."""
    message = f"unknown DeepSpeed key {entry.name!r}" + (f" in {path}" if path else "")
    close = nearest(entry.name, names if path else [*names, *_ELSEWHERE])
    if not path and close in _ELSEWHERE:
        return Explanation("DSC101", message, _why_not(close))
    if not path and entry.name in deepspeed_policy.ZERO:
        return Explanation("DSC101", message, f"write it under zero.{entry.name}")
    hint = f"did you mean {close!r}?" if close else f"choose from the keys {', '.join(names)}"
    return Explanation("DSC101", message, hint, spelling.of_key(config, entry.source_key, names).fix)


def _why_not(name: str) -> str:
    """Return the hint for a misspelt key that resembles `name`, a key in _ELSEWHERE."""
    if name in deepspeed_policy.OURS:
        return f"{deepspeed_policy.written_elsewhere(name)} (if {name!r} is meant)"
    if name in deepspeed_policy.REMOVED:
        return f"leave it out: {name!r}, if that is meant, is one that DeepSpeed has removed"
    return f"leave it out: {name!r}, if that is meant, is one that dslpar does not support"
