"""Read the section `data`: one of dslpar's types, a blend of them, or the author's own class."""

from __future__ import annotations

from dataclasses import replace

from dslpar.language.tree import Node
from dslpar.schema import datasets
from dslpar.schema.class_sections import OWN_NAME, mapping, plain
from dslpar.schema.known_keys import Entry
from dslpar.schema.reader import Reader, Registered, Typed
from dslpar.schema.types import SEQUENCE

_PARTS_HELP = "parts=[dict(type='tokens', path='a', weight=0.7), dict(type='tokens', path='b', weight=0.3)]"


def data(reader: Reader, node: Node, registered: Registered) -> datasets.Data | None:
    """Read the data: one of dslpar's types, a blend of them, or the author's own class."""
    typed = mapping(reader, node, "data", "dslpar.data.", "text")
    if typed is None or typed.name != "blend":
        return None if typed is None else _dataset(reader, typed, node, "data")
    entries = [entry for entry in typed.entries if entry.name != "parts"]
    written = next((entry for entry in typed.entries if entry.name == "parts"), None)
    parts = {} if written is None else {"parts": _parts(reader, written)}
    made: datasets.BlendData = reader.fields(datasets.BlendData, entries, node, "data", "data", **parts)
    return made


def _dataset(reader: Reader, typed: Typed, node: Node, key: str) -> datasets.Data | None:
    """Read the data at `key`; a blend is not accepted here, only at the top of the section."""
    name = typed.name
    if name is not None and "." in name:
        return _own_data(reader, name, typed.entries, node, key)
    if name is None or name not in datasets.DATASETS:
        own = OWN_NAME.format("MyData", "")
        name = reader.unknown_type(key, name, typed.location, datasets.DATASETS, own)
    if name is None or name == "blend":  # a misspelt blend, whose parts are read once its type is corrected
        reader.invalid.add(key)
        return None
    made: datasets.Data = reader.fields(datasets.DATASETS[name], typed.entries, node, key, key)
    return made


def _own_data(reader: Reader, name: str, entries: list[Entry], node: Node, key: str) -> datasets.OtherData:
    ours = [entry for entry in entries if entry.name in ("eval", "seq_len")]
    rest = [entry for entry in entries if entry.name not in ("eval", "seq_len")]
    for entry in rest:
        reader.written[entry.source_key] = entry.source_key
    made = reader.fields(datasets.OtherData, ours, node, key, key, target=name)
    return replace(made, args=plain(rest))


def _parts(reader: Reader, entry: Entry) -> tuple[datasets.BlendPart, ...] | None:
    """Read the parts of a blend."""
    reader.written[entry.source_key] = entry.source_key
    parts = entry.node.value
    if not isinstance(parts, SEQUENCE) or not parts:
        reader.report("CFG102", entry.node.location, "data.parts must be a list of dicts", _PARTS_HELP, "data.parts")
        return None
    made = [_part(reader, node, f"data.parts.{number}") for number, node in enumerate(parts)]
    found = tuple(part for part in made if part is not None)
    if len(found) < len(made):
        reader.invalid.add("data.parts")
    return found


def _part(reader: Reader, node: Node, key: str) -> datasets.BlendPart | None:
    reader.written[key] = key
    if not node.is_mapping:
        reader.report("CFG102", node.location, f"{key} must be a dict", _PARTS_HELP, key)
        return None
    typed = reader.typed(node, key, "dslpar.data.", "text")
    if typed.name == "blend":
        message, hint = (
            f"{key} cannot be 'blend': a part of a blend cannot be a blend",
            "choose its parts, and list them here",
        )
        reader.report("CFG108", typed.location, message, hint, f"{key}.type", key)
        return None
    weights = [entry for entry in typed.entries if entry.name == "weight"]
    rest = [entry for entry in typed.entries if entry.name != "weight"]
    dataset = _dataset(reader, typed._replace(entries=rest), node, key)
    if dataset is None:
        return None
    part: datasets.BlendPart = reader.fields(datasets.BlendPart, weights, node, key, key, dataset=dataset)
    return part
