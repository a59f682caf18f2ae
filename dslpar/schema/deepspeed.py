"""Read the section `deepspeed`, whose keys have DeepSpeed's own names. Only known keys are accepted, at every depth.

DeepSpeed itself checks some keys when it starts, and silently accepts all others. This module is imported only
if a config has the section.
"""

from __future__ import annotations

from collections.abc import Iterable

from dslpar.core.suggest import nearest
from dslpar.language.tree import Node
from dslpar.schema import deepspeed_policy
from dslpar.schema.reader import Entry, Reader, entries_of
from dslpar.schema.spelling import spelling_fix
from dslpar.schema.types import TYPES

SECTION = "deepspeed"
_ELSEWHERE = {*deepspeed_policy.OURS, *deepspeed_policy.REMOVED, *deepspeed_policy.UNSUPPORTED}
"""Top-level keys that are not accepted; the rules DSC102, DSC103 and DSC104 report them."""


def raw(reader: Reader, node: Node) -> dict[str, object]:
    """Return the section's valid values by key. A key with the value None counts as absent."""
    entries = entries_of(node, SECTION)
    values = {entry.name: entry.node.plain() for entry in entries if entry.name in _ELSEWHERE}
    return values | _section(reader, "", [entry for entry in entries if entry.name not in _ELSEWHERE])


def _section(reader: Reader, path: str, entries: Iterable[Entry]) -> dict[str, object]:
    known = (
        deepspeed_policy.types_in(path)
        if path
        else {name: deepspeed_policy.type_of(name) for name in deepspeed_policy.TOP}
    )
    values = {}
    for entry in entries:
        if entry.name not in known:
            _unknown(reader, entry, path, known)
        elif entry.node.value is not None:
            reader.written[entry.source_key] = entry.source_key
            values[entry.name] = _value(reader, f"{path}.{entry.name}".lstrip("."), known[entry.name], entry)
    return {name: value for name, value in values.items() if value is not None}


def _value(reader: Reader, path: str, type_name: str, entry: Entry) -> object:
    if type_name == "Section" and entry.node.is_mapping:
        return _section(reader, path, entries_of(entry.node, entry.source_key))
    before = len(reader.misreads)
    value = reader.scalar(
        TYPES["Dict" if type_name == "Section" else type_name], entry.node, entry.source_key, entry.source_key
    )
    # `scalar` reports CFG102, CFG103 or CFG108; in this section the code is DSC105.
    reader.misreads[before:] = [misread._replace(code="DSC105") for misread in reader.misreads[before:]]
    return value


def _unknown(reader: Reader, entry: Entry, path: str, known: Iterable[str]) -> None:
    """Report a key that DeepSpeed does not have and would silently ignore."""
    names = list(known)
    message = f"unknown DeepSpeed key {entry.name!r}" + (f" in {path}" if path else "")
    close = nearest(entry.name, names if path else [*names, *_ELSEWHERE])
    if not path and close in _ELSEWHERE:
        hint = _why_not(close)
        reader.report("DSC101", reader.config.key_at(entry.source_key), message, hint, entry.source_key)
        return
    fix = spelling_fix(reader.config, entry.source_key, names)
    if not path and entry.name in deepspeed_policy.ZERO:
        hint, fix = f"write it under zero.{entry.name}", None
    else:
        hint = f"did you mean {close!r}?" if close else f"choose from the keys {', '.join(names)}"
    reader.report("DSC101", reader.config.key_at(entry.source_key), message, hint, entry.source_key, fix=fix)


def _why_not(name: str) -> str:
    """Return the hint for a misspelt key that resembles `name`, a key in _ELSEWHERE."""
    if name in deepspeed_policy.OURS:
        return f"{deepspeed_policy.written_elsewhere(name)} (if {name!r} is meant)"
    if name in deepspeed_policy.REMOVED:
        return f"leave it out: {name!r}, if that is meant, is one that DeepSpeed has removed"
    return f"leave it out: {name!r}, if that is meant, is one that dslpar does not support"
